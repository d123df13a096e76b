"""Process groups of one worker: made when a plan needs them, dropped when it no longer does.

A group is known by its purpose, the generation it was made in, and its members, so that the members agree on
it without talking. Each has a network of its own (`network.py`) and ends with it, so those that lost nobody outlive
others. What is put aside is never waited for, whatever is stuck in it; it ends by itself.

Sums go round rings, so that a member of a group that only sums connects to two others, however many there are.

Gloo carries all messages, those of tensors on a GPU through the host's memory (`staging.py`). Where each member of a
group has a GPU of its own, NCCL sums tensors there; the kernels of one that is given up are aborted at once, since
they would hold up what the GPU does next.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from oobleck.control.commit import GroupKey, Interrupted, PeerLost
from oobleck.control.protocol import GroupValue
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .devices import Carrier, carrier_of, device_identity, prepare_nccl
from .inbox import Inbox
from .network import Network, open_device
from .peer_links import PeerLinks
from .rendezvous import RendezvousStore, RendezvousTable
from .staging import Courier, HostCopy, Pending, Posting, StagedReceive
from .sums import GlooSum, NcclSum, StagedSum, Sum
from .waiter import Waiter

__all__ = ["Group", "GroupKey", "GroupTable", "Reduction", "open_device"]

_FORMING_TIMEOUT_S = 60.0
_TRAFFIC_TIMEOUT_S = 24 * 3600.0  # peers are declared lost by the control plane, never by a timeout down here
_MAX_PARALLEL = 8
_SPARE_DESCRIPTORS = 16
"""For what is opened now and then."""
_NETWORK_DESCRIPTORS = 5
"""What a network has of its own."""
_NCCL_POLL_S = 1e-3
_PURPOSES_THAT_SUM = ("stage", "evaluation", "reduce")
_RING_TAG = (1 << 31) - 1
"""Of the messages with which neighbours in a ring connect."""


class Group:
    """A formed group, seen from one of its members."""

    def __init__(
        self,
        key: GroupKey,
        worker_id: WorkerId,
        process_group: ProcessGroupGloo,
        store: Store,
        waiter: Waiter,
        *,
        stages: bool = False,
    ) -> None:
        """With `stages`, tensors of any device go through the host's memory, whether they need it or not."""
        self.key = key
        self.waiter = waiter
        self.rank = key.members.index(worker_id)
        self._process_group: Any = process_group  # torch's stubs leave out what a backend inherits
        self._inboxes: dict[int, Inbox] = {}
        self._store = store  # torch keeps no reference to a store that is written in Python
        self._stages = stages
        self._courier: Courier | None = None
        self._courier_lock = threading.Lock()
        self._nccl: Any = None
        self._nccl_store: Store | None = None
        self._given_up: list[Sum] = []
        """Sums that a GPU may still write to."""

    @property
    def others(self) -> tuple[WorkerId, ...]:
        """All members but this worker."""
        return tuple(worker_id for rank, worker_id in enumerate(self.key.members) if rank != self.rank)

    def rank_of(self, worker_id: WorkerId) -> int:
        return self.key.members.index(worker_id)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        """Post a send of a contiguous tensor; one in the host's memory must not change until the receiver has it."""
        if self._is_staged(tensor):
            posting = Posting(HostCopy(tensor), lambda copy: self._send(copy, target, tag))
            self._courier_of().take(posting.run)
            return posting
        try:
            return self._send(tensor, target, tag)
        except RuntimeError as error:
            raise PeerLost(f"send to {self.key.members[target]}: {error}") from error

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Block until the tensor is filled. Raises PeerLost."""
        try:
            self.post_receive(tensor, source, tag).wait()
        except RuntimeError as error:
            raise PeerLost(f"receive from {self.key.members[source]}: {error}") from error

    def post_receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Begin to fill a tensor; its contents are there once what is returned was waited for."""

        def post(room: torch.Tensor) -> Work:
            work: Work = self._process_group.recv([room], source, tag)
            return work

        try:
            return StagedReceive(tensor, post) if self._is_staged(tensor) else post(tensor)
        except RuntimeError as error:
            raise PeerLost(f"receive from {self.key.members[source]}: {error}") from error

    def inbox(self, source: int) -> Inbox:
        """Return the one inbox for what `source` sends."""
        if source not in self._inboxes:
            self._inboxes[source] = Inbox(self.key.members[source], self.waiter)
        return self._inboxes[source]

    def close(self) -> None:
        """Let go of the helper threads; those that are stuck end with the group's network."""
        for inbox in self._inboxes.values():
            inbox.close()
        if self._courier is not None:
            self._courier.close()
        self.abort()

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """Post a sum over the members, in place."""
        try:
            return Reduction(self, self._sum(tensor, self.waiter.announce))
        except RuntimeError as error:
            raise PeerLost(f"all-reduce in {self.key.name}: {error}") from error

    def use_nccl(self, process_group: object, store: Store, first: torch.Tensor, timeout_s: float) -> None:
        """Have sums of tensors on a GPU carried by a group of NCCL's from now on.

        Its connections are made with the first sum, that of the tensor `first`, on which this blocks: on a thread that
        can be left behind. Raises RuntimeError or TimeoutError.
        """
        self._nccl, self._nccl_store = process_group, store
        under_way = self._sum(first, lambda: None)
        end_s = time.monotonic() + timeout_s
        while not under_way.is_done():
            if time.monotonic() > end_s:
                raise TimeoutError(f"NCCL has not connected {self.key.name} within {timeout_s} s")
            time.sleep(_NCCL_POLL_S)
        under_way.conclude()

    def give_up(self, under_way: Sum) -> None:
        """Wait no more for a sum, nor for any other of this group."""
        if under_way.poll_s is not None:  # one in the host's memory is kept by what may still write to it
            self._given_up.append(under_way)
        self.abort()

    def abort(self) -> None:
        """End what runs on the GPU, on a thread of its own: it may take its time."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            held = [nccl, self._nccl_store, self._given_up]
            threading.Thread(target=_abort_nccl, args=(held,), daemon=True, name=f"abort {self.key.name}").start()

    def _sum(self, tensor: torch.Tensor, announce: Callable[[], None]) -> Sum:
        if tensor.is_cuda and self._nccl is not None:
            return NcclSum(self._nccl.allreduce([tensor], dist.AllreduceOptions()), tensor)
        if self._is_staged(tensor):
            return StagedSum(tensor, self._courier_of(), self._all_reduce, announce)
        return GlooSum(self._all_reduce(tensor), announce)

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> Work:
        work: Work = self._process_group.send([tensor], target, tag)
        return work

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        work: Work = self._process_group.allreduce([tensor], dist.AllreduceOptions())
        return work

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._stages or tensor.is_cuda

    def _courier_of(self) -> Courier:
        with self._courier_lock:  # layers are sent by threads of their own
            if self._courier is None:
                self._courier = Courier(f"post in {self.key.name}")
            return self._courier


class Reduction:
    """An all-reduce under way. The waiting is interruptible: a frozen peer never answers."""

    def __init__(self, group: Group, under_way: Sum) -> None:
        self._group = group
        self._sum = under_way

    @property
    def others(self) -> tuple[WorkerId, ...]:
        """The members whose part it waits for."""
        return self._group.others

    @property
    def poll_s(self) -> float | None:
        """How often it must be looked at; None where its waiter is woken."""
        return self._sum.poll_s

    def is_done(self) -> bool:
        """Return whether the sum is there, or has failed: `wait` does not block then."""
        return self._sum.is_done()

    def give_up(self) -> None:
        """Wait for it no more."""
        self._group.give_up(self._sum)

    def wait(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the sum. Raises Interrupted, or PeerLost when a member failed."""
        try:
            self._group.waiter.wait(self._sum.is_done, interrupted, self._group.others, poll_s=self._sum.poll_s)
            self._sum.conclude()
        except Interrupted:
            self._group.give_up(self._sum)
            raise
        except RuntimeError as error:
            self._group.give_up(self._sum)
            raise PeerLost(f"all-reduce in {self._group.key.name}: {error}") from error


