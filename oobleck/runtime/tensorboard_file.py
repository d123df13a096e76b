"""Writes scalars to an event file, with TensorBoard's own messages.

Imported only if TensorBoard is installed, by a master that trains meanwhile; that takes 50 ms.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_CASTAGNOLI = 0x82F63B78
_MASK_DELTA = 0xA282EAD8


class TensorBoardFile:
    """An open event file. Its methods raise OSError."""

    def __init__(self, directory: Path, *, wall_s: float, name: str) -> None:
        """`wall_s` is the time in seconds since 1970; `name` distinguishes files of one second."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{int(wall_s)}.{name}"
        # Rejected: TensorBoard's `EventFileWriter` and torch's `SummaryWriter`. They write in a thread, so they report
        # a full disk only once and a step late, and the master could not begin another file. Its `RecordWriter` comes
        # with all of its plugins, NumPy and boto3, whose import holds the master up for a second.
        self._file = path.open("ab", buffering=0)
        self._write(Event(wall_time=wall_s, file_version="brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float], *, wall_s: float) -> None:
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=_as_float32(value)) for tag, value in values.items()]
        )
        self._write(Event(wall_time=wall_s, step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        self._file.write(_record(event.SerializeToString()))


def _record(data: bytes) -> bytes:
    """Frame a message as TensorFlow's TFRecord does."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked_crc(length)), data, struct.pack("<I", _masked_crc(data))))


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C as TFRecord masks it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_CASTAGNOLI if byte & 1 else 0)
    return byte


_CRC_OF_BYTE = tuple(map(_crc_of, range(256)))


def _as_float32(value: float) -> float:
    return value if not math.isfinite(value) or abs(value) <= _FLOAT32_MAX else math.copysign(math.inf, value)
