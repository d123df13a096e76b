"""The device that a worker computes on: its choice, its memory, and what can carry sums between devices."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from oobleck.control.steps import PeerLost
from oobleck.errors import ConfigError

from .listening import interface_of

_log = logging.getLogger(__name__)

DEVICE_FAILURES = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors of this worker's own device, for which no peer is to blame. It computes nothing more in this process."""

# The maximum. CUDA's default of 8 queues is less than the number of streams in use, and streams that share a queue wait
# for each other's kernels: a message could wait for a sum that spins until the message's receiver has continued.
_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")

NCCL_SETTINGS = {
    # Torch's watchdog would end the process when a peer exits or a sum takes long, or when it finds an error of the
    # device before the training thread does, which knows the cause.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it would turn error handling on again
    # After an error, the watchdog records its calls and sleeps for four times the wait, and posting a sum takes as
    # long. Torch renames variables from NCCL to FR (flight recorder).
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # Threads of ours wait for communicators, and can be left behind; torch's own waits cannot be ended.
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    # NVIDIA's own fault tolerance needs it off to abort communicators (usage guide of nvidia-resiliency-ext).
    "NCCL_NVLS_ENABLE": "0",
}
"""What torch's and NVIDIA's libraries must be told, whatever a user's environment says."""

# The recorder's size until torch 2.7. Later ones read the new name first, and warn of this one for each communicator.
_RENAMED = "TORCH_NCCL_TRACE_BUFFER_SIZE"

_GIB = 1 << 30
_MEMORY_LEFT = 0.1  # share of a GPU's memory that contexts, libraries and torch's allocator need


def choose_device(
    kind: str,
    number: int,
    *,
    gpu_id: str = "",
    num_devices: int | None = None,
    id_of: Callable[[int], str] | None = None,
) -> torch.device:
    """Return the device of a worker: the CPU, or its machine's GPU `number`; where given, that with a `gpu_id`.

    `num_devices` and `id_of` replace torch's. Raises ConfigError if there is no such number, and AcceleratorError if
    the GPU with this id is gone.
    """
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.setdefault(*_QUEUES)  # CUDA reads it on its first use
    count = torch.cuda.device_count() if num_devices is None else num_devices
    if count == 0:
        raise ConfigError("device: there is no CUDA device here that torch can use")
    if gpu_id:
        # Numbers shift when a GPU is lost, and a worker that starts again would compute on a neighbour's.
        found = [other for other in range(count) if (id_of or _id_of)(other) == gpu_id]
        if not found:
            raise torch.AcceleratorError(f"GPU {number} of this machine was {gpu_id}, which is no longer there")
        return torch.device(kind, found[0])
    if number >= count:
        raise ConfigError(
            f"device: this machine has {count} CUDA devices, numbered from 0, and the hostfile asks for number "
            f"{number}; change slots= or devices="
        )
    return torch.device(kind, number)


def use_device(device: torch.device) -> None:
    """Make a device the default of this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_memory_bytes(device: torch.device, *, num_sharing: int, wanted_bytes: int | None = None) -> int | None:
    """Return how much memory one of `num_sharing` workers on a GPU may use; None for a CPU.

    Returns `wanted_bytes` if the job asks for them, else whole GiB. Raises ConfigError if the GPU does not have these.
    """
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # Workers that share a GPU cannot tell other programs' memory from each other's, so they divide all of it.
    available = free if num_sharing == 1 else total // num_sharing
    usable = available - int(total * _MEMORY_LEFT) // num_sharing
    if (wanted_bytes or _GIB) > (available if wanted_bytes else usable):
        asked = f"device_memory_bytes asks for {_gib(wanted_bytes)}" if wanted_bytes else "there is no room for a model"
        raise ConfigError(
            f"device: {asked}, and a worker on {device} can have {_gib(available)} of its {_gib(total)}, of which "
            f"{_gib(free)} are free; end what else runs there (nvidia-smi names it), or choose other devices with "
            "devices="
        )
    # Whole GiB, so that small changes of free memory change no plan.
    return wanted_bytes or usable // _GIB * _GIB


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


def gpu_id_of(device: torch.device) -> str:
    """Return a GPU's globally unique id, or an empty string for a CPU."""
    return "" if device.type == "cpu" else _id_of(device.index)


