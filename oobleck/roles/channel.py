"""Messages over any trio stream: an SSH tunnel, a UNIX socket, a virtual link."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import trio

from oobleck.wire import FrameDecoder, encode_frame

CLOSED = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
"""The errors of a stream that is at its end, broken or closed."""

Outgoing = TypeVar("Outgoing")
Incoming = TypeVar("Incoming")

_READ_BYTES = 1 << 16


class MessageChannel(Generic[Outgoing, Incoming]):
    """Sends and receives messages; one task may send while another receives."""

    def __init__(self, stream: trio.abc.Stream, decoder: FrameDecoder[Incoming]) -> None:
        self._stream = stream
        self._decoder = decoder
        self._arrived: deque[Incoming] = deque()

    async def send(self, messages: Sequence[Outgoing]) -> None:
        """Send messages as one write. Raises trio.BrokenResourceError or trio.ClosedResourceError."""
        await self._stream.send_all(b"".join(map(encode_frame, messages)))

    async def receive(self) -> Incoming:
        """Wait for the next message; cancelling loses nothing.

        Raises trio.EndOfChannel at the end, trio.BrokenResourceError when the stream breaks, and PeerError for
        bytes that are no message.
        """
        while not self._arrived:
            data = await self._stream.receive_some(_READ_BYTES)
            if not data:
                self._decoder.end()
                raise trio.EndOfChannel
            self._arrived.extend(self._decoder.feed(data))
        return self._arrived.popleft()

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Closable(Protocol):
    async def aclose(self) -> None: ...


async def close(resource: _Closable) -> None:
    """Close a stream, a connection or a listener, whatever is cancelled meanwhile, within a second."""
    with trio.CancelScope(shield=True), trio.move_on_after(1):
        await resource.aclose()
