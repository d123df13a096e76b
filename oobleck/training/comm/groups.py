"""The process groups of one worker: formed when a plan needs them, dropped when no plan does.

A key (purpose, generation, members) identifies a group, so the members agree on it without exchanging anything. Each
group has its own network (`network.py`) and ends with it, so groups without a lost member outlive the others. Dropping
a group never waits for whatever is stuck in it. `group.py` decides what carries messages and sums, and `nccl_groups.py`
which NCCL communicators a group opens, in which order.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from .nccl import abort_all
from .nccl_groups import PURPOSES_THAT_SUM, Communicator, NcclLibrary, NcclOpener, TorchNccl
from .network import Network, open_device
from .peer_links import PeerLinks
from .rendezvous import RendezvousStore, RendezvousTable
from .staging import TRAFFIC_TIMEOUT_S, CopyStreams
from .waiter import Calls, Waiter

_FORMING_TIMEOUT_S = 60.0
_MAX_PARALLEL = 8
_SPARE_DESCRIPTORS = 16
_NETWORK_DESCRIPTORS = 5  # what a network opens besides its connections
# After a fence no worker awaits a sum across pipelines, but a whole pipeline still needs those within its stages, to
# finish its microbatches.
_PURPOSES_FENCED = ("reduce", "evaluation")
_PURPOSES_OF_A_PIPELINE = ("pipeline", "stage")
_RING_TAG = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Forming:
    generation: int
    networks: dict[GroupKey, Network]
    formed: list[Group]
    calls: Calls[None]


class GroupTable:
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
        """`stages` as in `Group`. `degree` is the number of devices that share a stage. `owns_device` says that no
        other worker computes on this device. `library` replaces torch's NCCL. A member that has not joined a group
        within `forming_timeout_s` is lost. Raises ConfigError for an unusable address.
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
        self._received = RendezvousTable()
        self._log = WorkerLog(__name__, worker_id)
        self._address = address
        self._groups: dict[GroupKey, Group] = {}
        self._networks: dict[GroupKey, Network] = {}
        self._forming: _Forming | None = None
        open_device(address)  # an unusable address fails at the start, not in the first plan

    def __getitem__(self, key: GroupKey) -> Group:
        return self._groups[key]

    def find(self, key: GroupKey) -> Group | None:
        """Return a formed group, or None for a group of this worker alone."""
        return self._groups[key] if len(key.members) > 1 else None

    def take(self, value: GroupValue) -> None:
        """Store a rendezvous value from another member of a group. Any thread may call this."""
        self._received.put(value.key, value.value, generation=value.generation)

    @property
    def num_received(self) -> int:
        """The number of stored rendezvous values, all of groups that are not formed yet."""
        return len(self._received)

    def form(
        self,
        keys: Iterable[GroupKey],
        interrupted: Callable[[], bool],
        *,
        generation: int,
        beside: Iterable[GroupKey] = (),
        largest: Mapping[GroupKey, int] | None = None,
    ) -> bool:
        """Form the groups that do not exist yet, all at once, under the plan update of a generation.

        Groups in `beside` form in the background and are usable once `await_formed` has returned. Returns whether any
        do. `largest` has the number of elements of a group's largest sum.

        Raises Interrupted, PeerLost when a member does not join, or ConfigError when too few sockets can be opened.
        """
        missing = self._missing(keys)
        later = [key for key in self._missing(beside) if key not in missing]
        # In the background, NCCL would open communicators amid messages between stages.
        if self._opener.is_wanted:
            missing, later = sorted([*missing, *later]), []
        connections = sum(len(self._neighbours(key)) + _NETWORK_DESCRIPTORS for key in [*missing, *later])
        if connections:
            _require_descriptors(connections)
        # Forming is a barrier among a group's members. All groups form in parallel, so no order can deadlock.
        if later:
            assert self._forming is None, "one plan's groups at a time"
            self._forming = self._begin(later, generation, largest or {})
        if missing:
            forming = self._begin(missing, generation, largest or {})
            self._finish(forming, interrupted)
        return bool(later)

    def await_formed(self, interrupted: Callable[[], bool]) -> None:
        """Wait, once, for the groups that form in the background. Raises as `form`."""
        forming, self._forming = self._forming, None
        assert forming is not None, "nothing is being formed"
        self._finish(forming, interrupted)

    def abandon_forming(self) -> None:
        """Give up the groups that form in the background, if any."""
        forming, self._forming = self._forming, None
        if forming is not None:
            self._give_up_forming(forming)

    def abort_fenced(self, *, is_pipeline_stopped: bool) -> None:
        """Abort what a fence stops on the GPU: sums across pipelines, and everything of a pipeline that lost a node.

        Any thread may call this, since the training thread may be stuck behind such work.
        """
        # A pipeline's even without open work, since the other end, or this worker's own training thread, may be about
        # to launch some. No plan keeps them.
        stopped = _PURPOSES_OF_A_PIPELINE if is_pipeline_stopped else ()
        self._abort(
            lambda group: (
                group.key.purpose in stopped or (group.key.purpose in _PURPOSES_FENCED and group.has_open_sums)
            )
        )

    def abort_sums(self) -> None:
        """Abort all open sums on the GPU. Any thread may call this."""
        self._abort(lambda group: group.key.purpose in PURPOSES_THAT_SUM and group.has_open_sums)

    def _abort(self, is_doomed: Callable[[Group], bool]) -> None:
        # Without an open sum a group stays intact, since the next plan may keep it. A copy, because the training thread
        # may add or drop groups meanwhile.
        doomed = [group for group in list(self._groups.values()) if is_doomed(group)]
        abort_all(nccl for group in doomed for nccl in group.give_up())

    def keep_only(self, keys: Iterable[GroupKey], *, generation: int) -> None:
        """Drop all other groups, and the rendezvous values of older generations."""
        self.put_aside(sorted(self._groups.keys() - set(keys)))
        self._received.forget_before(generation)

    def put_aside(self, keys: Iterable[GroupKey]) -> None:
        """Drop groups, and the links that have carried nothing since groups were last dropped."""
        for key in keys:
            if (group := self._groups.pop(key, None)) is not None:
                self._log.debug("puts %s aside", key.name)
                group.close()
                self._networks.pop(key).end()
        self._links.trim()

    # --- forming ---------------------------------------------------------------------------------------------

    def _missing(self, keys: Iterable[GroupKey]) -> list[GroupKey]:
        return sorted({key for key in keys if key not in self._groups and len(key.members) > 1})

    def _begin(self, keys: Sequence[GroupKey], generation: int, largest: Mapping[GroupKey, int]) -> _Forming:
        # Opened on this thread, so that giving up can end them however far the forming thread is.
        networks = {key: Network(self._address, is_lazy=_is_ring(key)) for key in keys}
        formed: list[Group] = []

        def form_all() -> None:
            with ThreadPoolExecutor(min(len(keys), _MAX_PARALLEL)) as pool:
                formed.extend(pool.map(lambda key: self._form_one(key, networks[key], generation), keys))
            # Communicators open one after the other, in an order that all workers share (`nccl_groups.py`).
            groups = {group.key: group for group in formed}
            for wanted in self._opener.wanted(groups):
                key = wanted.key
                self._open_nccl(groups[key], wanted, networks[key], generation, largest=largest.get(key, 0))

        return _Forming(generation, networks, formed, self.waiter.begin([form_all]))

    def _finish(self, forming: _Forming, interrupted: Callable[[], bool]) -> None:
        """Wait until groups are formed and register them, or give them up and raise as `form`."""
        others = {worker_id for key in forming.networks for worker_id in key.members} - {self._worker_id}
        try:
            self.waiter.end(forming.calls, interrupted, sorted(others))
        except (Interrupted, *DEVICE_FAILURES):
            # This clause comes first: a failure of the own device is a RuntimeError too, and blames no peer.
            self._give_up_forming(forming)
            raise
        except (RuntimeError, TimeoutError, PeerLost) as error:
            self._give_up_forming(forming)
            raise PeerLost(f"forming groups of generation {forming.generation}: {error}") from error
        for group in forming.formed:
            self._log.debug("has formed %s with %s", group.key.name, ", ".join(map(str, group.others)))
        self._groups.update((group.key, group) for group in forming.formed)
        self._networks |= forming.networks
        self._received.forget([group.key.name for group in forming.formed])

    def _give_up_forming(self, forming: _Forming) -> None:
        for group in forming.formed:
            group.close()
        for network in forming.networks.values():
            network.end()
        # The threads left behind wait for values that may never arrive, and see that it is over only when woken.
        self._received.wake()

    def _neighbours(self, key: GroupKey) -> list[WorkerId]:
        rank, size = key.members.index(self._worker_id), len(key.members)
        # Gloo's sums travel around a ring, so a member that only sums needs two connections, whatever the group's size.
        if _is_ring(key):
            return sorted({key.members[rank - 1], key.members[(rank + 1) % size]})
        return [worker_id for worker_id in key.members if worker_id != self._worker_id]

    def _form_one(self, key: GroupKey, network: Network, generation: int) -> Group:
        store = self._store_of(key, network, generation, readers=self._neighbours(key))
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._timeout = timedelta(seconds=self._forming_timeout_s)
        prefixed = PrefixStore(key.name, store)
        with network.forming() as device:
            options._devices = [device]
            process_group = ProcessGroupGloo(prefixed, key.members.index(self._worker_id), len(key.members), options)
            group = Group(
                key, self._worker_id, process_group, store, self.waiter, stages=self._stages, streams=self._streams
            )
            # Kept before anything can fail, since destroying a group waits for its connections to end.
            network.keep(group)
            if _is_ring(key):
                _connect(process_group, [key.members.index(each) for each in self._neighbours(key)])
            # Once formed, the control plane declares peers lost, never a timeout of Gloo's.
            process_group.set_timeout(timedelta(seconds=TRAFFIC_TIMEOUT_S))
            # Strangers are shut out here already, since the training thread may be late to wait for the group.
            network.close_door()
        return group

    def _open_nccl(
        self, group: Group, wanted: Communicator, network: Network, generation: int, *, largest: int
    ) -> None:
        """Open a communicator for a group, if NCCL can carry its traffic. A barrier among the members."""
        nccl = self._opener.join(wanted, lambda others: self._store_of(group.key, network, generation, readers=others))
        if nccl is None:
            return
        if wanted.is_way:
            source, target = wanted.ranks
            group.use_way(nccl, source, target, self._forming_timeout_s)
        else:
            group.use_nccl(nccl, self._forming_timeout_s, largest=largest)

    def _store_of(
        self, key: GroupKey, network: Network, generation: int, readers: Iterable[WorkerId]
    ) -> RendezvousStore:
        def push(name: str, value: bytes) -> None:
            for worker_id in readers:
                self._links.send(worker_id, GroupValue(generation=generation, key=name, value=value))

        return RendezvousStore(
            self._received,
            push,
            self._forming_timeout_s,
            group=key.name,
            generation=generation,
            is_over=lambda: network.is_over,
        )


def _is_ring(key: GroupKey) -> bool:
    return key.purpose == "reduce"


def _connect(process_group: Any, ranks: Sequence[int]) -> None:
    # A lazy device connects on the first send, and must do so before the network closes its door.
    outgoing, incoming = [torch.zeros(1) for _ in ranks], [torch.zeros(1) for _ in ranks]
    posted = [process_group.send([word], rank, _RING_TAG) for word, rank in zip(outgoing, ranks, strict=True)]
    posted += [process_group.recv([word], rank, _RING_TAG) for word, rank in zip(incoming, ranks, strict=True)]
    for each in posted:
        each.wait()


def _require_descriptors(num_connections: int) -> None:
    """Raise ConfigError if the process may not open `num_connections` more."""
    # Gloo itself ends the process when no descriptor is left.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_connections + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ConfigError(
            f"a worker needs {needed} open files to reach all others, and may have {limit} on this node; raise the "
            "limit there (`ulimit -n`, up to `ulimit -Hn`, which its administrator sets)"
        )
