"""Where a worker computes: which device is its own, what it has, and what can carry sums between such devices.

The one module that asks torch about GPUs for the sake of training; where there are none, all of it is about the CPU.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from oobleck.control.steps import PeerLost
from oobleck.errors import ConfigError

from .listening import interface_of

DEVICE_FAILURES = (torch.AcceleratorError, torch.OutOfMemoryError)
"""What torch raises about this worker's own device: no peer is to blame, and a device that has failed once computes
nothing more in this process. Both are RuntimeErrors, as those of groups are."""

_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""The most that a GPU has. Of streams that share a queue one waits for another's kernels, and CUDA's 8 queues are fewer
than the streams in use: a message could wait for a sum that spins until its receiver has gone on."""
_GIB = 1 << 30
_MEMORY_LEFT = 0.1
"""Share of a GPU's memory that is left to its contexts, libraries and torch's allocator."""


class Carrier(StrEnum):
    """What sums tensors over the members of a group."""

    GLOO = "gloo"
    """Through the host's memory: any devices, shared ones too."""
    NCCL = "nccl"
    """Between GPUs, one a member."""


def choose_device(kind: str, number: int, *, num_devices: int | None = None) -> torch.device:
    """Return the device of a worker: the CPU, or the GPU that its machine counts as `number`.

    Raises ConfigError where there is no such GPU; `num_devices` is how many there are, which torch is asked for.
    """
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.setdefault(*_QUEUES)  # read when CUDA is first used
    count = torch.cuda.device_count() if num_devices is None else num_devices
    if count == 0:
        raise ConfigError("device: there is no CUDA device here that torch can use")
    if number >= count:
        raise ConfigError(
            f"device: this machine has {count} CUDA devices, numbered from 0, and the hostfile asks for {number}; "
            "change slots= or devices="
        )
    return torch.device(kind, number)


def use_device(device: torch.device) -> None:
    """Have this thread compute on a device where none is named."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_memory_bytes(device: torch.device, *, num_sharing: int, wanted_bytes: int | None = None) -> int | None:
    """Return what one of `num_sharing` workers on a GPU may use of its memory; None for a CPU, of which others know.

    A worker that is alone there may use what is free: what other programs hold is not the job's. Those that share a
    GPU cannot tell these from each other, and divide all of it. Whole GiB, so that a little more or less that is free
    changes no plan. With `wanted_bytes`, which a job asks for, it is that much. Raises ConfigError where it is not
    there.
    """
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    there = free if num_sharing == 1 else total // num_sharing
    usable = there - int(total * _MEMORY_LEFT) // num_sharing
    if (wanted_bytes or _GIB) > (there if wanted_bytes else usable):
        asked = f"device_memory_bytes asks for {_gib(wanted_bytes)}" if wanted_bytes else "there is no room for a model"
        raise ConfigError(
            f"device: {asked}, and a worker on {device} can have {_gib(there)} of its {_gib(total)}, of which "
            f"{_gib(free)} are free; end what else runs there (nvidia-smi names it), or choose other devices with "
            "devices="
        )
    return wanted_bytes or usable // _GIB * _GIB


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def device_identity(device: torch.device) -> str | None:
    """Return what identifies a GPU among all in the world; None for what NCCL cannot reach from here."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return str(properties.uuid)


def carrier_of(identities: Sequence[str | None]) -> Carrier:
    """Say what carries the sums of a group whose members compute on these devices.

    NCCL wants each member to have a GPU of its own; all members come to the same answer, as they look at the same list.
    """
    is_distinct = len(set(identities)) == len(identities)
    return Carrier.NCCL if identities and None not in identities and is_distinct else Carrier.GLOO


def prepare_nccl(address: str) -> None:
    """Have NCCL's groups leave it to us what is done about lost peers; before the first of them is made.

    Torch's watchdog would end the process when a peer is gone, or when a sum takes long. NCCL connects over the
    interface of this worker's `address`, unless its own variable says otherwise.
    """
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"


class DeviceWork:
    """What one thread gives a GPU to compute: whether it is done, and how long the GPU took, by the GPU's own clock.

    The host only launches it: what the host's clock says of that is mostly how long the launches took, or how long
    others were waited for while the GPU computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[tuple[Any, Any]] = []
        self._mark: Any = None

    @classmethod
    def on(cls, device: torch.device) -> DeviceWork | None:
        """Return that of a GPU; None for a CPU, where everything is done when the call returns."""
        return cls(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Forget what was timed before."""
        self._pieces.clear()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """What is launched in the block is timed."""
        began = self._event(is_timed=True)
        yield
        self._pieces.append((began, self._event(is_timed=True)))

    def mark(self) -> None:
        """Look for what was launched so far from now on, on this thread's stream alone.

        Waiting for the whole device would wait for NCCL's kernels as well, which spin when a peer is lost until they
        are aborted (NVIDIA/nccl issue 585).
        """
        self._mark = self._event(is_timed=False)

    def is_done(self) -> bool:
        """Return whether all that was launched before the mark is done. Never blocks."""
        return bool(self._mark.query())

    def seconds(self) -> float:
        """Return how long the GPU took for the pieces, once they are done."""
        return float(sum(began.elapsed_time(ended) for began, ended in self._pieces)) / 1e3

    def _event(self, *, is_timed: bool) -> Any:
        event: Any = torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@contextmanager
def blaming_peers(what: str) -> Iterator[None]:
    """Within the block, a failure of torch's groups is a PeerLost that says `what` failed; one of the device is not."""
    try:
        yield
    except DEVICE_FAILURES:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what}: {error}") from error


def start_thread(target: Callable[[], None], *, name: str, device: torch.device) -> None:
    """Start a thread that does not keep the process, and that computes on this worker's device where none is named.

    In a thread that is not told, CUDA's is the first: a context there takes half a gigabyte of another worker's GPU.
    """

    def run() -> None:
        use_device(device)
        target()

    threading.Thread(target=run, daemon=True, name=name).start()
