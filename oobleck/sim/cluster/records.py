"""Virtual shards, and the records that a virtual worker takes of them in each step, as `training.data.records` does."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.control.protocol import RecordRun, RecordsOver, ScanRange, ScanResult, StepRecords
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec

from .fabric import Violation


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
        assignment_version, step = message.assignment_version, message.step
        if self._told.setdefault((assignment_version, step), message) != message:
            raise Violation(f"step {step} of assignment version {assignment_version} is given other records")

    def end(self, message: RecordsOver) -> None:
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


class VirtualShards:
    """How many records each shard has, the same for all workers, and which cannot be read. Both may change."""

    def __init__(self, names: Sequence[str], lengths: Sequence[int | None]) -> None:
        """A length of None is endless."""
        assert len(names) == len(lengths), (names, lengths)
        self.names = tuple(names)
        self.lengths = list(lengths)
        self.is_complete = True
        """Nothing grows any more."""
        self.spoiled: dict[int, int] = {}
        """By shard: from where on it cannot be read."""

    @classmethod
    def of(cls, job: JobSpec) -> VirtualShards:
        """The shards of a job, of which a simulation knows nothing but the names: endless."""
        return cls(job.data.shards, [None] * len(job.data.shards))

    def survey(self, want: ScanRange, *, items: int) -> ScanResult:
        """Return which records begin at a position; each predicts so many tokens."""
        length = self.lengths[want.shard]
        stop = want.start + want.limit if length is None else min(want.start + want.limit, length)
        bounds = tuple(range(want.start, stop + 1))
        return ScanResult(
            shard=want.shard,
            bounds=bounds,
            items=(items,) * (len(bounds) - 1),
            is_end=self.is_complete and stop == length,
        )

    def problem_in(self, runs: Sequence[RecordRun]) -> tuple[int, int] | None:
        """Return (shard, position) of the first record that cannot be read."""
        for run in runs:
            limit = self.spoiled.get(run.shard)
            if limit is not None and run.bounds[-1] > limit:
                return run.shard, max(limit, run.bounds[0])
        return None
