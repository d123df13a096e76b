"""Hidden states and their gradients from one GPU to the next, carried by NCCL: one way between two stages.

A kernel of NCCL's that sends or receives spins until the other side's runs as well. Where it is launched early, it
spins for as long as the other side computes: it takes a part of the GPU meanwhile, and whatever waits for the device
as a whole (CUDA does, when it loads a kernel for the first time or gives memory back) waits for the peer, which may be
waiting for what this worker computes next. So both sides launch at once, and only what needs nothing more:

    receiver   makes room ──> "room" ─┐                    ┌─> launches ──> all is there ──> announces it
    sender     has computed it ───────┴──> "coming" ───────┴─> launches ──> all is sent ──> lets go of it

The two words are messages of a byte, with the message's tag, which Gloo carries. A receiver makes room for messages
ahead, so that only "coming" is waited for. Messages of one way leave one after the other; a receive is launched for a
message that the sender has named, so none can take another's place.

All this is the work of helper threads. The training thread posts what it has launched, not computed, and launches what
uses a message only once all of it is there: what an aborted receive has left is never computed with, and so never
summed with what other workers hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from oobleck.control.steps import Interrupted, PeerLost

from .devices import DEVICE_FAILURES
from .nccl import NcclGroup
from .staging import CopyStreams, Courier, Pending


@dataclass(frozen=True, slots=True)
class Words:
    """What one neighbour says to the other and hears from it about the message with a tag. Both may raise."""

    say: Callable[[int], Pending]
    hear: Callable[[int], Pending]


class EdgeSender:
    """The end of a way at which tensors are sent. One thread posts."""

    def __init__(self, name: str, nccl: NcclGroup, streams: CopyStreams, words: Words) -> None:
        self._name = name
        self._nccl = nccl
        self._streams = streams
        self._words = words
        self._courier = Courier(name, nccl.device)
        self._failure: str | None = None  # an error would hold on to what it was raised by

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous tensor once it is computed, and keep it until it is sent. Raises PeerLost.

        The failure of an earlier message is raised; that of the last is left to the receiver, which waits for it.
        """
        if self._failure is not None:
            raise PeerLost(f"{self._name}: {self._failure}")
        computed = self._streams.mark()
        self._courier.take(lambda: self._carry(tensor, tag, computed))

    def close(self) -> None:
        """Send nothing more; the thread ends unless it is stuck."""
        self._courier.close()

    def _carry(self, tensor: torch.Tensor, tag: int, computed: Any) -> None:
        try:
            computed.synchronize()
            self._words.hear(tag).wait()
            coming = self._words.say(tag)
            with self._streams.outward():
                under_way = self._nccl.send(tensor)
            under_way.finish()
            coming.wait()
        except DEVICE_FAILURES:
            raise
        except Interrupted:  # who has it aborted expects nothing more of it
            pass
        except RuntimeError as error:
            self._failure = str(error)
            self._nccl.abort()


class EdgeReceiver:
    """The end of a way at which tensors are received."""

    def __init__(self, nccl: NcclGroup, streams: CopyStreams, words: Words) -> None:
        self._nccl = nccl
        self._streams = streams
        self._words = words

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> tuple[EdgeReceive, torch.Tensor]:
        """Make room for a message, and say so; returns what to wait for, and the room. Raises RuntimeError."""
        room = self._streams.room(shape, dtype)
        return EdgeReceive(room, self._words.hear(tag), self._words.say(tag), self._nccl, self._streams), room


class EdgeReceive:
    """A message that is expected. One thread waits for those of a way, in their order."""

    def __init__(
        self, room: torch.Tensor, coming: Pending, has_room: Pending, nccl: NcclGroup, streams: CopyStreams
    ) -> None:
        self._room = room
        self._coming = coming
        self._has_room = has_room
        self._nccl = nccl
        self._streams = streams

    def wait(self) -> object:
        """Block until all of it is there. Raises RuntimeError, or Interrupted once the way is aborted."""
        self._coming.wait()
        with self._streams.inward():
            under_way = self._nccl.receive(self._room)
        under_way.finish()
        return self._has_room.wait()

    def join(self) -> None:
        """Have its memory kept until what this thread launches next has used it."""
        self._streams.keep(self._room)
