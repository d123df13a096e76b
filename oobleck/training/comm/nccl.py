"""An NCCL communicator, seen from one of its members: sums and messages on GPUs, until it is aborted.

What comments say about torch follows from its `ProcessGroupNCCL.cpp`, which is alike from 2.9 to 2.13.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions, Store, Work

from oobleck.control.steps import Interrupted
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .devices import DEVICE_FAILURES, start_thread

LARGE_SUM = 2 << 20
"""Elements per sum when there are many: enough to fill a link, few enough to start early."""

_SOURCE, _TARGET = 0, 1  # ranks in the communicator of a way


class NcclWork:
    """A sum or a message on a GPU. Nothing announces its completion, so the waiter polls."""

    poll_s = 2e-4

    def __init__(self, group: NcclGroup, work: Work, tensor: torch.Tensor) -> None:
        self._group = group
        self._work: Any = work  # torch's stubs leave out some of its methods
        self._tensor = tensor  # must live as long as the GPU may read or write it

    def is_done(self) -> bool:
        """Return whether it is complete, has failed, or was aborted."""
        return self._group.has_ended(self._work)

    def conclude(self) -> None:
        """Conclude it as a `Sum`. Raises Interrupted if the communicator was aborted meanwhile."""
        self.order()
        self._group.forget(self)

    def order(self) -> None:
        """Have this thread's next launches come after it; the host does not wait. Raises as `conclude`."""
        # Work of an aborted communicator completes without an error, with partial data: `WorkNCCL::isCompleted` looks
        # for errors only while the communicator is not aborted.
        if self._group.is_aborted:
            raise Interrupted
        # Not `wait`: where NCCL has found an error, that aborts the communicator on this thread before it raises. Such
        # an abort may wait for the kernels of others, for as long as these wait for their peers. `exception` is to go
        # some day, as torch says once in each process, but `is_success` is refused, and the future knows errors later.
        self._work.block_current_stream()
        if (error := self._work.exception()) is not None:
            raise error

    def finish(self, *, until_s: float = math.inf) -> None:
        """Block until it is done, and conclude it. Raises TimeoutError at `until_s` (monotonic), else as `conclude`."""
        while not self.is_done():
            if self._group.is_aborted:
                raise Interrupted
            if time.monotonic() > until_s:
                raise TimeoutError("NCCL took too long")
            time.sleep(self.poll_s)
        self.conclude()


