"""Hidden states and their gradients from one GPU to the next, carried by NCCL in one direction between two stages.

An NCCL kernel that sends or receives spins until the other side's kernel runs as well. A kernel that is launched early
spins for as long as the other side computes. It occupies a part of the GPU meanwhile, and whatever waits for the device
as a whole (as CUDA does when it loads a kernel or returns memory) waits for the peer, which may be waiting for what
this worker computes next. So both sides launch at the same time, and only what depends on nothing else:

    receiver   makes room ──> "room" ─┐                    ┌─> launches ──> all has arrived ──> announces it
    sender     has computed it ───────┴──> "coming" ───────┴─> launches ──> all is sent ──> releases it

Gloo carries the two words, as messages of one byte with the message's tag. Messages in one direction leave one after
the other. Helper threads do all this.
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

Word = Callable[[int], Pending]
"""Sends a word to the neighbour about the message with a tag, or receives one. May raise."""


class EdgeSender:
    """The sending end of an edge. One thread posts."""

    def __init__(self, name: str, nccl: NcclGroup, streams: CopyStreams, *, say: Word, hear: Word) -> None:
        self._name = name
        self._nccl = nccl
        self._streams = streams
        self._say = say
        self._hear = hear
        self._courier = Courier(name, nccl.device)
        self._failure: str | None = None  # text, since an error would keep its frames' tensors alive

    def send(self, tensor: torch.Tensor, tag: int) -> None:
        """Send a contiguous tensor once it is computed, and keep it until it is sent.

        Raises PeerLost for the failure of an earlier message. The receiver reports a failure of the last one.
        """
        if self._failure is not None:
            raise PeerLost(f"{self._name}: {self._failure}")
        computed = self._streams.mark()
        self._courier.take(lambda: self._carry(tensor, tag, computed))

    def close(self) -> None:
        """Send no more messages. The thread ends unless it is stuck."""
        self._courier.close()

    def _carry(self, tensor: torch.Tensor, tag: int, computed: Any) -> None:
        try:
            # The training thread posts tensors that it has launched, not computed.
            computed.synchronize()
            self._hear(tag).wait()
            coming = self._say(tag)
            with self._streams.outward():
                sending = self._nccl.send(tensor)
            sending.finish()
            coming.wait()
        except DEVICE_FAILURES:
            raise
        except Interrupted:
            # An aborted edge carries nothing more.
            pass
        except RuntimeError as error:
            self._failure = str(error)
            self._nccl.abort()


@dataclass(frozen=True, slots=True)
class EdgeReceiver:
    nccl: NcclGroup
    streams: CopyStreams
    say: Word
    hear: Word

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int) -> tuple[EdgeReceive, torch.Tensor]:
        """Make room for a message and say so; return what to wait for, and the room. Raises RuntimeError."""
        # Receivers make room ahead, so that a transfer waits for "coming" only.
        room = self.streams.room(shape, dtype)
        return EdgeReceive(self, room, coming=self.hear(tag), has_room=self.say(tag)), room


@dataclass(frozen=True, slots=True)
class EdgeReceive:
    """An expected message. One thread waits for those of an edge, in their order."""

    end: EdgeReceiver
    room: torch.Tensor
    coming: Pending
    has_room: Pending

    def wait(self) -> object:
        """Block until the whole message has arrived. Raises RuntimeError, or Interrupted once the edge is aborted."""
        # The sender has named this message, so none can take another's place.
        self.coming.wait()
        with self.end.streams.inward():
            receiving = self.end.nccl.receive(self.room)
        # Only a whole message is used: the remains of an aborted receive must never reach other workers' sums.
        receiving.finish()
        return self.has_room.wait()

    def join(self) -> None:
        """Keep its memory until this thread's next launches have used it."""
        self.end.streams.keep(self.room)
