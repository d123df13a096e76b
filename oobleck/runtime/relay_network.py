"""Links between agents: TCP with mutual authentication and encryption.

    caller ── a nonce ──> listener
           <── a nonce ──
           <── sealed ──>

Both have the listener's ticket, which the master sent them over SSH. The key of each direction is derived from the
ticket and both nonces. Each piece is sealed with AES-GCM under its number, and the first that opens authenticates its
sender. So links protect what SSH protects; anyone who can connect to an agent learns only that it exists.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from operator import index

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from oobleck.control.protocol import RelayOpen
from oobleck.host.interfaces import resolved_interface

from .listening import accept as accept_client
from .listening import listen_at_address

_NONCE_BYTES = 16
_TICKET_BYTES = 32
_KEY_BYTES = 16
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">4xQ")
_MOST_BYTES = 1 << 20  # of a piece
_SEAL_BYTES = 16
_READ_BYTES = 1 << 16
_PROOF_S = 5.0
_BACKLOG = 128


class SealedStream(trio.abc.Stream):
    def __init__(self, stream: trio.abc.Stream, *, send_key: bytes, receive_key: bytes) -> None:
        self._stream = stream
        self._seal, self._open = AESGCM(send_key), AESGCM(receive_key)
        self._num_sent = self._num_received = 0
        self._sealed = bytearray()
        self._opened = b""
        self._is_receiving = False
        self._is_closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; a cancellation breaks the stream."""
        pieces: list[bytes] = []
        for start in range(0, len(data), _MOST_BYTES):
            # The number is AES-GCM's nonce. One key must never see it twice, so even a cancelled send uses it up.
            piece = self._seal.encrypt(_COUNT.pack(self._num_sent), bytes(data[start : start + _MOST_BYTES]), None)
            self._num_sent += 1
            pieces += [_LENGTH.pack(len(piece)), piece]
        await self._stream.send_all(b"".join(pieces))

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for bytes; a cancellation loses none. Raises trio.BrokenResourceError if a piece does not open."""
        if max_bytes is not None and index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 1")
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving")
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            return await self._receive(max_bytes)
        finally:
            self._is_receiving = False

    async def _receive(self, max_bytes: int | None) -> bytes:
        if self._is_closed:
            raise trio.ClosedResourceError("this end is closed")
        while not self._opened:
            opened = self._take()
            if opened is not None:
                self._opened = opened
                continue
            data = await self._stream.receive_some(_READ_BYTES)
            if not data:
                if self._sealed:
                    raise trio.BrokenResourceError("the link ended within a piece")
                return b""
            # Bytes stay here until their piece is whole, so a cancelled call loses none.
            self._sealed += data
        taken = self._opened[:max_bytes]
        self._opened = self._opened[len(taken) :]
        return taken

    def _take(self) -> bytes | None:
        if len(self._sealed) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._sealed)
        # The length is not sealed, so without this bound anyone could make us collect 4 GiB.
        if length > _MOST_BYTES + _SEAL_BYTES:
            raise trio.BrokenResourceError(f"a piece of {length} bytes; at most {_MOST_BYTES + _SEAL_BYTES} are sent")
        stop = _LENGTH.size + length
        if len(self._sealed) < stop:
            return None
        piece = bytes(self._sealed[_LENGTH.size : stop])
        del self._sealed[:stop]
        try:
            # A piece that was forged, changed, repeated or left out does not open under the number that is due.
            opened = self._open.decrypt(_COUNT.pack(self._num_received), piece, None)
        except InvalidTag as error:
            raise trio.BrokenResourceError("a piece was not sealed by a holder of the ticket") from error
        self._num_received += 1
        return opened

    async def aclose(self) -> None:
        self._is_closed = True
        await self._stream.aclose()


class _Listener:
    """Implements `roles.agent_ports.RelayListener`."""

    def __init__(self, listener: trio.SocketListener, host: str, port: int) -> None:
        self.door = RelayOpen(host=host, port=port, ticket=secrets.token_bytes(_TICKET_BYTES))
        self._listener = listener

    async def accept(self) -> trio.SocketStream:
        return await accept_client(self._listener)

    async def greet(self, caller: trio.abc.Stream) -> trio.abc.Stream:
        return await _greet(caller, self.door.ticket, calls=False)

    async def aclose(self) -> None:
        await self._listener.aclose()


class RelaySockets:
    """Implements `roles.agent_ports.RelayNetwork`."""

    async def listen(self, address: str) -> _Listener:
        """Listen at an address, a host name or a network interface of this machine. Raises OSError."""
        listener = await listen_at_address(resolved_interface(address), _BACKLOG)
        name = listener.socket.getsockname()
        return _Listener(listener, name[0], name[1])

    async def dial(self, host: str, port: int, ticket: bytes) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(host, port)
        try:
            return await _greet(stream, ticket, calls=True)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise


async def _greet(stream: trio.abc.Stream, ticket: bytes, *, calls: bool) -> SealedStream:
    """Exchange nonces, and derive the keys; only the first piece shows whether the other side has the ticket."""
    own, other = secrets.token_bytes(_NONCE_BYTES), b""
    with trio.fail_after(_PROOF_S):
        await stream.send_all(own)
        while len(other) < _NONCE_BYTES:
            data = await stream.receive_some(_NONCE_BYTES - len(other))
            if not data:
                raise trio.BrokenResourceError("the other side hung up")
            other += data
    # Both sides derive the same keys only from the same order: the caller's nonce first.
    nonces = own + other if calls else other + own
    ours, theirs = (b"caller", b"listener") if calls else (b"listener", b"caller")
    return SealedStream(stream, send_key=_key(ticket, nonces, ours), receive_key=_key(ticket, nonces, theirs))


def _key(ticket: bytes, nonces: bytes, whose: bytes) -> bytes:
    return hashlib.blake2b(nonces, key=ticket, person=whose, digest_size=_KEY_BYTES).digest()
