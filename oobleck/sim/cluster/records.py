"""The records that a virtual worker takes in each step: the twin of `training.data.records`."""

from __future__ import annotations

from oobleck.control.protocol import RecordRun, RecordsOver, ScanRange, ScanResult, StepRecords
from oobleck.errors import ShardUnreadable

from .fabric import Violation
from .shards import VirtualShards

__all__ = ["Records"]


class Records:
    """What was received by now, of all versions. Where data is not in shards, no step needs any."""

    def __init__(self, shards: VirtualShards, *, items: int) -> None:
        """Each record predicts `items` tokens."""
        self.assignment_version = 0
        """The one that steps follow."""
        self._shards = shards
        self._items = items
        self._told: dict[tuple[int, int], StepRecords] = {}
        self._over: dict[int, RecordsOver] = {}

    @property
    def are_needed(self) -> bool:
        return bool(self._shards.names)

    def survey(self, wants: tuple[ScanRange, ...]) -> tuple[ScanResult, ...]:
        """Return what lies in shards from some positions on."""
        return tuple(self._shards.survey(want, items=self._items) for want in wants)

    def tell(self, message: StepRecords) -> None:
        """Note what a step takes."""
        assignment_version, step = message.assignment_version, message.step
        if self._told.setdefault((assignment_version, step), message) != message:
            raise Violation(f"step {step} of assignment version {assignment_version} is given other records")

    def end(self, message: RecordsOver) -> None:
        """Note that no more come."""
        self._over[message.assignment_version] = message

    def is_told(self, step: int) -> bool:
        return (self.assignment_version, step) in self._told

    def over_after(self, step: int) -> RecordsOver | None:
        """What was said, if it was that no step comes after this one."""
        over = self._over.get(self.assignment_version)
        return over if over is not None and over.step == step else None

    def runs_of(self, step: int) -> tuple[RecordRun, ...]:
        return self._told[self.assignment_version, step].runs if self.are_needed else ()

    def is_last(self, step: int) -> bool:
        """Whether a step is known to be the last one."""
        return bool(self.runs_of(step)) and self._told[self.assignment_version, step].is_last

    def read(self, step: int) -> None:
        """Read the records of a step. Raises ShardUnreadable."""
        problem = self._shards.problem_in(self.runs_of(step))
        if problem is not None:
            raise ShardUnreadable("spoiled", shard=problem[0], position=problem[1])