def _id_of(number: int) -> str:
    properties: Any = torch.cuda.get_device_properties(number)
    return str(properties.uuid)


def device_identity(device: torch.device) -> str | None:
    """Return a GPU's globally unique id, or None for a device that NCCL cannot reach from here."""
    return gpu_id_of(device) if device.type == "cuda" and dist.is_nccl_available() else None


def can_use_nccl(identities: Sequence[str | None]) -> bool:
    """Return whether NCCL, rather than Gloo, can connect the members that compute on these devices."""
    # NCCL requires a GPU of its own for each member.
    return bool(identities) and None not in identities and len(set(identities)) == len(identities)


def prepare_nccl(address: str) -> None:
    """Set the environment for NCCL's groups, before the first of them is made.

    NCCL connects over the interface of this worker's `address`, unless its own variable says otherwise. A log line
    names each variable whose value is replaced.
    """
    if (interface := interface_of(address)) is not None:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    for name, value in NCCL_SETTINGS.items():
        if (found := os.environ.get(name, value)) != value:
            _log.warning(
                "sets %s=%s in place of %s: with that, this worker might not survive its peers", name, value, found
            )
        os.environ[name] = value
    if _RENAMED in os.environ:
        _log.warning("unsets %s=%s, which is TORCH_FR_BUFFER_SIZE by now", _RENAMED, os.environ.pop(_RENAMED))
    # Torch has read its variable of this name on import. In detail, it would turn error handling on again.
    if get_debug_level() != DebugLevel.OFF:
        _log.warning("turns TORCH_DISTRIBUTED_DEBUG off, with which it might not survive its peers")
        set_debug_level(DebugLevel.OFF)


class DeviceWork:
    """One thread's launches on a GPU: when they are done, and how long the GPU took, by the GPU's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[tuple[Any, Any]] = []

    @classmethod
    def on(cls, device: torch.device) -> DeviceWork | None:
        """Return the work of a GPU, or None for a CPU, where everything is done when the call returns."""
        return cls(device) if device.type == "cuda" else None

    def begin(self) -> None:
        self._pieces.clear()

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Time the launches within the block."""
        # The host's clock would mostly measure the launches, or waits for other workers while the GPU computed.
        began = self._event(enable_timing=True)
        yield
        self._pieces.append((began, self._event(enable_timing=True)))

    def mark(self) -> Callable[[], None]:
        """Return a function that blocks until the launches so far are done, on this thread's stream alone.

        It needs a thread that can be left behind.
        """
        # A wait for the whole device would include NCCL's kernels, which spin after a peer is lost until they are
        # aborted (NVIDIA/nccl issue 585). Polling the event would keep the GIL while CUDA may wait for a lock.
        marked = self._event(blocking=True)  # the thread that waits uses no core
        synchronize: Callable[[], None] = marked.synchronize
        return synchronize

    def seconds(self) -> float:
        """Return how long the GPU took for the timed pieces, which must be done."""
        return float(sum(began.elapsed_time(ended) for began, ended in self._pieces)) / 1e3

    def _event(self, **options: bool) -> Any:
        event: Any = torch.cuda.Event(**options)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@contextmanager
def blaming_peers(what: str) -> Iterator[None]:
    """Within the block, turn failures of torch's groups, but not of the device, into a PeerLost that names `what`."""
    try:
        yield
    except DEVICE_FAILURES:
        # These are RuntimeErrors too, like those of groups.
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what}: {error}") from error


def start_thread(target: Callable[[], None], *, name: str, device: torch.device) -> None:
    """Start a daemon thread whose default device is this worker's."""

    def run() -> None:
        # A new thread's default is CUDA's first device, where a context takes half a gigabyte of another worker's GPU.
        use_device(device)
        target()

    threading.Thread(target=run, daemon=True, name=name).start()
