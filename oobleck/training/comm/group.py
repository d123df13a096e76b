"""A group of workers, seen from one of its members: messages, sums, and what carries them.

Gloo carries messages; those of tensors on a GPU pass through host memory (`staging.py`). Where each member of a group
has a GPU of its own, NCCL carries the sums (`nccl.py`) and the messages between a pipeline's stages (`edges.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ProcessGroupGloo, Store, Work

from oobleck.control.steps import GroupKey, Interrupted, PeerLost
from oobleck.planner import WorkerId

from . import staging
from .devices import DEVICE_FAILURES, blaming_peers
from .edges import EdgeReceiver, EdgeSender
from .inbox import Inbox
from .nccl import LARGE_SUM, NcclGroup, NcclWork, abort_all
from .waiter import Waiter


class LateSum:
    """A sum of what depends on sums in a stream's order, posted once those are done and whole.

    An aborted sum of a stage leaves a part of the numbers. The stage forgets what it computes from them, and no other
    stage may add it to its own.
    """

    poll_s = NcclWork.poll_s

    def __init__(
        self,
        post: Callable[[], Sum] | None,
        stage: Group,
        nccl: NcclGroup | None,
        streams: staging.CopyStreams,
    ) -> None:
        self._post = post
        self._stage = stage
        self._nccl = nccl
        self._streams = streams
        self._computed = streams.mark()
        self._sum: Sum | None = None
        self._failure: Interrupted | RuntimeError | None = None
        self._is_posted = False
        if nccl is not None:
            # A fence must find it open before it is posted: its peers may have given it up by then.
            nccl.expect(self)

    def run(self) -> None:
        try:
            self._computed.synchronize()
            if self._stage.is_harmed:
                raise Interrupted
            if self._post is not None:
                # The computing stream has been told more meanwhile, for which the sum must not wait.
                with self._streams.outward():
                    self._sum = self._post()
        except DEVICE_FAILURES:
            raise
        except (Interrupted, RuntimeError) as error:
            self._failure = error.with_traceback(None)
        finally:
            self._post = None
        self._is_posted = True

    def is_done(self) -> bool:
        return self._is_posted and (self._sum is None or self._sum.is_done())

    def conclude(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._sum is not None:
            self._sum.conclude()
        if self._nccl is not None:
            self._nccl.forget(self)


Sum = staging.GlooSum | staging.StagedSum | NcclWork | LateSum
"""A sum in progress: `is_done` never blocks, and `conclude`, once it is done, makes the result visible to later
computation or raises RuntimeError. It is polled every `poll_s` seconds, or wakes its waiter if that is None."""


class Group:
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
        """With `stages`, tensors of every device pass through host memory, on a GPU by means of `streams`."""
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
        self._nccl_lock = threading.Lock()
        self._is_given_up = False

    @property
    def others(self) -> tuple[WorkerId, ...]:
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
        """Post a send that no caller waits for. Raises PeerLost.

        Returns what the caller must keep, with the tensor, until the receiver has it; None if the group keeps it.
        """
        if (sender := self._senders.get(target)) is not None:
            sender.send(tensor, tag)
            return None
        if not self._is_staged(tensor):
            return self.send(tensor, target, tag)
        posting = self._post(tensor, target, tag)
        # A second thread waits for the receiver. On the courier's own thread, a slow receiver would delay later sends.
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
        """Begin to receive during computation; returns what to wait for, and the tensor. Raises PeerLost.

        If the first has a `join`, the thread that uses the tensor must call it before.
        """
        blaming = blaming_peers(f"receive from {self.key.members[source]}")
        if (receiver := self._receivers.get(source)) is not None:
            with blaming:
                return receiver.post(shape, dtype, tag)
        if self._streams is None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            return self.post_receive(tensor, source, tag), tensor
        room = self._streams.room(shape, dtype)
        with blaming:
            return staging.StagedReceive(room, lambda copy: self._receive(copy, source, tag), self._streams), room

    def post_receive(self, tensor: torch.Tensor, source: int, tag: int) -> staging.Pending:
        """Begin to fill a tensor, whose contents are valid once the returned object's `wait` has returned."""
        with blaming_peers(f"receive from {self.key.members[source]}"):
            if self._is_staged(tensor):
                return staging.StagedReceive(tensor, lambda room: self._receive(room, source, tag))
            return self._receive(tensor, source, tag)

    def inbox(self, source: int) -> Inbox:
        if source not in self._inboxes:
            self._inboxes[source] = Inbox(self.key.members[source], self.waiter)
        return self._inboxes[source]

    def close(self) -> None:
        """Release the helper threads. Those that are stuck end with the group's network."""
        helpers = [*self._inboxes.values(), self._courier, self._sweeper, *self._senders.values()]
        for helper in helpers:
            if helper is not None:
                helper.close()
        self.abort()

    def all_reduce(self, tensor: torch.Tensor, *, stage: Group | None = None) -> Reduction:
        """Post a sum over the members, in place. Raises PeerLost, or Interrupted after a fence aborted such sums.

        With `stage`, the tensor may depend on what was joined in that group: it is posted once those sums are whole,
        and never if one of them was aborted.
        """
        with blaming_peers(f"all-reduce in {self.key.name}"):
            if stage is not None and stage.sums_in_order(tensor):
                return Reduction(self, stage.post_late(lambda: self._sum(tensor, self.waiter.announce), self._nccl))
            return Reduction(self, self._sum(tensor, self.waiter.announce))

    def sums_in_order(self, tensor: torch.Tensor) -> bool:
        """Return whether `Reduction.join` leaves a tensor's sum to the device."""
        return self._nccl is not None and tensor.device == self._nccl.device

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> Reduction:
        """Post a copy of each member's `own` [size] into its row of every member's `rows` [members, size].

        Raises as `all_reduce`.
        """
        if self._is_staged(own) and not self.sums_in_order(own):
            # Everywhere else -0.0, to which adding a number changes none of its bits: the sum is what all have.
            rows.fill_(-0.0)[self.rank] = own
            return self.all_reduce(rows)
        with blaming_peers(f"all-gather in {self.key.name}"):
            if self._nccl is not None and self.sums_in_order(own):
                return Reduction(self, self._nccl.all_gather(rows, own))
            work = self._process_group._allgather_base(rows.view(-1), own, AllgatherOptions())
            return Reduction(self, staging.GlooSum(work, self.waiter.announce))

    def reduce_scatter(self, parts: torch.Tensor) -> tuple[Reduction, torch.Tensor]:
        """Post a sum over the members' `parts` [members, ...]; return also what then is this member's row of it.

        Raises as `all_reduce`.
        """
        if self._nccl is not None and self.sums_in_order(parts):
            with blaming_peers(f"reduce-scatter in {self.key.name}"):
                own = torch.empty_like(parts[self.rank])
                return Reduction(self, self._nccl.reduce_scatter(own, parts)), own
        whole = parts.clone()
        return self.all_reduce(whole), whole[self.rank]

    def all_to_all(
        self, rows: torch.Tensor, counts: Sequence[Sequence[int]]
    ) -> tuple[Reduction, Callable[[], torch.Tensor]]:
        """Post messages of `rows` [n, ...] to all members, in their order; return also what then returns theirs.

        `counts[i][j]` says how many rows member i sends to member j. Raises as `all_reduce`.
        """
        sent, taken = counts[self.rank], [each[self.rank] for each in counts]
        if self._is_staged(rows) and not self.sums_in_order(rows):
            # As in `all_gather`: each sees what all send.
            whole = rows.new_full((len(counts), max(map(sum, counts)), *rows.shape[1:]), -0.0)
            whole[self.rank, : len(rows)] = rows
            firsts = [sum(each[: self.rank]) for each in counts]
            return self.all_reduce(whole), lambda: torch.cat(
                [each[first : first + count] for each, first, count in zip(whole, firsts, taken, strict=True)]
            )
        own = rows.new_empty((sum(taken), *rows.shape[1:]))
        with blaming_peers(f"all-to-all in {self.key.name}"):
            if self._nccl is not None and self.sums_in_order(rows):
                return Reduction(self, self._nccl.all_to_all(own, rows, taken, sent)), lambda: own
            work = self._process_group.alltoall_base(own, rows, taken, [*sent], AllToAllOptions())
            return Reduction(self, staging.GlooSum(work, self.waiter.announce)), lambda: own

    def order(self, work: NcclWork) -> None:
        """Have this thread's next launches come after what NCCL carries. Raises RuntimeError or Interrupted."""
        assert self._nccl is not None, "NCCL carries it"
        self._nccl.order(work)

    @property
    def is_harmed(self) -> bool:
        """Whether NCCL's sums in this group were aborted, which may have left parts of them."""
        return self._nccl is not None and self._nccl.is_aborted

    def conclude_in_order(self) -> None:
        """Conclude all that was joined: the caller has waited for the device. Raises Interrupted if one is harmed."""
        if self._nccl is not None:
            self._nccl.forget_ordered()
        if self.is_harmed:
            raise Interrupted

    def when_whole(self) -> Reduction | None:
        """Return what is done once all joined so far is known to be whole; None if the host waits for each."""
        return None if self._nccl is None else _Wholeness(self, self.post_late(None, None))

    def post_late(self, post: Callable[[], Sum] | None, nccl: NcclGroup | None) -> LateSum:
        """Have a courier post a sum, which `nccl` may carry, once all joined so far is known to be whole.

        Sums are posted in the order of these calls. Without `post`, none is. Raises Interrupted.
        """
        assert self._streams is not None, "NCCL sums tensors of GPUs"
        late = LateSum(post, self, nccl, self._streams)
        self._courier_of().take(late.run)
        return late

    def use_nccl(self, nccl: NcclGroup, timeout_s: float, *, largest: int = 0) -> None:
        """Have NCCL carry sums of tensors on its device from now on. Blocks while its members connect.

        `largest` is the number of elements of the largest sum. To be called on a thread that can be left behind. If the
        group is given up meanwhile, the communicator is aborted as soon as possible. Raises RuntimeError, TimeoutError
        or Interrupted.
        """
        # Registered before it connects, since a member that never joins blocks this thread until an abort.
        self._hold(nccl)
        self._nccl = nccl
        shares = len(self.key.members) if self.key.purpose in ("stage", "evaluation") else 0
        nccl.connect(max(LARGE_SUM, largest), timeout_s, shares=shares)

    def use_way(self, nccl: NcclGroup, source: int, target: int, timeout_s: float) -> None:
        """Have NCCL carry `send_off` from one member to another from now on. Otherwise as `use_nccl`."""
        self._hold(nccl)
        sends, peer = self.rank == source, target if self.rank == source else source
        nccl.connect_way(sends=sends, timeout_s=timeout_s)
        assert self._streams is not None, "NCCL carries tensors of GPUs"

        # A word's byte has no meaning: the tag names the message that the word is about.
        def say(tag: int) -> staging.Message:
            return self._send(torch.zeros(1, dtype=torch.uint8), peer, tag)

        def hear(tag: int) -> staging.Message:
            return self._receive(torch.empty(1, dtype=torch.uint8), peer, tag)

        if sends:
            name = f"send to {self.key.members[peer]}"
            self._senders[peer] = EdgeSender(name, nccl, self._streams, say=say, hear=hear)
        else:
            self._receivers[peer] = EdgeReceiver(nccl, self._streams, say, hear)

    def abort(self) -> None:
        """Abort everything that NCCL carries in this group. Any thread may call this."""
        abort_all(self.give_up())

    def give_up(self) -> list[NcclGroup]:
        """Return the communicators, for the caller to abort; those that come later are aborted by themselves."""
        with self._nccl_lock:
            self._is_given_up = True
            return list(self._communicators)

    @property
    def has_open_sums(self) -> bool:
        """Whether NCCL's sums may be running on the GPU. Any thread may ask."""
        nccl = self._nccl
        return nccl is not None and nccl.has_open_work

    def _hold(self, nccl: NcclGroup) -> None:
        with self._nccl_lock:
            self._communicators.append(nccl)
            is_given_up = self._is_given_up
        # An earlier `abort` has not seen this communicator, and no later one may come.
        if is_given_up:
            nccl.abort()

    def _sum(self, tensor: torch.Tensor, announce: Callable[[], None]) -> Sum:
        if self._nccl is not None and tensor.device == self._nccl.device:
            return self._nccl.all_reduce(tensor)
        if self._is_staged(tensor):
            copy = staging.HostCopy(tensor, self._streams)
            return staging.StagedSum(copy, tensor, self._courier_of(), self._all_reduce, announce)
        return staging.GlooSum(self._all_reduce(tensor), announce)

    def _post(self, tensor: torch.Tensor, target: int, tag: int) -> staging.Posting:
        # The courier waits for the copy, because the training thread has to launch the next computation meanwhile.
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
        with self._courier_lock:  # transfers of layers send on threads of their own
            if self._courier is None:
                self._sweeper = staging.Courier(f"sent in {self.key.name}", self.waiter.device)
                self._courier = staging.Courier(f"post in {self.key.name}", self.waiter.device)
            return self._courier


