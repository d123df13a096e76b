"""Messages about shards: finding records, and assigning them to steps.

master ── ScanRequest ──> one worker   what lies in a shard from here on?
worker ── ScanAnswer ──> master        where its next records begin and end, and whether these are all
master ── StepRecords ──> all          steps ahead: which records a step takes
worker ── RecordsFailed ──> master     a record of the step in flight cannot be read
master ── StepsOver ──> all            no step follows this one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .data_position import DataPosition
from .records import ForWorker, FromWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRange:
    shard: int
    start: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest(ForWorker):
    """Find records. The answer repeats the request's number, which tells it from late ones."""

    request: int
    wants: tuple[ScanRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The records of a shard from `bounds[0]` on: record i lies in [bounds[i], bounds[i + 1])."""

    shard: int
    bounds: tuple[int, ...]
    items: tuple[int, ...]
    """Predicted tokens of each record; empty where each is as long as a sample."""
    is_end: bool
    """Whether no record will ever follow these."""
    problem: str | None = None
    """Why the shard cannot be read; then `bounds` only says where that was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanAnswer(FromWorker):
    outlives_worker: ClassVar[bool] = True
    request: int
    found: tuple[ScanResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRun:
    """Consecutive records of one shard: record i lies in [bounds[i], bounds[i + 1])."""

    shard: int
    bounds: tuple[int, ...]

    @property
    def num_records(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords(ForWorker):
    """The records that a step takes, in the order of its microbatches."""

    assignment_version: int
    """Increases when sent records are taken back; a plan update has the version that its plan follows."""
    step: int
    runs: tuple[RecordRun, ...]
    num_items: int
    """Predicted tokens in all of them."""
    after: DataPosition
    is_last: bool
    """Whether no step follows. The last one may have fewer records."""

    @property
    def num_records(self) -> int:
        return sum(run.num_records for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsOver(ForWorker):
    """No step follows this one, which was found out after it had begun."""

    step: int
    generation: int
    """The generation of the plan that training ends with."""
    assignment_version: int = 0
    position: DataPosition | None = None
    """None if the data is not in shards."""
    save: bool
    """Whether to save the state, because it is not saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFailed(FromWorker):
    """A record of the step in flight cannot be read by this worker; its part of the step is discarded."""

    outlives_worker: ClassVar[bool] = True
    generation: int
    shard: int
    position: int
    problem: str
