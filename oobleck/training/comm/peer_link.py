"""One connection between two workers: its proofs, and its queue of outgoing bytes. Nothing here blocks."""

from __future__ import annotations

import hmac
import math
import secrets
import select
import socket
from contextlib import suppress

from oobleck.control import protocol
from oobleck.errors import PeerError
from oobleck.wire import MAX_FRAME_BYTES, FrameDecoder, encode_frame

_NONCE_BYTES = 16
_MAX_STRANGE_BYTES = 1024  # the longest frame of a caller without a proof
_MAX_WAITING_BYTES = 64 << 20  # more than this, for a peer that does not read, breaks the link
_READ_BYTES = 1 << 16


class Link:
    """A connection, as one side sees it. Its owner ensures that only one thread at a time uses it."""

    def __init__(
        self,
        sock: socket.socket,
        poll: select.epoll,
        *,
        own: protocol.WorkerAddress,
        callee: protocol.WorkerAddress | None = None,
        until_s: float = math.inf,
    ) -> None:
        """`own` is this worker's address, and `callee` that of the listener, None on the listener's side.

        A caller has until `until_s` to prove itself, which the owner enforces.
        """
        sock.setblocking(False)
        self.fd = sock.fileno()
        self.until_s = until_s
        self.worker_id = None if callee is None else callee.worker_id
        self.is_proven = False
        """Whether the other side has proved that it belongs to the run."""
        self.is_broken = False
        self.is_ending = False
        """Whether this side has sent its LinkEnd."""
        self.is_used = True
        """Whether it has carried anything since the owner reset this."""
        self._sock = sock
        self._poll = poll
        self._own = own
        self._callee = callee
        self._peer = None if callee is None else (callee.host, callee.port)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._out = bytearray()
        self._held = bytearray()  # messages that have to wait for the proofs
        self._waits_to_write = False
        self._their_nonce = b""
        limit = _MAX_STRANGE_BYTES if callee is None else MAX_FRAME_BYTES
        self._decoder: FrameDecoder[protocol.LinkMessage] = FrameDecoder(protocol.LinkMessage, max_frame_bytes=limit)

    @property
    def is_stranger(self) -> bool:
        """Whether the other side is a caller without a proof."""
        return self._callee is None and not self.is_proven

    def is_with(self, address: protocol.WorkerAddress) -> bool:
        """Return whether the other side is the process that listens at an address."""
        return self._peer == (address.host, address.port)

    def open(self) -> None:
        """Connect, or challenge the caller."""
        # Nagle's algorithm would hold a short message back until the one before it is acknowledged.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._callee is not None:
            try:
                self._sock.connect((self._callee.host, self._callee.port))
            except BlockingIOError:
                # The outcome shows in a later read.
                pass
            except OSError:
                self.is_broken = True
        self._poll.register(self.fd, select.EPOLLIN)
        if self._callee is None:
            self._say(protocol.LinkChallenge(nonce=self._nonce))

    def send(self, message: protocol.PeerMessage) -> None:
        """Send a message, or keep it until both sides have proved themselves."""
        self.is_used = True
        if self.is_proven:
            self._say(message)
        else:
            self._held += encode_frame(message)
            self._check_waiting()

    def end(self) -> None:
        """Send a LinkEnd. Messages of the other side can still be read until it has sent its own."""
        if not self.is_ending:
            self.is_ending = True
            self._say(protocol.LinkEnd())

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
            # Only once nothing waits any more: the LinkEnd is the last message.
            if self.is_ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
            return
        # A socket is almost always writable: asking for that with nothing to write would wake the thread without end.
        if bool(self._out) != self._waits_to_write:
            self._waits_to_write = not self._waits_to_write
            self._poll.modify(self.fd, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))

    def read(self) -> list[protocol.PeerMessage | protocol.LinkEnd]:
        """Read the available messages, and handle the proofs. A message that is invalid here breaks the link."""
        try:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                self.is_broken = True
            return [taken for message in self._decoder.feed(data) for taken in self._take(message)]
        except BlockingIOError:
            return []
        except (OSError, PeerError):
            self.is_broken = True
            return []

    def close(self) -> None:
        with suppress(OSError):
            self._poll.unregister(self.fd)
        self._sock.close()

    def _say(self, message: protocol.LinkMessage) -> None:
        self._out += encode_frame(message)
        self.flush()
        self._check_waiting()

    def _check_waiting(self) -> None:
        if len(self._out) + len(self._held) > _MAX_WAITING_BYTES:
            self.is_broken = True

    def _take(self, message: protocol.LinkMessage) -> list[protocol.PeerMessage | protocol.LinkEnd]:
        """Handle one message; return it if it is for the owner. Raises PeerError for one that is invalid here."""
        match message:
            case protocol.LinkChallenge(nonce=nonce) if self._callee is not None and not self._their_nonce:
                self._introduce(self._callee, nonce)
            case protocol.LinkHello() if self._callee is None and not self.is_proven:
                self._admit(message)
            case protocol.LinkProof(proof=proof) if self._callee is not None and not self.is_proven:
                nonces = self._their_nonce, self._nonce
                self._check(proof, _proof(self._callee.ticket, "listener", nonces, self._own))
                self._begin()
            case protocol.LinkChallenge() | protocol.LinkHello() | protocol.LinkProof():
                raise PeerError(f"a {type(message).__name__} in the wrong place")
            case _ if not self.is_proven:
                raise PeerError(f"a {type(message).__name__} before the proof")
            case _:
                self.is_used = True
                return [message]
        return []

    def _introduce(self, callee: protocol.WorkerAddress, nonce: bytes) -> None:
        own, self._their_nonce = self._own, nonce
        proof = _proof(callee.ticket, "caller", (nonce, self._nonce), own)
        self._say(
            protocol.LinkHello(worker_id=own.worker_id, host=own.host, port=own.port, nonce=self._nonce, proof=proof)
        )

    def _admit(self, hello: protocol.LinkHello) -> None:
        caller = protocol.WorkerAddress(worker_id=hello.worker_id, host=hello.host, port=hello.port)
        # Set before the check, whose error names the peer.
        self._peer = hello.host, hello.port
        ticket, nonces = self._own.ticket, (self._nonce, hello.nonce)
        self._check(hello.proof, _proof(ticket, "caller", nonces, caller))
        self.worker_id = hello.worker_id
        self._say(protocol.LinkProof(proof=_proof(ticket, "listener", nonces, caller)))
        self._begin()

    def _begin(self) -> None:
        self.is_proven = True
        # Until now, only short frames were accepted of a caller. The decoder to replace is empty, since a caller sends
        # nothing between its hello and the answer.
        if self._callee is None:
            self._decoder = FrameDecoder(protocol.LinkMessage)
        self._out += self._held
        self._held.clear()
        self.flush()

    def _check(self, proof: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(proof, expected):
            raise PeerError(f"{self._peer} does not know the ticket that the master has sent it")


def _proof(ticket: bytes, role: str, nonces: tuple[bytes, bytes], caller: protocol.WorkerAddress) -> bytes:
    """Return the proof that a side knows the listener's ticket, valid for this connection alone."""
    # Without the role both proofs would be equal, and a stranger that listens could return the caller's own.
    identity = (role, caller.worker_id, caller.host, caller.port)
    return hmac.digest(ticket, repr((*identity, *nonces)).encode(), "sha256")
