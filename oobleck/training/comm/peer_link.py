"""One connection between two workers: its proofs, and what waits to be written. Nothing here blocks."""

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
_MAX_STRANGE_BYTES = 1024
"""The longest frame of a side that has not proved itself."""
_MAX_WAITING_BYTES = 64 << 20
"""What may wait for a peer that does not read; the link is broken then."""
_READ_BYTES = 1 << 16


class Link:
    """A connection, as one side sees it. Its owner sees to it that one thread at a time uses it."""

    def __init__(
        self,
        sock: socket.socket,
        poll: select.epoll,
        *,
        own: protocol.WorkerAddress,
        callee: protocol.WorkerAddress | None = None,
        until_s: float = math.inf,
    ) -> None:
        """`own` is where this worker listens; `callee` who is called, None on the listener's side.

        A caller has until `until_s` to prove itself, for its owner to watch.
        """
        sock.setblocking(False)
        self.fd = sock.fileno()
        self.until_s = until_s
        self.worker_id = None if callee is None else callee.worker_id
        self.is_proven = False
        """Whether the other side is known to belong to the run."""
        self.is_broken = False
        """Whether nothing can be sent or received any more."""
        self.is_ending = False
        """Whether this side has said its last word."""
        self.is_used = True
        """Whether it has carried anything; the owner takes that back."""
        self._sock = sock
        self._poll = poll
        self._own = own
        self._callee = callee
        self._peer = None if callee is None else (callee.host, callee.port)
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._out = bytearray()
        self._held = bytearray()
        """What is to be said once both have proved themselves."""
        self._waits_to_write = False
        self._their_nonce = b""
        limit = _MAX_STRANGE_BYTES if callee is None else MAX_FRAME_BYTES
        self._decoder: FrameDecoder[protocol.LinkMessage] = FrameDecoder(protocol.LinkMessage, max_frame_bytes=limit)

    @property
    def is_stranger(self) -> bool:
        """Whether it is a caller that has not proved itself."""
        return self._callee is None and not self.is_proven

    def is_with(self, address: protocol.WorkerAddress) -> bool:
        """Return whether the other side is the process that listens there."""
        return self._peer == (address.host, address.port)

    def open(self) -> None:
        """Call, or greet the caller."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._callee is not None:
            self._connect(self._callee)
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
        """Say the last word; what the other side says until it has said its own can still be read."""
        if not self.is_ending:
            self.is_ending = True
            self._say(protocol.LinkEnd())

    def flush(self) -> None:
        """Write what can be written."""
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
            if self.is_ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True
            return
        if bool(self._out) != self._waits_to_write:
            self._waits_to_write = not self._waits_to_write
            self._poll.modify(self.fd, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))

    def read(self) -> list[protocol.PeerMessage | protocol.LinkEnd]:
        """Read what there is, and see to the proofs. What arrives too late, or is not understood, breaks the link."""
        try:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                self.is_broken = True
            return [heard for message in self._decoder.feed(data) for heard in self._take(message)]
        except BlockingIOError:
            return []
        except (OSError, PeerError):
            self.is_broken = True
            return []

    def close(self) -> None:
        """End the connection at once."""
        with suppress(OSError):
            self._poll.unregister(self.fd)
        self._sock.close()

    # --- words -----------------------------------------------------------------------------------------------

    def _connect(self, callee: protocol.WorkerAddress) -> None:
        """Begin to connect; how that ends is read later."""
        try:
            self._sock.connect((callee.host, callee.port))
        except BlockingIOError:
            pass
        except OSError:
            self.is_broken = True

    def _say(self, message: protocol.LinkMessage) -> None:
        self._out += encode_frame(message)
        self.flush()
        self._check_waiting()

    def _check_waiting(self) -> None:
        if len(self._out) + len(self._held) > _MAX_WAITING_BYTES:
            self.is_broken = True

    def _take(self, message: protocol.LinkMessage) -> list[protocol.PeerMessage | protocol.LinkEnd]:
        """Take one message; returns it if it is for others. Raises PeerError for what has no place here."""
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
        self._peer = hello.host, hello.port
        ticket, nonces = self._own.ticket, (self._nonce, hello.nonce)
        self._check(hello.proof, _proof(ticket, "caller", nonces, caller))
        self.worker_id = hello.worker_id
        self._say(protocol.LinkProof(proof=_proof(ticket, "listener", nonces, caller)))
        self._begin()

    def _begin(self) -> None:
        self.is_proven = True
        if self._callee is None:  # nothing follows a hello before it is answered
            self._decoder = FrameDecoder(protocol.LinkMessage)
        self._out += self._held
        self._held.clear()
        self.flush()

    def _check(self, found: bytes, expected: bytes) -> None:
        if not hmac.compare_digest(found, expected):
            raise PeerError(f"{self._peer} does not know the ticket that it was told")


def _proof(ticket: bytes, role: str, nonces: tuple[bytes, bytes], caller: protocol.WorkerAddress) -> bytes:
    """Return what shows that a side knows the listener's ticket, for this connection alone."""
    told = (role, caller.worker_id, caller.host, caller.port)
    return hmac.digest(ticket, repr((*told, *nonces)).encode(), "sha256")
