"""Process groups of one worker: made when a plan needs them, dropped when it no longer does.

A group is known by its purpose, the generation it was made in, and its members, so that the members agree on
it without talking. A group in which something went wrong is never destroyed (destroying a stuck Gloo group
blocks): it is kept aside, and a new one is formed beside it.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from oobleck.control.standing import Interrupted, PeerLost
from oobleck.planner import Place

from .doorbell import no_place_to_listen
from .inbox import Inbox
from .rendezvous import Board, BoardStore
from .signals import Signals

__all__ = ["Group", "GroupKey", "GroupTable", "Reduction", "open_device"]

_FORMING_TIMEOUT_S = 60.0
_TRAFFIC_TIMEOUT_S = 24 * 3600.0  # peers are declared lost by the control plane, never by a timeout down here
_MAX_PARALLEL = 8


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """What the members of a group agree on without talking."""

    purpose: Literal["pipeline", "stage", "reduce", "transfer"]
    generation: int
    members: tuple[Place, ...]

    @property
    def name(self) -> str:
        digest = hashlib.blake2s(";".join(map(str, self.members)).encode(), digest_size=8).hexdigest()
        return f"{self.generation}/{self.purpose}/{digest}"


class Group:
    """A formed group, seen from one of its members."""

    def __init__(self, key: GroupKey, place: Place, process_group: ProcessGroupGloo, store: Store) -> None:
        self.key = key
        self.rank = key.members.index(place)
        self._process_group: Any = process_group  # torch's stubs leave out what a backend inherits
        self._inboxes: dict[int, Inbox] = {}
        self._store = store  # torch keeps no reference to a store that is written in Python

    @property
    def others(self) -> tuple[Place, ...]:
        """All members but this worker."""
        return tuple(place for rank, place in enumerate(self.key.members) if rank != self.rank)

    def rank_of(self, place: Place) -> int:
        return self.key.members.index(place)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Work:
        """Post a send of a contiguous tensor, which must not change until the receiver has it."""
        try:
            work: Work = self._process_group.send([tensor], target, tag)
        except RuntimeError as error:
            raise PeerLost(f"send to {self.key.members[target]}: {error}") from error
        return work

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Block until the tensor is filled. Raises PeerLost."""
        try:
            self.post_receive(tensor, source, tag).wait()
        except RuntimeError as error:
            raise PeerLost(f"receive from {self.key.members[source]}: {error}") from error

    def post_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Work:
        """Begin to fill a tensor; its contents are there once the returned work was waited for."""
        try:
            work: Work = self._process_group.recv([tensor], source, tag)
        except RuntimeError as error:
            raise PeerLost(f"receive from {self.key.members[source]}: {error}") from error
        return work

    def inbox(self, source: int, signals: Signals) -> Inbox:
        """Return the one inbox for what `source` sends."""
        if source not in self._inboxes:
            self._inboxes[source] = Inbox(self.key.members[source], signals)
        return self._inboxes[source]

    def close(self) -> None:
        """Let go of the helper threads; the group itself stays, as what is stuck in it cannot be ended."""
        for inbox in self._inboxes.values():
            inbox.close()

    def all_reduce(self, tensor: torch.Tensor, signals: Signals) -> Reduction:
        """Post a sum over the members, in place."""
        try:
            return Reduction(self, self._process_group.allreduce([tensor], dist.AllreduceOptions()), signals)
        except RuntimeError as error:
            raise PeerLost(f"all-reduce in {self.key.name}: {error}") from error


class Reduction:
    """An all-reduce under way. The waiting is interruptible: a frozen peer never answers."""

    def __init__(self, group: Group, work: Work, signals: Signals) -> None:
        self._group = group
        self._signals = signals
        self._future = work.get_future()
        self._future.add_done_callback(lambda _: signals.announce())

    def wait(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the sum. Raises Interrupted, or PeerLost when a member failed."""
        self._signals.wait(self._future.done, interrupted, self._group.others)
        try:
            self._future.value()
        except RuntimeError as error:
            raise PeerLost(f"all-reduce in {self._group.key.name}: {error}") from error


class GroupTable:
    """The groups that this worker is a member of."""

    def __init__(self, place: Place, address: str, board: Board, signals: Signals) -> None:
        self._place = place
        self._board = board
        self._signals = signals
        self._groups: dict[GroupKey, Group] = {}
        self._abandoned: list[Group] = []
        self._device = open_device(address)

    def __getitem__(self, key: GroupKey) -> Group:
        return self._groups[key]

    def form(self, keys: Iterable[GroupKey], interrupted: Callable[[], bool]) -> None:
        """Form those of the groups that are not there yet, all at once.

        Each forming is a barrier among the group's members; in parallel no order of theirs can deadlock.
        Raises Interrupted, or PeerLost when a member does not come.
        """
        missing = sorted({key for key in keys if key not in self._groups and len(key.members) > 1})
        if not missing:
            return

        def form_all() -> list[Group]:
            with ThreadPoolExecutor(min(len(missing), _MAX_PARALLEL)) as pool:
                return list(pool.map(self._form_one, missing))

        try:
            others = {place for key in missing for place in key.members} - {self._place}
            formed = self._signals.call(form_all, interrupted, sorted(others))
        except Interrupted:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise PeerLost(f"forming groups of generation {missing[0].generation}: {error}") from error
        self._groups.update((group.key, group) for group in formed)

    def keep_only(self, keys: Iterable[GroupKey]) -> None:
        """Put every other group aside."""
        wanted = set(keys)
        for key in sorted(self._groups.keys() - wanted):
            group = self._groups.pop(key)
            group.close()
            self._abandoned.append(group)

    def _form_one(self, key: GroupKey) -> Group:
        nodes = tuple(sorted({place.node for place in key.members}))
        store = BoardStore(self._board, nodes, _FORMING_TIMEOUT_S)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._devices = [self._device]
        options._timeout = timedelta(seconds=_FORMING_TIMEOUT_S)
        prefixed = PrefixStore(key.name, store)
        group = ProcessGroupGloo(prefixed, key.members.index(self._place), len(key.members), options)
        group.set_timeout(timedelta(seconds=_TRAFFIC_TIMEOUT_S))
        return Group(key, self._place, group, store)


def open_device(address: str) -> object:
    """Open the network device of an address, a host name or a network interface of this machine.

    Raises ConfigError where nobody can listen there.
    """
    try:
        if address in (name for _, name in socket.if_nameindex()):
            return ProcessGroupGloo.create_device(interface=address)
        return ProcessGroupGloo.create_device(hostname=address)
    except RuntimeError as error:
        raise no_place_to_listen(address) from error