class GroupTable:
    """The groups that this worker is a member of."""

    def __init__(
        self,
        worker_id: WorkerId,
        address: str,
        links: PeerLinks,
        waiter: Waiter,
        *,
        device: torch.device | None = None,
        stages: bool = False,
    ) -> None:
        """`device` is where this worker computes, by default the CPU; `stages` as in `Group`.

        Raises ConfigError for a useless address.
        """
        self.waiter = waiter
        self.device = device or torch.device("cpu")
        self._stages = stages
        self._worker_id = worker_id
        self._links = links
        self._told = RendezvousTable()
        self._log = WorkerLog(__name__, worker_id)
        self._address = address
        self._groups: dict[GroupKey, Group] = {}
        self._networks: dict[GroupKey, Network] = {}
        open_device(address)  # a useless address is found at the start, not in the first plan

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

    def form(self, keys: Iterable[GroupKey], interrupted: Callable[[], bool], *, generation: int) -> None:
        """Form those of the groups that are not there yet, all at once, under the plan update of a generation.

        Each forming is a barrier among the group's members; in parallel no order of theirs can deadlock.
        Raises Interrupted, or PeerLost when a member does not come; ConfigError where this process may not open as
        many sockets, for Gloo would end it.
        """
        missing = sorted({key for key in keys if key not in self._groups and len(key.members) > 1})
        if not missing:
            return
        _require_descriptors(sum(len(self._neighbours(key)) + _NETWORK_DESCRIPTORS for key in missing))

        formed: list[Group] = []
        networks = {key: Network(self._address, is_lazy=_is_ring(key)) for key in missing}
        self._networks |= networks

        def form_all() -> None:
            with ThreadPoolExecutor(min(len(missing), _MAX_PARALLEL)) as pool:
                formed.extend(pool.map(lambda key: self._form_one(key, networks[key], generation), missing))
            for group in formed:  # all in the order of the keys: NCCL's own barriers could deadlock otherwise
                self._open_nccl(group, networks[group.key], generation)

        try:
            others = {worker_id for key in missing for worker_id in key.members} - {self._worker_id}
            self.waiter.call(form_all, interrupted, sorted(others))
        except Interrupted:
            self._give_up(formed)
            raise
        except (RuntimeError, TimeoutError, PeerLost) as error:
            self._give_up(formed)
            raise PeerLost(f"forming groups of generation {generation}: {error}") from error
        for group in formed:
            self._log.debug("has formed %s with %s", group.key.name, ", ".join(map(str, group.others)))
        for network in networks.values():
            network.close_door()
        self._groups.update((group.key, group) for group in formed)
        self._told.forget([group.key.name for group in formed])

    def keep_only(self, keys: Iterable[GroupKey], *, generation: int) -> None:
        """Let go of every other group, and of what is known of groups of older generations: none is formed any more."""
        unwanted = sorted(self._groups.keys() - set(keys))
        for key in unwanted:
            self._log.debug("puts %s aside", key.name)
        self._give_up([self._groups.pop(key) for key in unwanted])
        self._told.forget_before(generation)
        self._links.trim()

    def _give_up(self, groups: Iterable[Group]) -> None:
        """Close groups, and end the networks that are left without theirs."""
        for group in groups:
            group.close()
        for key in sorted(self._networks.keys() - self._groups.keys()):
            self._networks.pop(key).end()
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
        options._timeout = timedelta(seconds=_FORMING_TIMEOUT_S)
        prefixed = PrefixStore(key.name, store)
        with network.forming() as device:
            options._devices = [device]
            process_group = ProcessGroupGloo(prefixed, key.members.index(self._worker_id), len(key.members), options)
            group = Group(key, self._worker_id, process_group, store, self.waiter, stages=self._stages)
            network.keep(group)
            if _is_ring(key):
                _connect(process_group, [key.members.index(each) for each in self._neighbours(key)])
            process_group.set_timeout(timedelta(seconds=_TRAFFIC_TIMEOUT_S))
        return group

    def _open_nccl(self, group: Group, network: Network, generation: int) -> None:
        """Let NCCL carry a group's sums, where each member has a GPU of its own. A barrier among them."""
        if self.device.type != "cuda" or group.key.purpose not in _PURPOSES_THAT_SUM:
            return
        store = self._store_of(network, generation, readers=group.others)
        prefixed = PrefixStore(f"{group.key.name}/nccl", store)
        prefixed.set(f"gpu/{group.rank}", device_identity(self.device) or "")
        told = [prefixed.get(f"gpu/{rank}").decode() or None for rank in range(len(group.key.members))]
        if carrier_of(told) is Carrier.NCCL:
            self._log.debug("has NCCL carry the sums of %s", group.key.name)
            prepare_nccl()
            kind: Any = vars(dist)["ProcessGroupNCCL"]  # torch without CUDA has none
            options = kind.Options()
            options._timeout = timedelta(seconds=_TRAFFIC_TIMEOUT_S)
            nccl = kind(prefixed, group.rank, len(group.key.members), options)
            group.use_nccl(nccl, store, torch.zeros(1, device=self.device), _FORMING_TIMEOUT_S)

    def _store_of(self, network: Network, generation: int, readers: Iterable[WorkerId]) -> RendezvousStore:
        def tell(name: str, value: bytes) -> None:
            for worker_id in readers:
                self._links.send(worker_id, GroupValue(generation=generation, key=name, value=value))

        return RendezvousStore(
            self._told, tell, _FORMING_TIMEOUT_S, generation=generation, is_over=lambda: network.is_over
        )


def _abort_nccl(held: list[Any]) -> None:
    """End a group of NCCL's, before the store that it may still use and the tensors that it may still write to."""
    held[0].abort()
    held.pop(0)


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
