"""Process groups of one worker: made when a plan needs them, dropped when it no longer does.

A group is known by its purpose, the generation it was made in, and its members, so that the members agree on
it without talking. Each has a network of its own (`network.py`) and ends with it, so those that lost nobody outlive
others. What is put aside is never waited for, whatever is stuck in it; it ends by itself.

Sums go round rings, so that a member of a group that only sums connects to two others, however many there are.

What carries messages and sums in a group is the group's affair (`group.py`); which communicators of NCCL's are opened
for it, and in which order, that of `nccl_groups.py`.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from oobleck.control.protocol import GroupValue
from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .devices import DEVICE_FAILURES
from .group import Group
from .nccl_groups import PURPOSES_THAT_SUM, Communicator, NcclLibrary, NcclOpener, TorchNccl
from .network import Network, open_device
from .peer_links import PeerLinks
from .rendezvous import RendezvousStore, RendezvousTable
from .staging import TRAFFIC_TIMEOUT_S, CopyStreams
from .waiter import Calls, Waiter

_FORMING_TIMEOUT_S = 60.0
_MAX_PARALLEL = 8
_SPARE_DESCRIPTORS = 16
"""For what is opened now and then."""
_NETWORK_DESCRIPTORS = 5
"""What a network has of its own."""
_PURPOSES_FENCED = ("reduce", "evaluation")
"""Groups in which nobody waits for a sum any more once a fence has come; `GroupKey` has the words."""
_PURPOSES_OF_A_PIPELINE = ("stage",)
"""Those whose sums a pipeline needs that finishes its microbatches through a fence."""
_RING_TAG = (1 << 31) - 1
"""Of the messages with which neighbours in a ring connect."""


@dataclass(frozen=True, slots=True)
class _Forming:
    """Groups that are being formed, under the plan update of a generation."""

    generation: int
    networks: dict[GroupKey, Network]
    formed: list[Group]
    """Those that are formed; the thread that forms them adds them."""
    calls: Calls[None]
    """What forms them."""


class GroupTable:
    """The groups that this worker is a member of."""

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        links: PeerLinks,
        waiter: Waiter,
        *,
        stages: bool = False,
        degree: int = 1,
        owns_device: bool = True,
        library: NcclLibrary | None = None,
        forming_timeout_s: float = _FORMING_TIMEOUT_S,
    ) -> None:
        """`stages` as in `Group`; `degree` is how many devices share a stage, `owns_device` if no other worker computes
        on this one's; `library` stands for torch's NCCL. A member that has not come to a group within the time is lost.
        Raises ConfigError for a useless address.
        """
        self._forming_timeout_s = forming_timeout_s
        self.waiter = waiter
        self._opener = NcclOpener(
            worker_id, waiter.device, library or TorchNccl(address), degree=degree, owns_device=owns_device
        )
        self._stages = stages
        self._streams = CopyStreams.on(waiter.device)
        self._worker_id = worker_id
        self._links = links
        self._told = RendezvousTable()
        self._log = WorkerLog(__name__, worker_id)
        self._address = address
        self._groups: dict[GroupKey, Group] = {}
        self._networks: dict[GroupKey, Network] = {}
        """Of these groups."""
        self._forming: _Forming | None = None
        """What is formed beside what is computed."""
        open_device(address)  # a useless address is found at the start, not in the first plan

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self.waiter.device

    def __getitem__(self, key: GroupKey) -> Group:
        return self._groups[key]

    def find(self, key: GroupKey) -> Group | None:
        """Return a group that was formed; None for one of this worker alone."""
        return self._groups[key] if len(key.members) > 1 else None

    def take(self, value: GroupValue) -> None:
        """Take in what a member of a group tells the others. Any thread may."""
        self._told.put(value.key, value.value, generation=value.generation)

    @property
    def num_told(self) -> int:
        """How much of what members have told is kept, for groups that are not formed yet."""
        return len(self._told)

    def form(
        self,
        keys: Iterable[GroupKey],
        interrupted: Callable[[], bool],
        *,
        generation: int,
        beside: Iterable[GroupKey] = (),
    ) -> bool:
        """Form those of the groups that are not there yet, all at once, under the plan update of a generation.

        Those that are formed `beside` what follows can be used once `await_formed` has returned; returns whether there
        are any. Where NCCL may carry their sums, there are none: it would open its communicators in the midst of
        messages between stages.

        Each forming is a barrier among the group's members; in parallel no order of theirs can deadlock.
        Raises Interrupted, or PeerLost when a member does not come; ConfigError where this process may not open as
        many sockets, for Gloo would end it.
        """
        missing = self._missing(keys)
        later = [key for key in self._missing(beside) if key not in missing]
        if self._opener.is_wanted:
            missing, later = sorted([*missing, *later]), []
        connections = sum(len(self._neighbours(key)) + _NETWORK_DESCRIPTORS for key in [*missing, *later])
        if connections:
            _require_descriptors(connections)
        if later:
            assert self._forming is None, "one plan's groups at a time"
            self._forming = self._begin(later, generation)
        if missing:
            forming = self._begin(missing, generation)
            self._finish(forming, interrupted)
        return bool(later)

    def await_formed(self, interrupted: Callable[[], bool]) -> None:
        """Wait, once, until those groups are formed that are formed beside what is computed. Raises as `form`."""
        forming, self._forming = self._forming, None
        assert forming is not None, "nothing is being formed"
        self._finish(forming, interrupted)

    def abandon_forming(self) -> None:
        """Give up what is being formed beside what was computed, if anything is."""
        forming, self._forming = self._forming, None
        if forming is not None:
            self._give_up_forming(forming)

    def abort_fenced(self, *, is_pipeline_stopped: bool) -> None:
        """End what a fence stops on the GPU: sums over pipelines, and all of a pipeline that has lost a node.

        Any thread may: the training thread may be stuck behind it. A whole pipeline finishes its microbatches through
        the fence, and so needs its sums and its edges.
        """
        self.abort_sums(_PURPOSES_FENCED)
        if is_pipeline_stopped:
            self.abort_sums(_PURPOSES_OF_A_PIPELINE)
            for group in list(self._groups.values()):
                if group.key.purpose == "pipeline":
                    group.abort()  # with what is not open: the other end may be about to launch something

    def abort_sums(self, purposes: Collection[str] = PURPOSES_THAT_SUM) -> None:
        """End sums of groups of these purposes on the GPU: nobody waits for them any more. Any thread may.

        What no sum is open in is left as it is: the plan that follows may keep it.
        """
        for group in list(self._groups.values()):
            if group.key.purpose in purposes:
                group.abort_open_sums()

    def keep_only(self, keys: Iterable[GroupKey], *, generation: int) -> None:
        """Let go of every other group, and of what is known of groups of older generations: none is formed any more."""
        self.put_aside(sorted(self._groups.keys() - set(keys)))
        self._told.forget_before(generation)

    def put_aside(self, keys: Iterable[GroupKey]) -> None:
        """Let go of groups that were formed, and of the links that nothing has gone over since groups were last."""
        unwanted = [key for key in keys if key in self._groups]
        for key in unwanted:
            self._log.debug("puts %s aside", key.name)
        self._give_up([self._groups.pop(key) for key in unwanted])
        self._links.trim()

    def _give_up(self, groups: Iterable[Group]) -> None:
        """Close groups, and end their networks."""
        for group in groups:
            group.close()
            self._networks.pop(group.key).end()

    # --- forming ---------------------------------------------------------------------------------------------

    def _missing(self, keys: Iterable[GroupKey]) -> list[GroupKey]:
        return sorted({key for key in keys if key not in self._groups and len(key.members) > 1})

    def _begin(self, keys: Sequence[GroupKey], generation: int) -> _Forming:
        """Begin to form groups, on threads that may be left behind."""
        networks = {key: Network(self._address, is_lazy=_is_ring(key)) for key in keys}
        formed: list[Group] = []

        def form_all() -> None:
            with ThreadPoolExecutor(min(len(keys), _MAX_PARALLEL)) as pool:
                formed.extend(pool.map(lambda key: self._form_one(key, networks[key], generation), keys))
            groups = {group.key: group for group in formed}
            for wanted in self._opener.wanted(groups):
                self._open_nccl(groups[wanted.key], wanted, networks[wanted.key], generation)

        return _Forming(generation, networks, formed, self.waiter.begin([form_all]))

    def _finish(self, forming: _Forming, interrupted: Callable[[], bool]) -> None:
        """Wait until groups are formed, and have them used. Raises as `form`; then they are given up."""
        others = {worker_id for key in forming.networks for worker_id in key.members} - {self._worker_id}
        try:
            self.waiter.end(forming.calls, interrupted, sorted(others))
        except (Interrupted, *DEVICE_FAILURES):
            self._give_up_forming(forming)
            raise
        except (RuntimeError, TimeoutError, PeerLost) as error:
            self._give_up_forming(forming)
            raise PeerLost(f"forming groups of generation {forming.generation}: {error}") from error
        for group in forming.formed:
            self._log.debug("has formed %s with %s", group.key.name, ", ".join(map(str, group.others)))
        self._groups.update((group.key, group) for group in forming.formed)
        self._networks |= forming.networks
        self._told.forget([group.key.name for group in forming.formed])

    def _give_up_forming(self, forming: _Forming) -> None:
        for group in forming.formed:
            group.close()
        for network in forming.networks.values():
            network.end()
        self._told.wake()

    def _neighbours(self, key: GroupKey) -> list[WorkerId]:
        """The members that this one connects to."""
        rank, size = key.members.index(self._worker_id), len(key.members)
        if _is_ring(key):
            return sorted({key.members[rank - 1], key.members[(rank + 1) % size]})
        return [worker_id for worker_id in key.members if worker_id != self._worker_id]

    def _form_one(self, key: GroupKey, network: Network, generation: int) -> Group:
        store = self._store_of(network, generation, readers=self._neighbours(key))
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._timeout = timedelta(seconds=self._forming_timeout_s)
        prefixed = PrefixStore(key.name, store)
        with network.forming() as device:
            options._devices = [device]
            process_group = ProcessGroupGloo(prefixed, key.members.index(self._worker_id), len(key.members), options)
            group = Group(
                key, self._worker_id, process_group, store, self.waiter, stages=self._stages, streams=self._streams
            )
            network.keep(group)
            if _is_ring(key):
                _connect(process_group, [key.members.index(each) for each in self._neighbours(key)])
            process_group.set_timeout(timedelta(seconds=TRAFFIC_TIMEOUT_S))
            network.close_door()  # here: it may be long until somebody waits for the group
        return group

    def _open_nccl(self, group: Group, wanted: Communicator, network: Network, generation: int) -> None:
        """Have NCCL carry what a communicator is wanted for, where it can. A barrier among its members."""
        nccl = self._opener.join(wanted, lambda others: self._store_of(network, generation, readers=others))
        if nccl is None:
            return
        if wanted.is_way:
            source, target = wanted.ranks
            group.use_way(nccl, source, target, self._forming_timeout_s)
        else:
            group.use_nccl(nccl, self._forming_timeout_s)

    def _store_of(self, network: Network, generation: int, readers: Iterable[WorkerId]) -> RendezvousStore:
        def tell(name: str, value: bytes) -> None:
            for worker_id in readers:
                self._links.send(worker_id, GroupValue(generation=generation, key=name, value=value))

        return RendezvousStore(
            self._told, tell, self._forming_timeout_s, generation=generation, is_over=lambda: network.is_over
        )


def _is_ring(key: GroupKey) -> bool:
    return key.purpose == "reduce"


def _connect(process_group: Any, ranks: Sequence[int]) -> None:
    """Exchange a message with each neighbour: a lazy device connects when something is sent."""
    words = [torch.zeros(1) for _ in range(2 * len(ranks))]
    under_way = [process_group.send([word], rank, _RING_TAG) for word, rank in zip(words, ranks, strict=False)]
    under_way += [
        process_group.recv([word], rank, _RING_TAG) for word, rank in zip(words[len(ranks) :], ranks, strict=True)
    ]
    for each in under_way:
        each.wait()


def _require_descriptors(num_connections: int) -> None:
    """Raise ConfigError where so many connections more cannot be made: Gloo ends the process in the middle of it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_connections + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"a worker needs {needed} open files to reach all others, and may have {limit} on this node; raise the "
            "limit there (`ulimit -n`, up to `ulimit -Hn`, which its administrator sets)"
        )
