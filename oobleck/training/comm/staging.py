"""Messages and sums of tensors on a GPU, which Gloo carries through pinned host memory.

Gloo's sends and receives access a tensor's address as host memory, and its sums copy a GPU's tensors on streams whose
waits cannot be interrupted. So this module copies tensors itself, on streams separate from the computing one
(`CopyStreams`), and a `Courier` hands each copy to Gloo. All of this also works, needlessly, for tensors on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from .devices import DEVICE_FAILURES, start_thread

_MESSAGE_PRIORITY = -1  # CUDA's high priority
TRAFFIC_TIMEOUT_S = 24 * 3600.0
"""Upper bound for any transfer or reduction; deliberately never the first timeout to fire."""


class Pending(Protocol):
    def wait(self) -> object:
        """Block until it has arrived, or its tensor may change again. Raises RuntimeError when a peer is gone."""


class Message:
    """A message that Gloo carries, with its tensor, which must live as long."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> object:
        # The control plane declares peers lost, never a timeout down here. Without an argument, Gloo would use the
        # timeout of its connections: `set_timeout` changes that of sums alone.
        return self._work.wait(timedelta(seconds=TRAFFIC_TIMEOUT_S))


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Allocate host memory for a tensor's values, pinned if the tensor is on a GPU."""
    # CUDA copies asynchronously only from and to pinned memory.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class CopyStreams:
    """A GPU's streams for copies out of its memory and into it, concurrent with computation and with each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Torch hands out 32 streams of each priority in turn, to sums as well. With a priority of their own, messages
        # never share a stream with a sum, behind which they would wait for workers that may be waiting for them.
        self._outward: Any = torch.cuda.Stream(device, priority=_MESSAGE_PRIORITY)  # type: ignore[no-untyped-call]
        self._inward: Any = torch.cuda.Stream(device, priority=_MESSAGE_PRIORITY)  # type: ignore[no-untyped-call]

    @classmethod
    def on(cls, device: torch.device) -> CopyStreams | None:
        return cls(device) if device.type == "cuda" else None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate the target of a copy in."""
        # On the computing stream, the allocator could return memory that computation launched earlier still uses.
        with torch.cuda.stream(self._inward):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def outward(self) -> AbstractContextManager[object]:
        """Within the block, order launches after copies out, and after no computation."""
        return torch.cuda.stream(self._outward)

    def inward(self) -> AbstractContextManager[object]:
        """Within the block, order launches after copies in, and after no computation."""
        return torch.cuda.stream(self._inward)

    def mark(self) -> Any:
        """Return an event at the end of this thread's launches so far. Waiting for it takes no processor."""
        computed: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        return computed

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy the result of the launches so far; return an event at the copy's end.

        The source must not change before that event: computation does not wait for it.
        """
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        copied = self._copy(self._outward, source, target)
        # The allocator reuses memory in the order of the stream that allocated it, unless it knows of other users.
        source.record_stream(self._outward)
        return copied

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy into a `room`; return an event at the copy's end, for `join`."""
        return self._copy(self._inward, source, target)

    def join(self, copied: Any, target: torch.Tensor) -> None:
        """Order this thread's next launches after a copy in."""
        torch.cuda.current_stream(self._device).wait_event(copied)
        self.keep(target)

    def keep(self, room: torch.Tensor) -> None:
        """Delay the reuse of a room's memory until this thread's next launches have used it."""
        room.record_stream(torch.cuda.current_stream(self._device))

    def _copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        # Waiters sleep, since a host has fewer cores than waiting threads.
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            copied.record(stream)
        return copied


class DeviceSave:
    """Copies of a GPU's state into permanent host memory, concurrent with the GPU's computation.

    The state must not change meanwhile. One thread calls `mark`, another the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: Any = None
        self._pinned: list[int] = []

    @classmethod
    def on(cls, device: torch.device) -> DeviceSave | None:
        return cls(device) if device.type == "cuda" else None

    def mark(self) -> None:
        """Declare that the state to save is the result of this thread's launches so far."""
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(self._device))

    def pin(self, targets: Iterable[torch.Tensor]) -> None:
        """Pin the targets of later copies, and unpin those of the previous call."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned = []
        for target in targets:
            # A refusal only makes copies slower: locked memory has a limit (`ulimit -l`).
            if int(runtime.cudaHostRegister(target.data_ptr(), target.nbytes, 0)) == 0:
                self._pinned.append(target.data_ptr())

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy the marked state, and block until the copy is complete."""
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()


