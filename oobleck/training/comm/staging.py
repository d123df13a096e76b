"""Messages of tensors on a GPU, carried by Gloo through pinned memory of the host.

Gloo's sends and receives read and write a tensor's address as memory of the host, and its sums copy tensors of a GPU
on streams that are waited for in no way that could be given up. So tensors are copied here, in the order of the
stream that computes: a `Courier` waits for the copy on a thread of its own, since the training thread has to
launch what is computed next, and hands it to Gloo. Everything works on the CPU's tensors too, where nothing needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import torch
from torch._C._distributed_c10d import Work

__all__ = ["Courier", "HostCopy", "Pending", "Posting", "StagedReceive", "host_room"]


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> object:
        """Block until it is there, or its tensor may change again. Raises RuntimeError when a peer is gone."""
        ...


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Make room for a tensor's values in the host's memory, pinned if they come from or go to a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class HostCopy:
    """The values of a tensor in the host's memory, as they are at this point of the stream that computes them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = host_room(tensor)
        with torch.no_grad():
            self.tensor.copy_(tensor, non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # Waiters sleep: a host has fewer cores than threads that wait.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Block until the values are there, and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.tensor


class Posting:
    """A message that is posted as soon as it is in the host's memory."""

    def __init__(self, copy: HostCopy, post: Callable[[torch.Tensor], Work]) -> None:
        self._copy = copy
        self._post = post
        self._work: Work | None = None
        self._failure: RuntimeError | None = None
        self._posted = threading.Event()

    def run(self) -> None:
        """Post it; what fails is raised where it is waited for."""
        try:
            self._work = self._post(self._copy.wait())
        except RuntimeError as error:
            self._failure = error
        self._posted.set()

    def wait(self) -> object:
        """Block until it was sent. Raises RuntimeError."""
        self._posted.wait()
        if self._failure is not None:
            raise self._failure
        assert self._work is not None
        return self._work.wait()


class StagedReceive:
    """A message that is received in the host's memory, and copied to where it belongs once it is waited for."""

    def __init__(self, target: torch.Tensor, post: Callable[[torch.Tensor], Work]) -> None:
        self._target = target
        self._room = host_room(target)
        self._work = post(self._room)

    def wait(self) -> object:
        """Block until it is there and on its way to the device, ahead of all that is launched later."""
        outcome = self._work.wait()
        with torch.no_grad():
            self._target.copy_(self._room, non_blocking=True)
        return outcome


class Courier:
    """A thread that posts a group's messages one after the other, in the order in which they were handed over."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def take(self, task: Callable[[], None]) -> None:
        """Run a task after those that were taken before; it reports its failures itself."""
        self._tasks.put(task)

    def close(self) -> None:
        """Take nothing more; the thread ends with what it has."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