class NcclGroup:
    """A communicator that one thread uses. Any thread may abort it, and all later calls raise Interrupted."""

    def __init__(
        self, name: str, worker_id: WorkerId, device: torch.device, process_group: object, store: Store
    ) -> None:
        self.device = device
        self._name = name
        self._log = WorkerLog(__name__, worker_id)
        self._process_group: Any = process_group
        self._store = store  # torch keeps no reference to a store that is written in Python
        self._lock = threading.Lock()
        self._open: set[object] = set()
        self._ordered: NcclWork | None = None

    @property
    def is_aborted(self) -> bool:
        return self._process_group is None

    @property
    def has_open_work(self) -> bool:
        """Whether a GPU may be waiting for peers in it."""
        return bool(self._open)

    def all_reduce(self, tensor: torch.Tensor) -> NcclWork:
        """Post a sum over the members, in place. The first one blocks while it connects.

        Raises RuntimeError or Interrupted.
        """
        return self._post(lambda group: group.allreduce([tensor], dist.AllreduceOptions()), tensor)

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> NcclWork:
        """Post a copy of each member's `own` into its row of all members' `rows`; otherwise as `all_reduce`."""
        return self._post(lambda group: group._allgather_base(rows.view(-1), own, AllgatherOptions()), rows)

    def reduce_scatter(self, own: torch.Tensor, parts: torch.Tensor) -> NcclWork:
        """Post a sum over all members' `parts`, of which `own` becomes this member's row; otherwise as `all_reduce`."""
        return self._post(lambda group: group._reduce_scatter_base(own, parts, ReduceScatterOptions()), own)

    def all_to_all(self, own: torch.Tensor, rows: torch.Tensor, taken: Sequence[int], sent: Sequence[int]) -> NcclWork:
        """Post messages of `rows` to all members, `sent` to each, and theirs into `own`; otherwise as `all_reduce`."""
        return self._post(lambda group: group.alltoall_base(own, rows, [*taken], [*sent], AllToAllOptions()), own)

    def order(self, work: NcclWork) -> None:
        """Have this thread's next launches come after a collective; the host does not wait.

        Once these are done, all collectives so ordered were whole if the communicator was not aborted. Raises as
        `NcclWork.order`.
        """
        work.order()
        # The newest ends last, but for an exchange of tokens, ordered before a gather that was posted earlier. Torch's
        # work holds the tensor, so to keep all would keep what each has summed.
        with self._lock:
            before, self._ordered = self._ordered, work
            self._open.discard(before)

    def expect(self, token: object) -> None:
        """Count as open work, until `forget`, what a thread is about to post. Raises Interrupted once aborted."""
        with self._lock:
            if self.is_aborted:
                raise Interrupted
            self._open.add(token)

    def send(self, tensor: torch.Tensor) -> NcclWork:
        """Post a message from the first of two members to the second, after all earlier ones.

        It is ordered after the current stream's launches. Connects and raises as `all_reduce`.
        """
        return self._post(lambda group: group.send([tensor], _TARGET, 0), tensor)

    def receive(self, tensor: torch.Tensor) -> NcclWork:
        """Post the other end of `send`."""
        return self._post(lambda group: group.recv([tensor], _SOURCE, 0), tensor)

    def _post(self, post: Callable[[Any], Work], tensor: torch.Tensor) -> NcclWork:
        process_group = self._process_group
        if process_group is None:
            raise Interrupted
        try:
            work = NcclWork(self, post(process_group), tensor)
        except DEVICE_FAILURES:
            raise
        except RuntimeError:
            if self.is_aborted:
                raise Interrupted from None
            raise
        with self._lock:
            if not self.is_aborted:
                self._open.add(work)
                return work
        # `abort` ends a communicator only once it is made, and the first work makes it: this thread came too late.
        self._end([process_group, self._store, work])
        raise Interrupted

    def connect(self, num_elements: int, timeout_s: float, *, shares: int = 0) -> None:
        """Make all connections that sums of up to `num_elements` need, and with the members' number their `shares`.

        Blocks, in torch as well, so it needs a thread that can be left behind. Raises RuntimeError, TimeoutError or
        Interrupted.
        """
        until_s = time.monotonic() + timeout_s
        # NCCL connects an algorithm on its first use, and large sums use other algorithms than small ones.
        for count in sorted({1, min(num_elements, LARGE_SUM), num_elements}):
            self._connect_by(self.all_reduce(torch.zeros(count, device=self.device)), until_s)
        for count in (1, LARGE_SUM // shares) if shares else ():
            own = torch.zeros(count, device=self.device)
            rows = own.new_zeros((shares, count))
            self._connect_by(self.all_gather(rows, own), until_s)
            self._connect_by(self.reduce_scatter(own, rows), until_s)

    def connect_way(self, *, sends: bool, timeout_s: float) -> None:
        """Make the connection that messages need, from the member that `sends`. Otherwise as `connect`."""
        until_s, word = time.monotonic() + timeout_s, torch.zeros(1, device=self.device)
        self._connect_by(self.send(word) if sends else self.receive(word), until_s)

    def _connect_by(self, first: NcclWork, until_s: float) -> None:
        try:
            first.finish(until_s=until_s)
        except TimeoutError as error:
            raise TimeoutError(f"NCCL has not connected {self._name} in time") from error

    def has_ended(self, work: Any) -> bool:
        """Return whether one of torch's works has ended, or the communicator was aborted. Never blocks."""
        # Torch's `is_completed` keeps the GIL while it takes a lock that an abort holds from beginning to end. A poll
        # in that time would stop every thread of the process, with them the aborts that this one may be waiting for.
        # An abort begins only after it was recorded under this lock, so no poll runs beside one.
        with self._lock:
            return self.is_aborted or bool(work.is_completed())

    def forget(self, work: object) -> None:
        with self._lock:
            self._open.discard(work)

    def forget_ordered(self) -> None:
        """Count no sum in a stream's order as open any more: the caller has waited for the device."""
        with self._lock:
            ordered, self._ordered = self._ordered, None
            self._open.discard(ordered)

    def abort(self) -> None:
        """End its work on the GPU, as `abort_all` does."""
        abort_all([self])

    def _record_abort(self) -> list[Any] | None:
        """Have all calls raise Interrupted from now on; return what is to be ended, or None if that was done before."""
        with self._lock:
            process_group, self._process_group = self._process_group, None
            open_work, self._open, self._ordered = self._open, set(), None
        return None if process_group is None else [process_group, self._store, open_work]

    def _end(self, held: list[Any]) -> None:
        """Abort a communicator, before its store and tensors are released: it may still use them."""

        def end() -> None:
            try:
                held[0].abort()
            except DEVICE_FAILURES:
                raise
            except RuntimeError as error:
                # The communicator's own error, or a timeout: no other part depends on it any more.
                self._log.warning("NCCL has not ended %s well: %s", self._name, error)
            # The store and the tensors live on in `held` up to here.
            held.pop(0)

        # An abort may wait for the kernels of another communicator (pytorch issue 119797), so none waits for another to
        # begin. `ncclGroupStart` would not help: it counts for one thread, and torch aborts on a thread of its own.
        start_thread(end, name=f"abort {self._name}", device=self.device)


def abort_all(groups: Iterable[NcclGroup]) -> None:
    """End the work of communicators on the GPU, each on a thread of its own, since that may take long.

    Any thread may call this, and more than once.
    """
    # All are recorded before the first one is ended. So no work that an abort completes is taken for a result, and
    # nothing polls one of them while the abort of another waits for the device.
    recorded = [(group, group._record_abort()) for group in groups]
    for group, held in recorded:
        if held is not None:
            group._end(held)
