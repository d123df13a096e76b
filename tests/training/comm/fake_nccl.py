"""NCCL's manners without a GPU: a process group that behaves as torch's `ProcessGroupNCCL` does when peers are lost.

From `torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`, which is alike in these from torch 2.9 to 2.13:

- `WorkNCCL::isSuccess` throws NotImplementedError, "WorkNCCL::isSuccess() is deprecated".
- `WorkNCCL::isCompleted` asks the communicator for errors only while it is not aborted, then whether the kernels have
  ended. Those of an aborted communicator end: so the work is complete, without an error, with what was there by then.
- For that it locks `NCCLComm::mutex_`, and its binding keeps the GIL. `NCCLComm::abort` holds that lock for all of
  `ncclCommAbort`, without the GIL, and may wait for the kernels of other communicators.
- `WorkNCCL::wait` puts the work before the stream's next kernels and returns at once. Where an error was seen, it first
  aborts the communicator on the calling thread, then rethrows (`handleException(TearDown)`); of an aborted communicator
  it sees no error. `Work::blockCurrentStream` does no more than the first.
- `initNCCLComm` makes the communicator within the first operation, which blocks until all members have come, and is
  registered for `abort` only then: `abortComms` does not find it before.
- After an error the watchdog sleeps for four times `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC`, 15 s by default, with the
  lock that `workEnqueue` needs: nothing can be posted, and nothing ends that wait.
- `ProcessGroupNCCL::abort` blocks, and throws a DistBackendError for what went wrong meanwhile
  (`waitForFutureOrTimeout` with `throwException`).
- `pointToPoint` launches on the stream that belongs to the pair, after what the stream in use has launched
  (`syncStream`). Messages of a pair have no tags: the n-th send is the n-th receive's. A send's kernel spins until the
  receive's runs as well (a short message ends sooner, which nobody may rely on).

And of CUDA: `cudaDeviceSynchronize` waits for the kernels of all streams, those that spin for a lost peer too.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

import torch

from tests.training.comm.native_lock import NativeLock

__all__ = ["FakeLibrary", "FakeNccl", "FakeNcclWork"]

_PATIENCE_S = 20.0
_COLLECTIVES = ("sum", "gather", "scatter", "exchange")
_LONGEST_SLEEP_S = 3.0  # of the watchdog, which torch has sleep a minute


class FakeNccl:
    """One member's process group; `join` makes all members of one."""

    def __init__(self, world: _World, rank: int) -> None:
        self.world = world
        self._rank = rank
        self.is_aborted = False
        self.num_aborts = 0
        self.aborted_by = ""
        self.abort_error: RuntimeError | None = None
        self.works: list[FakeNcclWork] = []
        self.on_launch: Callable[[str], None] = lambda kind: None
        """Called on the thread that posts, with the kind."""
        self.on_abort: Callable[[], None] = lambda: None
        """Called on the thread that aborts, with the communicator's lock."""
        self.lock = NativeLock()
        self._can_post_at_s = 0.0

    @classmethod
    def join(cls, size: int) -> tuple[FakeNccl, ...]:
        """Return the process groups of all members."""
        world = _World(size)
        world.groups = tuple(cls(world, rank) for rank in range(size))
        return world.groups

    def allreduce(self, tensors: list[torch.Tensor], _options: object) -> FakeNcclWork:
        """Post a sum; the first makes the communicator, and blocks until all members make it."""
        return self._post("sum", tensors)

    def _allgather_base(self, rows: torch.Tensor, own: torch.Tensor, _options: object) -> FakeNcclWork:
        return self._post("gather", [rows], own)

    def _reduce_scatter_base(self, own: torch.Tensor, parts: torch.Tensor, _options: object) -> FakeNcclWork:
        return self._post("scatter", [own], parts)

    def alltoall_base(
        self, own: torch.Tensor, rows: torch.Tensor, taken: list[int], sent: list[int], _options: object
    ) -> FakeNcclWork:
        """Post messages to all members, here as many rows to each."""
        assert len({*taken, *sent}) == 1
        return self._post("exchange", [own], rows)

    def send(self, tensors: list[torch.Tensor], target: int, _tag: int) -> FakeNcclWork:
        """Post a message to the other member."""
        assert target == 1 - self._rank
        return self._post("send", tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, _tag: int) -> FakeNcclWork:
        """Post the other end of a message."""
        assert source == 1 - self._rank
        return self._post("receive", tensors)

    def _post(self, kind: str, tensors: list[torch.Tensor], given: torch.Tensor | None = None) -> FakeNcclWork:
        world = self.world
        self.on_launch(kind)
        time.sleep(max(0.0, self._can_post_at_s - time.monotonic()))
        with world.changed:
            if self.is_aborted:
                raise RuntimeError("NCCL communicator was aborted on rank 0.")
            world.come.add(self._rank)
            world.changed.notify_all()
            assert world.changed.wait_for(lambda: len(world.come) == world.size, _PATIENCE_S), "a test's own hang"
            work = self._work(kind, tensors[0])
            work.own = work.own if given is None else given.clone()
            self.works.append(work)
            world.settle()
            return work

    def _work(self, kind: str, tensor: torch.Tensor) -> FakeNcclWork:
        return FakeNcclWork(self, kind, tensor)

    def result(self, kind: str, known: torch.Tensor) -> torch.Tensor:
        """Return what a collective leaves at this member, of what members have given."""
        if kind == "gather":
            return known
        if kind == "exchange":
            return torch.cat([each.chunk(self.world.size)[self._rank] for each in known])
        return known.sum(0)[self._rank] if kind == "scatter" else known.sum(0)

    def abort(self) -> None:
        """End the kernels of the communicator, if there is one."""
        self.lock.take()
        try:
            self.on_abort()
            self._end_kernels()
        finally:
            self.lock.release()

    def _end_kernels(self) -> None:
        with self.world.changed:
            self.num_aborts += 1
            self.aborted_by = threading.current_thread().name
            if len(self.world.come) == self.world.size:
                self.is_aborted = True
                self.world.settle()
            self.world.changed.notify_all()
        if self.abort_error is not None:
            raise self.abort_error

    def fail(self, error: RuntimeError) -> None:
        """Have NCCL find an error of its own, as of a peer whose connection has ended."""
        with self.world.changed:
            for work in self.works:
                work.error = error
        sleep_s = 4e-3 * int(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "15000"))
        self._can_post_at_s = time.monotonic() + min(sleep_s, _LONGEST_SLEEP_S)

    def device_synchronize(self, patience_s: float) -> bool:
        """What `cudaDeviceSynchronize` does: wait for all kernels; returns whether they have ended."""
        with self.world.changed:
            return self.world.changed.wait_for(lambda: self.num_spinning == 0, patience_s)

    @property
    def num_spinning(self) -> int:
        """Kernels of this member that have not ended."""
        return sum(not work.has_ended for work in self.works)


