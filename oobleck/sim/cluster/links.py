"""Virtual links: byte streams with latency and a bounded window that may be held, frozen or cut.

A stream keeps the contract of trio's half-closeable streams, as trio's own conformance checks show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import index

import trio

from .determinism import VirtualTime
from .gate import Gate

# At most this is in flight, which is more than two kernels buffer.
_WINDOW_BYTES = 1 << 20


class _Pipe:
    """One direction of a link."""

    def __init__(self, time: VirtualTime, latency_s: float, window_bytes: int) -> None:
        self._time = time
        self.latency_s = latency_s
        self.is_held = False  # nothing arrives, unknown to both ends; senders write until the window is full
        self._window_bytes = window_bytes
        self._flying: deque[tuple[float, bytes]] = deque()
        self._flying_bytes = 0
        self._last_arrival_s = 0.0
        self._is_abandoned = False  # by the receiver, unknown to the sender: sent bytes vanish
        self._is_lost = False  # given up by the sender, unknown to the receiver
        self._ends_s: float | None = None
        self._breaks_s: float | None = None
        self._has_sender = self._has_receiver = True
        self._senders = trio.lowlevel.ParkingLot()
        self._receivers = trio.lowlevel.ParkingLot()

    async def send(self, data: bytes) -> None:
        await self.wait_for_room()
        # The other end may have gone during the wait.
        self.check_sender()
        if data and not self._is_abandoned:
            self._flying.append((self._arrival_s(), data))
            self._flying_bytes += len(data)

    def check_sender(self) -> None:
        """Raise ClosedResourceError or BrokenResourceError where nothing can be sent any more."""
        if not self._has_sender:
            raise trio.ClosedResourceError("this end is closed")
        if not self._has_receiver or self._breaks_s is not None or self._is_lost:
            raise trio.BrokenResourceError("the other end is gone")

    @property
    def is_full(self) -> bool:
        is_open = self._has_sender and self._has_receiver and self._breaks_s is None and not self._is_lost
        return is_open and self._flying_bytes >= self._window_bytes

    @property
    def is_over(self) -> bool:
        return not (self._has_sender or self._has_receiver)

    async def wait_for_room(self) -> None:
        while self.is_full:
            await self._senders.park()

    async def receive(self, max_bytes: int | None) -> bytes:
        """Wait for bytes; return none at the end of the stream."""
        while True:
            if not self._has_receiver:
                raise trio.ClosedResourceError("this end is closed")
            if self.is_due:
                return self._take(max_bytes)
            await self._receivers.park()

    @property
    def is_due(self) -> bool:
        """Whether `receive` returns, or raises, without waiting."""
        if not self._has_receiver or self._is_abandoned:
            return True
        if self.is_held:
            return False
        # The first of bytes, the end, and the failure of the link.
        due_s = self._flying[0][0] if self._flying else self._ends_s
        if self._breaks_s is not None and (due_s is None or self._breaks_s < due_s):
            due_s = self._breaks_s
        return due_s is not None and due_s <= self._time.now_s

    def _take(self, max_bytes: int | None) -> bytes:
        now_s = self._time.now_s
        if self._is_abandoned or (self._breaks_s is not None and self._breaks_s <= now_s):
            raise trio.BrokenResourceError("the connection is lost")
        if not self._flying:
            return b""
        arrived = self._flying.popleft()[1]
        while self._flying and self._flying[0][0] <= now_s:
            arrived += self._flying.popleft()[1]
        if max_bytes is not None and len(arrived) > max_bytes:
            self._flying.appendleft((now_s, arrived[max_bytes:]))
            arrived = arrived[:max_bytes]
        self._flying_bytes -= len(arrived)
        if self._senders:
            self._senders.unpark_all()
        return arrived

    def _arrival_s(self) -> float:
        """Return the arrival of bytes sent now, and wake the receiver then."""
        arrival_s = self._time.now_s + self.latency_s
        # Nothing overtakes earlier bytes, and one call wakes the receiver for all that arrive at one moment.
        if arrival_s > self._last_arrival_s or not self._flying:
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
            self._time.call_at(self._last_arrival_s, self._wake_receivers)
        return self._last_arrival_s

    def _wake_receivers(self) -> None:
        self._receivers.unpark_all()

    def end(self) -> None:
        """End the stream after the bytes sent so far."""
        if self._ends_s is None:
            self._ends_s = self._arrival_s()

    def close_sender(self) -> None:
        self._has_sender = False
        self.end()
        self._wake()

    def close_receiver(self) -> None:
        self._has_receiver = False
        self._wake()

    def break_off(self) -> None:
        """Lose the bytes in flight; the receiver finds the link broken one latency later."""
        self._breaks_s = self._time.now_s + self.latency_s
        self._time.call_at(self._breaks_s, self._wake)
        # Senders fail at once, unlike the receiver.
        self._senders.unpark_all()

    def abandon(self) -> None:
        """Let the receiver give the pipe up, unknown to the sender."""
        self._is_abandoned = True
        self._drop()

    def lose(self) -> None:
        """Let the sender give the pipe up, unknown to the receiver."""
        self._is_lost = True
        self._drop()

    def _drop(self) -> None:
        self._flying.clear()
        self._flying_bytes = 0
        self._wake()

    def hold(self, is_held: bool) -> None:
        self.is_held = is_held
        self._wake()

    def _wake(self) -> None:
        self._receivers.unpark_all()
        self._senders.unpark_all()


class VirtualStream(trio.abc.HalfCloseableStream):
    """One end of a link. The calls of a frozen end do not return before it thaws."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._is_sending = self._is_receiving = False
        self._has_sent_eof = False
        self._gate = Gate()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._sending():
            await self._checkpoint()
            self._check_sender()
            await self._outgoing.send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        with self._sending():
            await self._checkpoint()
            self._check_sender()
            await self._outgoing.wait_for_room()
            self._outgoing.check_sender()

    async def send_eof(self) -> None:
        with self._sending():
            await self._checkpoint()
            if not self._has_sent_eof:
                self._outgoing.check_sender()
                self._has_sent_eof = True
                self._outgoing.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1")
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving")
        self._is_receiving = True
        try:
            # Otherwise `receive` parks, and is a checkpoint by itself.
            if self._incoming.is_due or self._gate.is_closed:
                await self._checkpoint()
            data = await self._incoming.receive(max_bytes)
            # The end may have frozen while it waited.
            await self._gate.passed()
            return data
        finally:
            self._is_receiving = False

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def close(self) -> None:
        """End both directions; sent bytes still arrive."""
        self._outgoing.close_sender()
        self._incoming.close_receiver()

    def freeze(self, is_frozen: bool = True) -> None:
        """Let calls wait, also those in progress, or thaw the end."""
        if is_frozen:
            self._gate.close()
        else:
            self._gate.open()

    async def _checkpoint(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._gate.passed()

    def _check_sender(self) -> None:
        if self._has_sent_eof:
            raise trio.ClosedResourceError("the end of the stream was sent before")
        self._outgoing.check_sender()

    @contextmanager
    def _sending(self) -> Iterator[None]:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending")
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False


class VirtualLink:
    """A connection between two ends, `near` and `far`."""

    def __init__(self, time: VirtualTime, *, latency_s: float, window_bytes: int = _WINDOW_BYTES) -> None:
        self._pipes = _Pipe(time, latency_s, window_bytes), _Pipe(time, latency_s, window_bytes)
        self.is_way_lost = False  # it failed between its ends, and neither of them closed it
        self.near = VirtualStream(self._pipes[0], self._pipes[1])
        self.far = VirtualStream(self._pipes[1], self._pipes[0])

    @property
    def is_over(self) -> bool:
        return all(pipe.is_over for pipe in self._pipes)

    def cut(self) -> None:
        """Break the connection, with the bytes in flight; both ends find out."""
        for pipe in self._pipes:
            pipe.break_off()

    def abandon(self) -> None:
        """Let the near end give the connection up after a long silence, unknown to the far end."""
        self.is_way_lost = True
        incoming, outgoing = self._pipes
        incoming.abandon()
        outgoing.lose()

    def hold(self) -> None:
        """Let nothing through until `release`, not even errors."""
        for pipe in self._pipes:
            pipe.hold(True)

    def release(self) -> None:
        for pipe in self._pipes:
            pipe.hold(False)
