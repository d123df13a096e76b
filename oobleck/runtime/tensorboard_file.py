"""Scalars in the format of TensorBoard's event files, written without TensorBoard.

A file is a sequence of records (TensorFlow's TFRecord: length, masked CRC-32C of it, data, masked CRC-32C of that),
each a protobuf message `Event` with a wall time, a step, and a summary of named values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

__all__ = ["TensorBoardFile", "crc32c"]

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


def _table() -> tuple[int, ...]:
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


_TABLE = _table()


class TensorBoardFile:
    """An event file that is open for writing. Raises OSError like any file."""

    def __init__(self, directory: Path, *, wall_s: float, name: str) -> None:
        """`wall_s` is now, in seconds since 1970; `name` tells apart files of one second."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = (directory / f"events.out.tfevents.{int(wall_s)}.{name}").open("ab", buffering=0)
        self._write(_double(1, wall_s) + _bytes(3, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float], *, wall_s: float) -> None:
        """Write the scalars of a step."""
        summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_double(1, wall_s) + _varint(2, step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked(length) + event + _masked(event))


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum (RFC 3720, appendix B.4); O(bytes), a few microseconds for an event."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + _MASK_DELTA) & 0xFFFFFFFF)


def _number(value: int) -> bytes:
    """Protobuf's variable-length integer."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _double(field: int, value: float) -> bytes:
    return _number(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _number(field << 3 | 5) + struct.pack("<f", value)
