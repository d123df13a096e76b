"""Messages of tensors on a GPU, carried by Gloo through pinned memory of the host.

Gloo's sends and receives read and write a tensor's address as memory of the host, and its sums copy tensors of a GPU
on streams that are waited for in no way that could be given up. So tensors are copied here, on streams of their own
beside the one that computes (`CopyStreams`): a `Courier` waits for the copy on a thread of its own, since the training
thread has to launch what is computed next, and hands it to Gloo. Nothing is kept longer than until the receiver has
it. Everything works on the CPU's tensors too, where nothing needs it.
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

_MESSAGE_PRIORITY = -1
"""Of streams for messages: CUDA's high one."""
TRAFFIC_TIMEOUT_S = 24 * 3600.0
"""Upper bound for any transfer or reduction; deliberately never the first timeout to fire."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until it is there, or its tensor may change again. Raises RuntimeError when a peer is gone."""
        ...


class Message:
    """A message that Gloo carries, and its tensor, which must live as long."""

    def __init__(self, work: Work, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> object:
        """As `Pending` says. Peers are declared lost by the control plane, never by a timeout down here.

        Gloo's own is that with which its connections were made: `set_timeout` changes that of sums alone.
        """
        return self._work.wait(timedelta(seconds=TRAFFIC_TIMEOUT_S))


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Make room for a tensor's values in the host's memory, pinned if they come from or go to a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class CopyStreams:
    """A GPU's streams for copies out of its memory, and into it: they run beside what it computes, and each other.

    What is copied out must not be changed before that is done: what computes does not wait for it. Memory that is used
    on another stream than the one it was given out for is not given out again before (`record_stream`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Torch gives out 32 streams of each priority in turn, to sums as well. With this one no message ever shares the
        # stream of a sum, behind which it would wait for workers that may be waiting for it.
        self._outward: Any = torch.cuda.Stream(device, priority=_MESSAGE_PRIORITY)  # type: ignore[no-untyped-call]
        self._inward: Any = torch.cuda.Stream(device, priority=_MESSAGE_PRIORITY)  # type: ignore[no-untyped-call]

    @classmethod
    def on(cls, device: torch.device) -> CopyStreams | None:
        """Return those of a GPU; None for a CPU."""
        return cls(device) if device.type == "cuda" else None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make room for what will be copied in: memory that nothing computed so far still uses."""
        with torch.cuda.stream(self._inward):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def outward(self) -> AbstractContextManager[object]:
        """What is launched in the block comes after what was copied out, and after nothing that computes."""
        return torch.cuda.stream(self._outward)

    def inward(self) -> AbstractContextManager[object]:
        """What is launched in the block comes after what was copied in, and after nothing that computes."""
        return torch.cuda.stream(self._inward)

    def mark(self) -> Any:
        """Return an event of the end of what this thread has launched so far; to wait for it takes no processor."""
        computed: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        return computed

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy what was launched so far has computed; returns the event of its end."""
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        copied = self._copy(self._outward, source, target)
        source.record_stream(self._outward)
        return copied

    def copy_in(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy into a `room`; returns the event of its end, for `join`."""
        return self._copy(self._inward, source, target)

    def join(self, copied: Any, target: torch.Tensor) -> None:
        """Have what this thread launches next see what was copied in."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(copied)
        self.keep(target)

    def keep(self, room: torch.Tensor) -> None:
        """Have a room's memory not given out again before what this thread launches next has used it."""
        room.record_stream(torch.cuda.current_stream(self._device))

    def _copy(self, stream: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        # Waiters sleep: a host has fewer cores than threads that wait.
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            copied.record(stream)
        return copied


class DeviceSave:
    """Copies of a GPU's state into memory of the host that is there to stay, beside what the GPU computes.

    The state must not change meanwhile. One thread marks, another does the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready: Any = None
        self._pinned: list[int] = []

    @classmethod
    def on(cls, device: torch.device) -> DeviceSave | None:
        """Return that of a GPU; None for a CPU."""
        return cls(device) if device.type == "cuda" else None

    def mark(self) -> None:
        """Say that the state is as it is to be saved once what this thread launched so far is computed."""
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(self._device))

    def pin(self, targets: Iterable[torch.Tensor]) -> None:
        """Pin memory that will be copied to, in place of what was pinned before.

        Where CUDA refuses, copies are slower and nothing else: memory that may be locked has a limit (`ulimit -l`).
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned = []
        for target in targets:
            if int(runtime.cudaHostRegister(target.data_ptr(), target.nbytes, 0)) == 0:
                self._pinned.append(target.data_ptr())

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy what was marked, and block until it is there."""
        copied: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
            copied.record(self._stream)
        copied.synchronize()


class HostCopy:
    """The values of a tensor in the host's memory, as they are at this point of the stream that computes them."""

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams | None = None) -> None:
        """Without `streams` the copy is made in the order of the stream that computes: for what may change at once."""
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
        """Block until the values are there, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensor


class Posting:
    """A message that is posted as soon as it is in the host's memory, and kept until it was sent.

    One thread calls `run`, and another `sweep`: a send that its receiver does not take yet holds up no other.
    """

    def __init__(self, copy: HostCopy, post: Callable[[torch.Tensor], Pending]) -> None:
        self._copy = copy
        self._post = post
        self._work: Pending | None = None
        self._failure: RuntimeError | None = None
        self._posted = threading.Event()

    def run(self) -> None:
        """Post it; what fails is raised where it is waited for."""
        try:
            self._work = self._post(self._copy.wait())
        except RuntimeError as error:
            self._failure = error
        self._posted.set()

    def sweep(self) -> None:
        """Let go of it once it was sent, or never will be. A device's own failure is raised."""
        try:
            self.wait()
        except DEVICE_FAILURES:
            raise
        except RuntimeError:
            pass  # of a peer that is lost: who waits for it is told by something else

    def wait(self) -> object:
        """Block until it was sent. Raises RuntimeError."""
        self._posted.wait()
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        return self._work.wait()


class StagedReceive:
    """A message that is received in the host's memory, and copied to where it belongs once it is waited for."""

    def __init__(
        self, target: torch.Tensor, post: Callable[[torch.Tensor], Pending], streams: CopyStreams | None = None
    ) -> None:
        """With `streams`, the target is a room of theirs."""
        self._target = target
        self._streams = streams
        self._copied: Any = None
        self._room = host_room(target)
        self._work = post(self._room)

    def wait(self) -> object:
        """Block until it is there and on its way to the device. Who uses it calls `join` first."""
        outcome = self._work.wait()
        if self._streams is not None:
            self._copied = self._streams.copy_in(self._room, self._target)
            return outcome
        with torch.no_grad():
            self._target.copy_(self._room, non_blocking=True)
        return outcome

    def join(self) -> None:
        """Have what this thread launches next see it."""
        if self._streams is not None:
            self._streams.join(self._copied, self._target)


class Courier:
    """A thread that posts a group's messages one after the other, in the order in which they were handed over."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start_thread(self._run, name=name, device=device)

    def take(self, task: Callable[[], None]) -> None:
        """Run a task after those that were taken before; it reports its failures itself."""
        self._tasks.put(task)

    def close(self) -> None:
        """Take nothing more; the thread ends with what it has."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it has sent, while the next is waited for
