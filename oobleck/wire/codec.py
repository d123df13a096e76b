"""Frames and JSON lines: the protocol's messages and the journal's entries as bytes.

A frame is a big-endian u32 length and, in that many bytes, one msgpack map: the message's fields, and its class's name
under "@type". A JSON line is the same map as JSON. Decoding never executes anything.
"""

from __future__ import annotations

import json
import struct
import types
from typing import Generic, TypeVar, cast, get_args

import msgpack

from oobleck.errors import PeerError
from oobleck.json_table import load_json, unique_keys

from .shape import Mismatch, Notation, Shape
from .shapes import shape_of, tagged_shape_of

MAX_FRAME_BYTES = 16 * 1024 * 1024

_LENGTH = struct.Struct(">I")
# A traceback may hold lone surrogates, from file names that cannot be decoded, and must still arrive.
_BROKEN_TEXT = "surrogatepass"

T = TypeVar("T")

Accepts = type[T] | types.UnionType | tuple[type[T], ...]


def encode_frame(message: object) -> bytes:
    """Encode one message, a dataclass, as a frame. Costs O(size)."""
    written = tagged_shape_of((type(message),), Notation.BINARY).write(message)
    body: bytes = msgpack.packb(written, unicode_errors=_BROKEN_TEXT)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder(Generic[T]):
    """Turns a stream of bytes into messages of the accepted classes. After an error it raises the same error again."""

    def __init__(self, accepts: Accepts[T], *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Accept a union of dataclasses, a tuple of them, or a single one, in bodies of at most `max_frame_bytes`."""
        self._shape = _tagged(accepts, Notation.BINARY)
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._error: PeerError | None = None

    def feed(self, data: bytes | bytearray) -> list[T]:
        """Take bytes as they arrived, in any pieces; return the messages that are complete now.

        Raises PeerError that names what is wrong. Whole messages before the broken one in these bytes are lost.
        """
        if self._error is not None:
            raise self._error
        self._buffer += data
        try:
            return self._take_messages()
        except PeerError as error:
            # It is not known where the next frame starts, so nothing that follows on this connection can be read.
            self._error = error
            self._buffer.clear()
            raise

    def end(self) -> None:
        """Check that the stream may end here. Raises PeerError if the last frame is incomplete."""
        if self._error is not None:
            raise self._error
        if self._buffer:
            raise PeerError(f"the connection ended within a frame, {len(self._buffer)} bytes after its start")

    def _take_messages(self) -> list[T]:
        messages: list[T] = []
        start = 0
        while (stop := self._frame_stop(start)) is not None:
            body = bytes(self._buffer[start + _LENGTH.size : stop])
            messages.append(self._decode(body))
            start = stop
        del self._buffer[:start]  # once for all frames, because the rest of the buffer moves
        return messages

    def _frame_stop(self, start: int) -> int | None:
        """Return where the frame that starts here ends; None if it is not complete yet."""
        if len(self._buffer) < start + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        # Before the body has arrived, so that no peer can make the buffer grow without a bound.
        if length > self._max_frame_bytes:
            raise PeerError(f"a frame of {length} bytes; at most {self._max_frame_bytes} are accepted")
        stop = start + _LENGTH.size + int(length)
        return stop if stop <= len(self._buffer) else None

    def _decode(self, body: bytes) -> T:
        try:
            # Without the hook, the last of two equal keys would win silently.
            raw = msgpack.unpackb(body, object_pairs_hook=unique_keys, unicode_errors=_BROKEN_TEXT)
        except (ValueError, TypeError) as error:
            # TypeError: a key that cannot be hashed, without the C extension. All other errors are ValueErrors.
            raise PeerError(f"a frame that is not msgpack: {str(error) or type(error).__name__}") from error
        return cast("T", _read(self._shape, raw))


def to_builtins(value: object) -> object:
    """Write a dataclass as JSON-compatible builtins, without its name."""
    return _untagged(type(value)).write(value)


def from_builtins(expected: Accepts[T], raw: object) -> T:
    """Read what `to_builtins` wrote; for several classes, the one named under "@type". Raises PeerError."""
    shape = _untagged(expected) if isinstance(expected, type) else _tagged(expected, Notation.TEXT)
    return cast("T", _read(shape, raw))


def encode_json(entry: object) -> bytes:
    """Encode one dataclass as a line of JSON, its newline included; its class's name is under "@type"."""
    written = tagged_shape_of((type(entry),), Notation.TEXT).write(entry)
    # Shapes write a NaN as a map, so one that is left here is a bug. Lone surrogates are escaped, hence "ascii".
    return json.dumps(written, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def decode_json(accepts: Accepts[T], line: bytes | str) -> T:
    """Decode one line of JSON as one of the accepted classes. Raises PeerError that names what is wrong."""
    try:
        raw = load_json(line)
    except ValueError as error:
        raise PeerError(f"a line that is not JSON: {error}") from error
    return cast("T", _read(_tagged(accepts, Notation.TEXT), raw))


def _untagged(cls: object) -> Shape:
    return shape_of(cls, Notation.TEXT)


def _tagged(accepts: object, notation: Notation) -> Shape:
    return tagged_shape_of(accepts if isinstance(accepts, tuple) else get_args(accepts) or (accepts,), notation)


def _read(shape: Shape, raw: object) -> object:
    try:
        return shape.read(raw)
    except Mismatch as mismatch:
        raise PeerError(str(mismatch)) from mismatch