class FakeNcclWork:
    """A sum or a message of one member."""

    def __init__(self, group: FakeNccl, kind: str, tensor: torch.Tensor) -> None:
        self._group = group
        self.kind = kind
        self.tensor = tensor
        self.own = tensor.clone()
        self.has_ended = False
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        self._group.lock.take_with_gil()
        self._group.lock.release()
        return self.has_ended or (self.error is not None and not self._group.is_aborted)

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> RuntimeError | None:
        return None if self._group.is_aborted else self.error

    def block_current_stream(self) -> None:
        pass

    def wait(self) -> bool:
        if self.error is not None:
            self._group.abort()
            raise self.error
        return True


class FakeLibrary:
    """Stands for one worker's NCCL; those of all workers share `worlds`, the communicators by name."""

    def __init__(self, identity: str | None, worlds: dict[str, tuple[FakeNccl, ...]], lock: threading.Lock) -> None:
        self._identity = identity
        self._worlds = worlds
        self._lock = lock
        self.joined: dict[str, FakeNccl] = {}
        """This worker's ends, in the order in which it opened them."""

    @classmethod
    def of(cls, identities: Sequence[str | None]) -> list[FakeLibrary]:
        """Return those of workers whose GPUs are these."""
        worlds: dict[str, tuple[FakeNccl, ...]] = {}
        lock = threading.Lock()
        return [cls(identity, worlds, lock) for identity in identities]

    def identity(self, _device: torch.device) -> str | None:
        return self._identity

    def join(self, name: str, _store: object, rank: int, size: int, *, is_way: bool) -> object:
        assert is_way == (name.split("/")[1] in ("pipeline", "link"))
        with self._lock:
            if name not in self._worlds:
                self._worlds[name] = FakeNccl.join(size)
            self.joined[name] = self._worlds[name][rank]
        return self.joined[name]


class _World:
    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.come: set[int] = set()
        self.groups: tuple[FakeNccl, ...] = ()

    def settle(self) -> None:
        """End the kernels that can end: of what all have joined, and of members that have aborted, with a part."""
        for works in self._matched(*_COLLECTIVES):
            known = torch.stack([work.own for _, work in works])
            for group, work in works:
                if not work.has_ended and (len(works) == self.size or group.is_aborted):
                    work.tensor.view(-1)[: known.numel()].copy_(group.result(work.kind, known).view(-1))
                    work.has_ended = True
        for works in self._matched("send", "receive"):
            sent = next((work.own for _, work in works if work.kind == "send"), None)
            for group, work in works:
                if work.has_ended or not (len(works) == self.size or group.is_aborted):
                    continue
                if work.kind == "receive":
                    whole = work.own if sent is None else sent
                    length = len(whole) if len(works) == self.size and not group.is_aborted else len(whole) // 2
                    work.tensor[:length].copy_(whole[:length])
                work.has_ended = True
        self.changed.notify_all()

    def _matched(self, *kinds: str) -> list[list[tuple[FakeNccl, FakeNcclWork]]]:
        """What the members have posted of these kinds, the first of each together, and so on."""
        posted = [[(group, work) for work in group.works if work.kind in kinds] for group in self.groups]
        return [
            [of_group[number] for of_group in posted if number < len(of_group)]
            for number in range(max(map(len, posted)))
        ]