class Reduction:
    """An all-reduce or all-gather in progress. Waiting is interruptible, since a frozen peer never answers."""

    def __init__(self, group: Group, in_progress: Sum) -> None:
        self._group = group
        self._sum = in_progress

    @property
    def others(self) -> tuple[WorkerId, ...]:
        return self._group.others

    @property
    def poll_s(self) -> float | None:
        """The interval for polling `is_done`, or None if it wakes its waiter."""
        return self._sum.poll_s

    def is_done(self) -> bool:
        """Return whether the sum has completed or failed, so that `wait` does not block."""
        return self._sum.is_done()

    def give_up(self) -> None:
        """Abandon this sum and all others of its group."""
        self._group.abort()

    def wait(self, interrupted: Callable[[], bool]) -> None:
        """Wait for the sum. Raises Interrupted, or PeerLost when a member failed."""
        with self._concluding():
            self._group.waiter.wait(self._sum.is_done, interrupted, self._group.others, poll_s=self._sum.poll_s)
            self._sum.conclude()

    @property
    def is_waited_for(self) -> bool:
        """Whether `join` waits on the host: NCCL does not carry it."""
        return not isinstance(self._sum, NcclWork)

    def join(self, interrupted: Callable[[], bool]) -> None:
        """Have this thread's next launches come after the sum, in the order of posts. Raises Interrupted or PeerLost.

        The host waits, until `interrupted`, only where NCCL does not carry the sum. Else it is not known to be whole
        until `Group.conclude_in_order`.
        """
        if not isinstance(self._sum, NcclWork):
            self.wait(interrupted)
            return
        with self._concluding():
            self._group.order(self._sum)

    @contextmanager
    def _concluding(self) -> Iterator[None]:
        try:
            with blaming_peers(f"all-reduce in {self._group.key.name}"):
                yield
        except (Interrupted, PeerLost):
            # NCCL's kernel spins for a peer that may be gone, and would hold up whatever the GPU does next.
            self.give_up()
            raise


class _Wholeness(Reduction):
    """Waits, as for a sum, until those of a stage are whole."""

    def give_up(self) -> None:
        """Do nothing: the stage's sums go on."""
