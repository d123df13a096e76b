"""The NCCL communicators that a worker takes part in, and the order in which it opens them.

Opening one is a barrier among its members. Each worker opens its own one after the other, in a global order of all
communicators. All members form a group or all give it up, and a group that is given up ends with its network.
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

from .devices import can_use_nccl, device_identity, prepare_nccl
from .nccl import NcclGroup
from .staging import TRAFFIC_TIMEOUT_S

PURPOSES_THAT_SUM = ("stage", "evaluation", "reduce")
_PURPOSES_WITH_WAYS = ("pipeline", "link")
# The most blocks of a GPU that carry a message between stages: enough for a link, and few next to a computation.
_EDGE_CTAS = 2


@dataclass(frozen=True, slots=True, order=True)
class Communicator:
    """A communicator to open. All workers open them in their sort order."""

    key: GroupKey
    turn: tuple[int, int, int, int]
    """The earlier stage's parity, that stage, the device's rank in it, and the direction."""
    ranks: tuple[int, ...]
    """Its members' ranks in the group; those of a way begin with the sender."""

    @property
    def is_way(self) -> bool:
        """Whether it carries messages, from its first member to its second, instead of sums."""
        return self.key.purpose in _PURPOSES_WITH_WAYS

    @property
    def name(self) -> str:
        """Unique among all workers and generations."""
        return f"{self.key.name}/nccl" + (f"/{self.ranks[0]}-{self.ranks[1]}" if self.is_way else "")


def communicators_of(keys: Iterable[GroupKey], worker_id: WorkerId, *, degree: int) -> list[Communicator]:
    """Return a worker's communicators for some groups, in order; `degree` is the number of devices per stage."""
    communicators: list[Communicator] = []
    for key in keys:
        if key.purpose in _PURPOSES_WITH_WAYS:
            # The two workers of a link count as two stages of one device each.
            communicators += _ways(key, key.members.index(worker_id), 1 if key.purpose == "link" else degree)
        elif key.purpose in PURPOSES_THAT_SUM:
            communicators.append(Communicator(key, (0, 0, 0, 0), tuple(range(len(key.members)))))
    # In one order for all workers, the first unopened one never waits in vain: its members are at it or approach it.
    return sorted(communicators)


def _ways(key: GroupKey, rank: int, degree: int) -> Iterator[Communicator]:
    """Yield both ways to the devices of equal rank in the previous and in the next stage."""
    for first in (rank - degree, rank):
        second = first + degree
        if first >= 0 and second < len(key.members):
            stage, at = divmod(first, degree)
            # Each direction has a communicator, since all messages between two members of one take turns on a single
            # stream (`getKeySendRecv` in torch).
            for way, ranks in enumerate(((first, second), (second, first))):
                # By parity first, each worker is in one pair at a time: all edges of a pipeline open in the time of
                # four communicators, however many stages it has.
                yield Communicator(key, (stage % 2, stage, at, way), ranks)


class NcclLibrary(Protocol):
    """The operations of NCCL and CUDA that an opener needs."""

    def identity(self, device: torch.device) -> str | None:
        """Return a GPU's globally unique id, or None for a device that NCCL cannot reach from here."""

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        """Return a member's process group, which connects on its first use."""


class TorchNccl:
    def __init__(self, address: str) -> None:
        self._address = address

    def identity(self, device: torch.device) -> str | None:
        return device_identity(device)

    def join(self, name: str, store: Store, rank: int, size: int, *, is_way: bool) -> object:
        prepare_nccl(self._address)
        kind: Any = vars(dist)["ProcessGroupNCCL"]  # torch without CUDA has none
        # A priority of their own keeps messages off the streams of sums, as in `CopyStreams`.
        options = kind.Options(is_high_priority_stream=is_way)
        options._timeout = timedelta(seconds=TRAFFIC_TIMEOUT_S)
        if is_way:
            options.config.max_ctas = _EDGE_CTAS
        return kind(store, rank, size, options)


class NcclOpener:
    def __init__(
        self, worker_id: WorkerId, device: torch.device, library: NcclLibrary, *, degree: int, owns_device: bool
    ) -> None:
        self._worker_id = worker_id
        self._device = device
        self._library = library
        self._degree = degree
        self._owns_device = owns_device
        self._log = WorkerLog(__name__, worker_id)

    @property
    def is_wanted(self) -> bool:
        """Whether this worker may open communicators at all, as far as it knows alone."""
        return self._device.type == "cuda"

    def wanted(self, keys: Iterable[GroupKey]) -> list[Communicator]:
        """Return the communicators to open for some groups, in order."""
        return communicators_of(keys, self._worker_id, degree=self._degree) if self.is_wanted else []

    def join(self, wanted: Communicator, store_for: Callable[[tuple[WorkerId, ...]], Store]) -> NcclGroup | None:
        """Return this worker's unconnected end of a communicator, or None where Gloo has to carry its traffic.

        A barrier among its members, which exchange their devices' ids. `store_for(workers)` returns a store that
        pushes its values to them. Raises RuntimeError or TimeoutError.
        """
        members = [wanted.key.members[rank] for rank in wanted.ranks]
        own = members.index(self._worker_id)
        store = store_for(tuple(each for each in members if each != self._worker_id))
        prefixed = PrefixStore(wanted.name, store)
        # A worker that shares its GPU sends no id. All members get the same ids, and so choose alike.
        identity = self._library.identity(self._device) if self._owns_device else None
        prefixed.set(f"gpu/{own}", identity or "")
        identities = [prefixed.get(f"gpu/{rank}").decode() or None for rank in range(len(members))]
        if not can_use_nccl(identities):
            return None
        self._log.debug("has NCCL carry %s", wanted.name)
        process_group = self._library.join(wanted.name, prefixed, own, len(members), is_way=wanted.is_way)
        return NcclGroup(wanted.name, self._worker_id, self._device, process_group, store)
