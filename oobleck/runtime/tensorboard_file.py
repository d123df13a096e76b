"""Writes scalars to an event file, with TensorBoard's own messages and records.

Imported only if TensorBoard is installed; that takes 50 ms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


class TensorBoardFile:
    """An open event file. Its methods raise OSError."""

    def __init__(self, directory: Path, *, wall_s: float, name: str) -> None:
        """`wall_s` is the time in seconds since 1970; `name` distinguishes files of one second."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{int(wall_s)}.{name}"
        # Rejected: TensorBoard's `EventFileWriter` and torch's `SummaryWriter`. They write in a thread, so they report
        # a full disk only once and a step late, and the master could not begin another file.
        self._records = RecordWriter(path.open("ab", buffering=0))
        self._write(Event(wall_time=wall_s, file_version="brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float], *, wall_s: float) -> None:
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=_as_float32(value)) for tag, value in values.items()]
        )
        self._write(Event(wall_time=wall_s, step=step, summary=summary))

    def close(self) -> None:
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


def _as_float32(value: float) -> float:
    return value if not math.isfinite(value) or abs(value) <= _FLOAT32_MAX else math.copysign(math.inf, value)
