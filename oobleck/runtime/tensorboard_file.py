"""Scalars in an event file, by TensorBoard's own messages and records.

Imported only where TensorBoard is installed: it takes a twentieth of a second.

TensorBoard's `EventFileWriter` and torch's `SummaryWriter` are not used. They write in a thread, so that a full disk is
heard of a step late and once only, and the master could not begin another file.
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
    """An event file that is open for writing. Raises OSError like any file."""

    def __init__(self, directory: Path, *, wall_s: float, name: str) -> None:
        """`wall_s` is now, in seconds since 1970; `name` distinguishes files of one second."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"events.out.tfevents.{int(wall_s)}.{name}"
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
    """What a record of 32 bits can hold: what is too large for one is infinite."""
    return value if not math.isfinite(value) or abs(value) <= _FLOAT32_MAX else math.copysign(math.inf, value)
