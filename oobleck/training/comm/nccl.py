"""A communicator of NCCL's, seen from one of its members: sums and messages on GPUs, until it is aborted.

What torch's sources say of it (`ProcessGroupNCCL.cpp`, alike from 2.9 to 2.13), and what is done about that here:

- What runs in a communicator that was aborted completes, without an error, with whatever was there by then
  (`WorkNCCL::isCompleted` looks for errors only while the communicator is not aborted). So a communicator remembers
  that it was aborted, before it is, and nothing that was not seen complete before that is ever used.
- An error of NCCL's own is raised by `WorkNCCL::wait`, which does not block here: it puts the work before what the
  stream does next. `is_success` is refused, and `exception` is deprecated.
- A communicator that is being made is known to `abort` only once it is made. So a thread that made one too late aborts
  it itself.
- Aborting one communicator may wait for the kernels of another (pytorch issue 119797), and `abort` works on a thread
  of torch's own, which a group of NCCL's calls (`ncclGroupStart`, which counts for one thread) does not reach. So each
  abort has a thread, and none waits for another to begin. It may also raise what went wrong with the communicator.
- Everything that two members send each other, either way, takes turns in one communicator on one stream
  (`getKeySendRecv`): what goes one way would wait for what goes the other. So each way has a communicator.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work

from oobleck.control.steps import Interrupted
from oobleck.planner import WorkerId
from oobleck.training.worker_log import WorkerLog

from .devices import DEVICE_FAILURES, start_thread

_SOURCE, _TARGET = 0, 1
"""The members of a communicator of two that carries messages one way."""


class NcclWork:
    """A sum or a message on a GPU. Nothing announces that it is done, so the waiter polls."""

    poll_s = 2e-4

    def __init__(self, group: NcclGroup, work: Work, tensor: torch.Tensor) -> None:
        self._group = group
        self._work: Any = work  # torch's stubs leave out some of its methods
        self._tensor = tensor  # must live as long as the GPU may read or write it

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def conclude(self) -> None:
        """As `Sum` says. Raises Interrupted if the communicator was aborted meanwhile."""
        if self._group.is_aborted:
            raise Interrupted
        self._work.wait()
        self._group.forget(self)

    def finish(self, *, until_s: float = math.inf) -> None:
        """Block until it is done, on a thread that can be left behind, and conclude it.

        Raises TimeoutError at `until_s` of the monotonic clock, else what `conclude` raises.
        """
        while not self.is_done():
            if self._group.is_aborted:
                raise Interrupted
            if time.monotonic() > until_s:
                raise TimeoutError("NCCL took too long")
            time.sleep(self.poll_s)
        self.conclude()


class NcclGroup:
    """Any thread may abort it; one thread uses it. After that, whatever is asked of it raises Interrupted."""

    def __init__(
        self, name: str, worker_id: WorkerId, device: torch.device, process_group: object, store: Store
    ) -> None:
        self.device = device
        self._name = name
        self._log = WorkerLog(__name__, worker_id)
        self._process_group: Any = process_group
        self._store = store  # torch keeps no reference to a store that is written in Python
        self._lock = threading.Lock()
        self._open: set[NcclWork] = set()

    @property
    def is_aborted(self) -> bool:
        return self._process_group is None

    @property
    def has_open_work(self) -> bool:
        """Return whether a GPU may wait for peers in it."""
        return bool(self._open)

    def all_reduce(self, tensor: torch.Tensor) -> NcclWork:
        """Post a sum over the members, in place. The first one of its kind connects, and blocks while it does.

        Raises RuntimeError, or Interrupted.
        """
        return self._post(lambda group: group.allreduce([tensor], dist.AllreduceOptions()), tensor)

    def send(self, tensor: torch.Tensor) -> NcclWork:
        """Post a message from the first of two members to the second, in the order of all of them.

        It is ordered after what the stream in use has computed. Connects and raises as a sum does.
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
            under_way = NcclWork(self, post(process_group), tensor)
        except DEVICE_FAILURES:
            raise
        except RuntimeError:
            if self.is_aborted:
                raise Interrupted from None
            raise
        with self._lock:
            if not self.is_aborted:
                self._open.add(under_way)
                return under_way
        self._end([process_group, self._store, under_way])  # it may have had no communicator yet when it was aborted
        raise Interrupted

    def connect(self, num_elements: int, timeout_s: float) -> None:
        """Make all connections that sums of up to so many numbers need: NCCL makes those of a way to sum with its
        first use, and large sums go other ways than small ones.

        Blocks, in torch as well: on a thread that can be left behind. Raises RuntimeError, TimeoutError or Interrupted.
        """
        until_s = time.monotonic() + timeout_s
        for count in sorted({1, num_elements}):
            self._connect_by(self.all_reduce(torch.zeros(count, device=self.device)), until_s)

    def connect_way(self, *, sends: bool, timeout_s: float) -> None:
        """Make the connection that messages need, for the member that `sends`, or the other. As `connect`."""
        until_s, word = time.monotonic() + timeout_s, torch.zeros(1, device=self.device)
        self._connect_by(self.send(word) if sends else self.receive(word), until_s)

    def _connect_by(self, under_way: NcclWork, until_s: float) -> None:
        try:
            under_way.finish(until_s=until_s)
        except TimeoutError as error:
            raise TimeoutError(f"NCCL has not connected {self._name} in time") from error

    def forget(self, under_way: NcclWork) -> None:
        """A sum or a message is over."""
        with self._lock:
            self._open.discard(under_way)

    def abort(self) -> None:
        """End what it has on the GPU, on a thread of its own: it may take its time. May be called again."""
        with self._lock:
            process_group, self._process_group = self._process_group, None
            open_work, self._open = self._open, set()
        if process_group is not None:
            self._end([process_group, self._store, open_work])

    def _end(self, held: list[Any]) -> None:
        """End a communicator, before the store that it may still use and the tensors that it may still write to."""

        def end() -> None:
            try:
                held[0].abort()
            except DEVICE_FAILURES:
                raise
            except RuntimeError as error:  # what ended it, or that it took too long: others do without it anyway
                self._log.warning("NCCL has not ended %s well: %s", self._name, error)
            held.pop(0)

        start_thread(end, name=f"abort {self._name}", device=self.device)
