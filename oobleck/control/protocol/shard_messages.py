"""The part of the protocol that is about shards: finding records, and telling which of them a step takes.

master ── Survey ──> one worker        what lies in a shard from here on?
worker ── Surveyed ──> master          where its next records begin and end, and whether that is all
master ── StepRecords ──> all          steps ahead: which records a step takes
worker ── RecordsFailed ──> master     a record of the step in flight cannot be read
master ── RecordsOver ──> all          no step comes after this one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .bases import ForWorker, FromWorker
from .data_position import DataPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRange:
    """A question about a shard."""

    shard: int
    start: int
    limit: int
    """How many records to report, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest(ForWorker):
    """Find records. Repeating the request's number, the answer is distinguished from late ones."""

    request: int
    wants: tuple[ScanRange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What lies in a shard from `bounds[0]` on: record i lies in [bounds[i], bounds[i + 1])."""

    shard: int
    bounds: tuple[int, ...]
    items: tuple[int, ...]
    """Predicted tokens of each record; empty where all are as long as samples are."""
    is_end: bool
    """Nothing comes after these, ever."""
    problem: str | None = None
    """Why it cannot be read; the bounds are then only where that was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanAnswer(FromWorker):
    """The answer to Survey."""

    outlives_worker: ClassVar[bool] = True
    request: int
    found: tuple[ScanResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRun:
    """Records of one shard, one after the other: record i lies in [bounds[i], bounds[i + 1])."""

    shard: int
    bounds: tuple[int, ...]

    @property
    def num_records(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecords(ForWorker):
    """The records that a step takes, in the order in which its microbatches do."""

    assignment_version: int
    """Raised when records that were sent are taken back; a plan update says which version its plan follows."""
    step: int
    runs: tuple[RecordRun, ...]
    num_items: int
    """Predicted tokens in all of them."""
    after: DataPosition
    """Where in the data the run is once the step is committed."""
    is_last: bool
    """No step comes after it. It may have fewer records than the others."""

    @property
    def num_records(self) -> int:
        return sum(run.num_records for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsOver(ForWorker):
    """No step comes after this one: it was only found out when its records had been sent already."""

    assignment_version: int
    step: int
    generation: int
    """Of the plan that training ends with."""
    position: DataPosition
    """Where in the data the run is then."""
    save: bool
    """The state is not saved, and is to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFailed(FromWorker):
    """A record of the step in flight cannot be read by this worker; its part of the step is discarded."""

    outlives_worker: ClassVar[bool] = True
    generation: int
    shard: int
    position: int
    problem: str
