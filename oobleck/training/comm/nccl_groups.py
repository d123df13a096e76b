"""Which communicators of NCCL's a worker takes part in, and in which order it opens them.

To open one is a barrier among its members. Each worker opens its own one after the other, in an order of all
communicators that is the same everywhere. So of those that are not open yet, the first in that order has nothing to
wait for: all of its members are at it, or on their way to it, and none can be stuck. A group is formed by all of its
members or given up by all, and what is given up ends with its network.

The ways between stages are ordered by whether the stage before is an even one, so that each worker is in one pair at a
time: all edges of a pipeline open in the time of four communicators, however many stages it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from oobleck.control.steps import GroupKey
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .devices import Carrier, carrier_of, device_identity, prepare_nccl
from .nccl import NcclGroup
from .staging import TRAFFIC_TIMEOUT_S

PURPOSES_THAT_SUM = ("stage", "evaluation", "reduce")
_PURPOSES_WITH_WAYS = ("pipeline", "link")
_EDGE_CTAS = 2
"""Blocks of a GPU that carry a message between stages, at most: enough for a link, and few for what computes."""


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """One that is to be opened. The order is that in which all workers open them."""

    key: GroupKey
    turn: tuple[int, int, int, int]
    """Among those of the group: the first stage's parity, that stage, the device's rank in it, and the way."""
    ranks: tuple[int, ...]
    """Its members, as the group counts them; of a way, the sender first."""

    @property
    def is_way(self) -> bool:
        """Whether it carries messages, from its first member to its second."""
        return self.key.purpose in _PURPOSES_WITH_WAYS

    @property
    def name(self) -> str:
        """Unique among all workers and generations."""
        return f"{self.key.name}/nccl" + (f"/{self.ranks[0]}-{self.ranks[1]}" if self.is_way else "")


def communicators_of(keys: Iterable[GroupKey], worker_id: WorkerId, *, degree: int) -> list[Communicator]:
    """Return those of a worker that its groups ask for, in their order; `degree` is how many devices share a stage."""
    found: list[Communicator] = []
    for key in keys:
        if key.purpose in _PURPOSES_WITH_WAYS:
            found += _ways(key, key.members.index(worker_id), 1 if key.purpose == "link" else degree)
        elif key.purpose in PURPOSES_THAT_SUM:
            found.append(Communicator(key, (0, 0, 0, 0), tuple(range(len(key.members)))))
    return sorted(found)


def _ways(key: GroupKey, rank: int, degree: int) -> Iterator[Communicator]:
    """Both ways to the device of like rank in the stage before, and in the stage after."""
    for first in (rank - degree, rank):
        second = first + degree
        if first >= 0 and second < len(key.members):
            stage, at = divmod(first, degree)
            for way, ranks in enumerate(((first, second), (second, first))):
                yield Communicator(key, (stage % 2, stage, at, way), ranks)


class NcclLibrary(Protocol):
    """What is asked of NCCL and CUDA: torch's, or a fake."""

    def identity(self, device: torch.device) -> str | None:
        """Return what identifies a GPU among all in the world; None for what NCCL cannot reach from here."""
        ...

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        """Return a member's process group, which connects when it is first used."""
        ...


class TorchNccl:
    """Torch's ProcessGroupNCCL."""

    def __init__(self, address: str) -> None:
        """`address` is where this worker listens."""
        self._address = address

    def identity(self, device: torch.device) -> str | None:
        return device_identity(device)

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        prepare_nccl(self._address)
        kind: Any = vars(dist)["ProcessGroupNCCL"]  # torch without CUDA has none
        options = kind.Options(is_high_priority_stream=is_way)  # as `CopyStreams`: no sum shares its stream
        options._timeout = timedelta(seconds=TRAFFIC_TIMEOUT_S)
        if is_way:
            options.config.max_ctas = _EDGE_CTAS
        return kind(store, rank, size, options)


class NcclOpener:
    """Opens communicators for one worker."""

    def __init__(
        self, worker_id: WorkerId, device: torch.device, library: NcclLibrary, *, degree: int, owns_device: bool
    ) -> None:
        """`owns_device` if no other worker computes there."""
        self._worker_id = worker_id
        self._device = device
        self._library = library
        self._degree = degree
        self._owns_device = owns_device
        self._log = WorkerLog(__name__, worker_id)

    @property
    def is_wanted(self) -> bool:
        """Whether this worker opens communicators at all, as far as it can tell alone."""
        return self._device.type == "cuda"

    def wanted(self, keys: Iterable[GroupKey]) -> list[Communicator]:
        """Return what to open for some groups, in this order."""
        return communicators_of(keys, self._worker_id, degree=self._degree) if self.is_wanted else []

    def join(self, wanted: Communicator, store_for: Callable[[tuple[WorkerId, ...]], Store]) -> NcclGroup | None:
        """Return this worker's end of a communicator, to be connected; None where Gloo carries what it would.

        A barrier among its members, each of which tells the others what it computes on. `store_for` some workers has
        what is written there told to them. Raises RuntimeError or TimeoutError.
        """
        members = [wanted.key.members[rank] for rank in wanted.ranks]
        own = members.index(self._worker_id)
        store = store_for(tuple(each for each in members if each != self._worker_id))
        prefixed = PrefixStore(wanted.name, store)
        identity = self._library.identity(self._device) if self._owns_device else None
        prefixed.set(f"gpu/{own}", identity or "")
        told = [prefixed.get(f"gpu/{rank}").decode() or None for rank in range(len(members))]
        if carrier_of(told) is not Carrier.NCCL:
            return None
        self._log.debug("has NCCL carry %s", wanted.name)
        process_group = self._library.join(wanted.name, prefixed, own, len(members), is_way=wanted.is_way)
        return NcclGroup(wanted.name, self._worker_id, self._device, process_group, store)
