"""An HTTP answer as it arrives, in any pieces: its status, and its body line by line. It reads and writes nothing.

The standard library's client blocks a thread, which nothing can cancel while a server says nothing for minutes.
"""

from __future__ import annotations

import re

from oobleck.errors import PeerError

_MOST_HEAD_BYTES = 64 << 10
_MOST_LINE_BYTES = 16 << 20
_MOST_SIZE_BYTES = 1 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] ([0-9]{3})(?: |$)")
_CHUNK_LINE = re.compile(rb"0*([0-9A-Fa-f]{1,16})[ \t]*(?:;|$)")


class HTTPAnswer:
    """What one GET was answered (RFC 9112), fed in pieces. The connection is for this answer alone: its end ends it."""

    def __init__(self) -> None:
        self.status: int | None = None
        """None before the head is whole."""
        self._raw = bytearray()
        self._is_chunked = False
        self._line = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take what has arrived; returns the lines of the body that are whole now. Raises PeerError."""
        self._raw += data
        if self.status is None and not self._read_head():
            return []
        self._line += self._body()
        *lines, rest = bytes(self._line).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise PeerError(f"a line of an answer has more than {_MOST_LINE_BYTES >> 20} MiB")
        self._line = bytearray(rest)
        return lines

    @property
    def rest(self) -> bytes:
        """What the body has after its last line end."""
        return bytes(self._line)

    def _read_head(self) -> bool:
        head, end, body = bytes(self._raw).partition(b"\r\n\r\n")
        if not end:
            if len(self._raw) > _MOST_HEAD_BYTES:
                raise PeerError("an answer has no end of its head")
            return False
        first, *headers = head.split(b"\r\n")
        found = _STATUS_LINE.match(first)
        if found is None:
            raise PeerError(f"an answer begins with {first[:100]!r}, which is not HTTP")
        self.status = int(found[1])
        named = {name.strip().lower(): value.strip().lower() for name, _, value in (h.partition(b":") for h in headers)}
        self._is_chunked = named.get(b"transfer-encoding", b"") == b"chunked"
        self._raw = bytearray(body)
        return True

    def _body(self) -> bytes:
        """Take what is whole out of what has arrived."""
        if not self._is_chunked:
            taken, self._raw = bytes(self._raw), bytearray()
            return taken
        taken = b""
        while (end := self._raw.find(b"\r\n")) >= 0:
            size = self._chunk_size(bytes(self._raw[:end]))
            if len(self._raw) < end + 2 + size + 2:
                break
            taken += self._raw[end + 2 : end + 2 + size]
            del self._raw[: end + 2 + size + 2]
        else:
            if len(self._raw) > _MOST_SIZE_BYTES:
                raise PeerError("an answer has no size of a chunk")
        return taken

    def _chunk_size(self, line: bytes) -> int:
        found = _CHUNK_LINE.match(line)
        if found is None:
            raise PeerError(f"an answer has {line[:100]!r} for the size of a chunk")
        size = int(found[1], 16)
        if size > _MOST_LINE_BYTES:
            raise PeerError(f"an answer has a chunk of {size} bytes")
        return size