class HostCopy:
    """A copy of a tensor's values in host memory, taken at this point of the computing stream."""

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams | None = None) -> None:
        """Without `streams`, copy on the computing stream itself, for tensors that may change at once."""
        self.tensor = host_room(tensor)
        self._copied: Any = None
        if streams is not None:
            self._copied = streams.copy_out(tensor, self.tensor)
            return
        with torch.no_grad():
            self.tensor.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Block until the copy is complete, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensor


class Posting:
    """A message that is posted as soon as its copy is in host memory, and kept until it was sent."""

    def __init__(self, copy: HostCopy, post: Callable[[torch.Tensor], Pending]) -> None:
        self._copy = copy
        self._post = post
        self._work: Pending | None = None
        self._failure: RuntimeError | None = None
        self._posted = threading.Event()

    def run(self) -> None:
        """Post it. `wait` raises the failure, if any."""
        try:
            self._work = self._post(self._copy.wait())
        except RuntimeError as error:
            self._failure = error
        self._posted.set()

    def sweep(self) -> None:
        """Release it once it was sent, or never will be. Raises a failure of the device itself."""
        try:
            self.wait()
        except DEVICE_FAILURES:
            raise
        except RuntimeError:
            pass  # a peer is lost, which the threads that wait for it learn by other means

    def wait(self) -> object:
        """Block until it was sent. Raises RuntimeError."""
        self._posted.wait()
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        return self._work.wait()


class StagedReceive:
    """A message that Gloo receives in host memory, and that `wait` copies to its target."""

    def __init__(
        self, target: torch.Tensor, post: Callable[[torch.Tensor], Pending], streams: CopyStreams | None = None
    ) -> None:
        """With `streams`, the target is one of their rooms."""
        self._target = target
        self._streams = streams
        self._copied: Any = None
        self._room = host_room(target)
        self._work = post(self._room)

    def wait(self) -> object:
        """Block until it has arrived and is being copied. A thread that uses it must call `join` first."""
        outcome = self._work.wait()
        if self._streams is not None:
            self._copied = self._streams.copy_in(self._room, self._target)
            return outcome
        with torch.no_grad():
            self._target.copy_(self._room, non_blocking=True)
        return outcome

    def join(self) -> None:
        """Make it visible to this thread's next launches."""
        if self._streams is not None:
            self._streams.join(self._copied, self._target)


class Courier:
    """A thread that runs tasks one after the other, in the order of `take`."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._run, name=name, device=device)

    def take(self, task: Callable[[], None]) -> None:
        """Queue a task, which must handle its own failures."""
        self._tasks.put(task)

    def close(self) -> None:
        """End the thread after the tasks queued so far."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # It holds the tensor that it has sent, which would stay allocated while this waits for the next task.
            del task


class GlooSum:
    """A sum of a tensor in host memory."""

    poll_s = None

    def __init__(self, work: Work, announce: Callable[[], None]) -> None:
        self._future = work.get_future()
        self._future.add_done_callback(lambda _: announce())

    def is_done(self) -> bool:
        return self._future.done()

    def conclude(self) -> None:
        self._future.value()


class StagedSum:
    """A sum of a tensor on a device, through host memory. One courier posts sums in their order."""

    poll_s = None

    def __init__(
        self,
        copy: HostCopy,
        tensor: torch.Tensor,
        courier: Courier,
        post: Callable[[torch.Tensor], Work],
        announce: Callable[[], None],
    ) -> None:
        self._tensor = tensor
        self._copy = copy
        self._post = post
        self._announce = announce
        self._sum: GlooSum | None = None
        self._failure: RuntimeError | None = None
        courier.take(self._run)

    def is_done(self) -> bool:
        return self._failure is not None or (self._sum is not None and self._sum.is_done())

    def conclude(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._sum is not None
        self._sum.conclude()
        with torch.no_grad():
            self._tensor.copy_(self._copy.tensor, non_blocking=True)

    def _run(self) -> None:
        try:
            self._sum = GlooSum(self._post(self._copy.wait()), self._announce)
        except RuntimeError as error:
            self._failure = error
        # The sum may have completed, and announced that, before `is_done` could see that it was posted.
        self._announce()
