"""The messages of one peer, received on a thread of its own, in an order that is known beforehand.

A wait for a message cannot be interrupted, so a helper thread waits in place of the training thread and announces each
arrival. It lives as long as its group and receives ahead, so that messages are already on their way into their buffers
when the training thread takes them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch

from oobleck.control.steps import Interrupted, PeerLost
from oobleck.planner import WorkerId

from .devices import blaming_peers, start_thread
from .edges import EdgeReceive
from .staging import Pending, StagedReceive
from .waiter import Waiter

RECEIVES_AHEAD = 2
"""The most messages of one peer that are received before they are taken, which bounds the memory they use."""

JOINED = (StagedReceive, EdgeReceive)
"""What the thread that uses a received tensor has to `join` before."""

Post = Callable[[int], tuple[Pending, torch.Tensor]]
"""Begins to receive the message with a tag; returns what to wait for, and the buffer. May raise PeerLost."""


class Inbox:
    """The messages of one peer. After an interrupted `take`, neither the peer's group nor this is used again."""

    def __init__(self, source: WorkerId, waiter: Waiter) -> None:
        self.source = source
        self._waiter = waiter
        self._expected: SimpleQueue[tuple[int, Post] | None] = SimpleQueue()
        self._ready: deque[tuple[Pending, torch.Tensor]] = deque()
        self._failure: str | None = None  # text, since an error would keep its frames' tensors alive
        self._room = threading.Semaphore(RECEIVES_AHEAD)
        start_thread(self._receive_all, name=f"receive from {source}", device=waiter.device)

    def expect(self, tag: int, post: Post) -> None:
        """Receive this message after those that are already expected."""
        self._expected.put((tag, post))

    def has_arrived(self) -> bool:
        """Return whether `take` would not block."""
        return bool(self._ready) or self._failure is not None

    def take(self, interrupted: Callable[[], bool]) -> torch.Tensor:
        """Wait for the next message. Raises Interrupted or PeerLost."""
        if not self._ready:
            self._waiter.wait(self.has_arrived, interrupted, [self.source])
        # Messages that arrived before a failure are taken first.
        if not self._ready:
            assert self._failure is not None
            raise PeerLost(self._failure)
        work, tensor = self._ready.popleft()
        if isinstance(work, JOINED):
            work.join()
        self._room.release()
        return tensor

    def close(self) -> None:
        """Expect no more messages. The thread ends unless it is stuck in a receive."""
        self._expected.put(None)
        # The thread may be waiting for room.
        self._room.release()

    def _receive_all(self) -> None:
        posted: deque[tuple[Pending, torch.Tensor]] = deque()
        try:
            while self._post_ahead(posted):
                work, tensor = posted.popleft()
                with blaming_peers("receive"):
                    work.wait()
                self._ready.append((work, tensor))
                self._waiter.announce()
        except PeerLost as error:
            self._failure = str(error)
            self._waiter.announce()
        except Interrupted:
            # Whatever aborted the receive also interrupts the thread that waits for it.
            pass

    def _post_ahead(self, posted: deque[tuple[Pending, torch.Tensor]]) -> bool:
        """Post receives while there is room, at least one. Returns False when no more are expected."""
        while not posted or not self._expected.empty():
            # Without room, a posted receive is waited for first: only a `take` makes room.
            if not self._room.acquire(blocking=not posted):
                break
            message = self._expected.get()
            if message is None:
                return False
            tag, post = message
            posted.append(post(tag))
        return True
