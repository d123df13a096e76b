"""What CUDA's streams are told, without a GPU: tensors are the CPU's, and a copy says on which stream it was made."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

__all__ = ["FakeCuda"]


class FakeCuda:
    """Takes the place of torch's streams, events and device calls for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.computes_on: dict[str, torch.device] = {}
        """The device that a thread was told to compute on, by the thread's name."""
        self.registered: dict[int, int] = {}
        """Sizes of the host's memory that is pinned, by address."""
        self.priorities: dict[str, int] = {}
        """Of the streams that were made."""
        self.reads: list[str] = []
        """How the host has asked for a tensor's value, for which it would wait for the GPU, and in which function."""
        self._num_streams = 0
        self._current = threading.local()
        copy = torch.Tensor.copy_

        def logged_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            self.log.append(f"copy on {self.current_stream().name}{'' if non_blocking else ', blocking'}")
            return copy(target, source)

        def foreach_copy(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
            for target, source in zip(targets, sources, strict=True):
                logged_copy(target, source, non_blocking)

        empty, zeros = torch.empty, torch.zeros
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", self._on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.Tensor, "copy_", logged_copy)
        monkeypatch.setattr(torch, "_foreach_copy_", foreach_copy)
        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__"):
            monkeypatch.setattr(torch.Tensor, name, self._reading(name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.reads.append("synchronize"))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _tensor, stream: self._record_stream(stream))
        monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **others: empty(*shape, **others))
        monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **others: zeros(*shape, **others))

    def current_stream(self, _device: object = None) -> FakeStream:
        return getattr(self._current, "stream", FakeStream(self, "computing"))

    def _reading(self, name: str) -> Callable[..., object]:
        read = getattr(torch.Tensor, name)

        def logged(tensor: torch.Tensor, *arguments: object, **others: object) -> object:
            self.reads.append(f"{name} by {sys._getframe(1).f_code.co_name}")
            return read(tensor, *arguments, **others)

        return logged

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802  CUDA's own name
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  CUDA's own name
        del self.registered[address]
        return 0

    def _stream(self, _device: object, priority: int = 0) -> FakeStream:
        self._num_streams += 1
        self.priorities[f"stream {self._num_streams}"] = priority
        return FakeStream(self, f"stream {self._num_streams}")

    @contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        yield
        self._current.stream = before

    def _set_device(self, device: torch.device) -> None:
        self.computes_on[threading.current_thread().name] = device

    def _record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"memory in use on {stream.name}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.log.append(f"{self.name} waits for an event of {event.stream}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.stream = ""

    def record(self, stream: FakeStream) -> None:
        self.stream = stream.name

    def query(self) -> bool:
        return True

    def elapsed_time(self, _ended: FakeEvent) -> float:
        """A millisecond, whatever the host's clock says."""
        return 1.0

    def synchronize(self) -> None:
        self._cuda.log.append(f"{threading.current_thread().name} waits for an event of {self.stream}")
