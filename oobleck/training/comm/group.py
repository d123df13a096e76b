"""A group of workers, seen from one of its members: messages, sums, and what carries them.

Gloo carries messages, those of tensors on a GPU through the host's memory (`staging.py`). Where each member of a group
has a GPU of its own, NCCL sums tensors there (`nccl.py`), and carries those that a pipeline's stages send each other
(`edges.py`); the kernels of what is given up are aborted at once, and those that a fence stops with the fence, since
they would hold up what the GPU does next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store, Work

from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId

from . import staging
from .devices import blaming_peers
from .edges import EdgeReceiver, EdgeSender, Words
from .inbox import Inbox
from .nccl import NcclGroup
from .sums import GlooSum, StagedSum, Sum
from .waiter import Waiter

LARGE_SUM = 2 << 20
"""Elements that are summed at once where there are many: enough to use a link well, few enough to begin early."""


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
        streams: staging.CopyStreams | None = None,
    ) -> None:
        """With `stages`, tensors of any device go through the host's memory, whether they need it or not.

        `streams` are a GPU's own for that.
        """
        self.key = key
        self.waiter = waiter
        self.rank = key.members.index(worker_id)
        self._process_group: Any = process_group  # torch's stubs leave out what a backend inherits
        self._inboxes: dict[int, Inbox] = {}
        self._store = store  # torch keeps no reference to a store that is written in Python
        self._stages = stages
        self._streams = streams
        self._courier: staging.Courier | None = None
        self._sweeper: staging.Courier | None = None
        self._courier_lock = threading.Lock()
        self._nccl: NcclGroup | None = None
        self._senders: dict[int, EdgeSender] = {}
        self._receivers: dict[int, EdgeReceiver] = {}
        self._communicators: list[NcclGroup] = []
        """Of the sums, or of the ways to neighbours."""
        self._nccl_lock = threading.Lock()
        self._is_given_up = False

    @property
    def others(self) -> tuple[WorkerId, ...]:
        """All members but this worker."""
        return tuple(worker_id for rank, worker_id in enumerate(self.key.members) if rank != self.rank)

    def rank_of(self, worker_id: WorkerId) -> int:
        return self.key.members.index(worker_id)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> staging.Pending:
        """Post a send of a contiguous tensor, which must not change until the receiver has it. Raises PeerLost."""
        if self._is_staged(tensor):
            return self._post(tensor, target, tag)
        with blaming_peers(f"send to {self.key.members[target]}"):
            return self._send(tensor, target, tag)

    def send_off(self, tensor: torch.Tensor, target: int, tag: int) -> staging.Pending | None:
        """Post a send that nobody waits for; returns what must be kept, with the tensor, until the receiver has it.

        None where the group keeps it, as long as it must be. Raises PeerLost.
        """
        if (sender := self._senders.get(target)) is not None:
            sender.send(tensor, tag)
            return None
        if not self._is_staged(tensor):
            return self.send(tensor, target, tag)
        posting = self._post(tensor, target, tag)
        assert self._sweeper is not None
        self._sweeper.take(posting.sweep)
        return None

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        """Block until the tensor is filled. Raises PeerLost."""
        with blaming_peers(f"receive from {self.key.members[source]}"):
            self.post_receive(tensor, source, tag).wait()

    def post_receive_ahead(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: int, tag: int
    ) -> tuple[staging.Pending, torch.Tensor]:
        """Begin to receive, beside what is computed; returns what to wait for, and the tensor. Raises PeerLost.

        Where what is returned can be joined, who uses the tensor joins it first.
        """
        if (receiver := self._receivers.get(source)) is not None:
            with blaming_peers(f"receive from {self.key.members[source]}"):
                return receiver.post(shape, dtype, tag)
        if self._streams is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return self.post_receive(tensor, source, tag), tensor
        room = self._streams.room(shape, dtype)
        with blaming_peers(f"receive from {self.key.members[source]}"):
            return staging.StagedReceive(room, lambda copy: self._receive(copy, source, tag), self._streams), room

    def post_receive(self, tensor: torch.Tensor, source: int, tag: int) -> staging.Pending:
        """Begin to fill a tensor; its contents are there once what is returned was waited for."""
        with blaming_peers(f"receive from {self.key.members[source]}"):
            if self._is_staged(tensor):
                return staging.StagedReceive(tensor, lambda room: self._receive(room, source, tag))
            return self._receive(tensor, source, tag)

    def inbox(self, source: int) -> Inbox:
        """Return the one inbox for what `source` sends."""
        if source not in self._inboxes:
            self._inboxes[source] = Inbox(self.key.members[source], self.waiter)
        return self._inboxes[source]

    def close(self) -> None:
        """Let go of the helper threads; those that are stuck end with the group's network."""
        for inbox in self._inboxes.values():
            inbox.close()
        for courier in (self._courier, self._sweeper):
            if courier is not None:
                courier.close()
        for sender in self._senders.values():
            sender.close()
        self.abort()

    def all_reduce(self, tensor: torch.Tensor) -> Reduction:
        """Post a sum over the members, in place. Raises PeerLost, or Interrupted where a fence has ended such sums."""
        with blaming_peers(f"all-reduce in {self.key.name}"):
            return Reduction(self, self._sum(tensor, self.waiter.announce))

    def use_nccl(self, nccl: NcclGroup, timeout_s: float) -> None:
        """Have sums of tensors on NCCL's device carried there from now on. Blocks while its members connect.

        On a thread that can be left behind: what was given up meanwhile is aborted as soon as it can be. Raises
        RuntimeError, TimeoutError or Interrupted.
        """
        self._hold(nccl)
        self._nccl = nccl
        nccl.connect(LARGE_SUM, timeout_s)

    def use_way(self, nccl: NcclGroup, source: int, target: int, timeout_s: float) -> None:
        """Have what is sent off from one member to another carried by NCCL from now on. As `use_nccl`."""
        self._hold(nccl)
        sends, peer = self.rank == source, target if self.rank == source else source
        nccl.connect_way(sends=sends, timeout_s=timeout_s)
        assert self._streams is not None, "NCCL carries tensors of GPUs"
        words = Words(say=partial(self._say, peer), hear=partial(self._hear, peer))
        if sends:
            self._senders[peer] = EdgeSender(f"send to {self.key.members[peer]}", nccl, self._streams, words)
        else:
            self._receivers[peer] = EdgeReceiver(nccl, self._streams, words)

    def abort(self) -> None:
        """Wait no more for anything that NCCL carries in this group: end what runs on the GPU. Any thread may."""
        with self._nccl_lock:
            self._is_given_up = True
            communicators = list(self._communicators)
        for nccl in communicators:
            nccl.abort()

    def abort_open_sums(self) -> None:
        """End sums that run on the GPU, if any may. Any thread may."""
        nccl = self._nccl
        if nccl is not None and nccl.has_open_work:
            self.abort()

    def _hold(self, nccl: NcclGroup) -> None:
        """Have a communicator aborted with this group."""
        with self._nccl_lock:
            self._communicators.append(nccl)
            is_given_up = self._is_given_up
        if is_given_up:
            nccl.abort()

    def _say(self, peer: int, tag: int) -> staging.Message:
        return self._send(torch.zeros(1, dtype=torch.uint8), peer, tag)

    def _hear(self, peer: int, tag: int) -> staging.Message:
        return self._receive(torch.empty(1, dtype=torch.uint8), peer, tag)

    def _sum(self, tensor: torch.Tensor, announce: Callable[[], None]) -> Sum:
        if self._nccl is not None and tensor.device == self._nccl.device:
            return self._nccl.all_reduce(tensor)
        if self._is_staged(tensor):
            return StagedSum(
                staging.HostCopy(tensor, self._streams), tensor, self._courier_of(), self._all_reduce, announce
            )
        return GlooSum(self._all_reduce(tensor), announce)

    def _post(self, tensor: torch.Tensor, target: int, tag: int) -> staging.Posting:
        posting = staging.Posting(staging.HostCopy(tensor, self._streams), lambda copy: self._send(copy, target, tag))
        self._courier_of().take(posting.run)
        return posting

    def _receive(self, room: torch.Tensor, source: int, tag: int) -> staging.Message:
        return staging.Message(self._process_group.recv([room], source, tag), room)

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> staging.Message:
        return staging.Message(self._process_group.send([tensor], target, tag), tensor)

    def _all_reduce(self, tensor: torch.Tensor) -> Work:
        work: Work = self._process_group.allreduce([tensor], dist.AllreduceOptions())
        return work

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._stages or tensor.is_cuda

    def _courier_of(self) -> staging.Courier:
        with self._courier_lock:  # layers are sent by threads of their own
            if self._courier is None:
                self._sweeper = staging.Courier(f"sent in {self.key.name}", self.waiter.device)
                self._courier = staging.Courier(f"post in {self.key.name}", self.waiter.device)
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
        """Wait for it no more, nor for any other of its group."""
        self._group.abort()

    def wait(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the sum. Raises Interrupted, or PeerLost when a member failed."""
        try:
            with blaming_peers(f"all-reduce in {self._group.key.name}"):
                self._group.waiter.wait(self._sum.is_done, interrupted, self._group.others, poll_s=self._sum.poll_s)
                self._sum.conclude()
        except (Interrupted, PeerLost):
            self.give_up()
            raise
