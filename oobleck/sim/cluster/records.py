"""Virtual shards, and a virtual worker's records of each step: the twin of `training.data.records`."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.control.protocol import RecordRun, ScanRange, ScanResult, StepRecords, StepsOver
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec

from .fabric import Violation


class Records:
    """The assigned records of all versions, which only jobs with shards need."""

    def __init__(self, shards: VirtualShards, *, items: int) -> None:
        """Take the shards, whose records predict `items` tokens each."""
        self.assignment_version = 0  # the one in force
        self._shards = shards
        self._items = items
        self._told: dict[tuple[int, int], StepRecords] = {}
        self._over: dict[int, StepsOver] = {}

    @property
    def are_needed(self) -> bool:
        return bool(self._shards.names)

    def survey(self, wants: tuple[ScanRange, ...]) -> tuple[ScanResult, ...]:
        """Return the records of shards from some positions on."""
        return tuple(self._shards.survey(want, items=self._items) for want in wants)

    def tell(self, message: StepRecords) -> None:
        assignment_version, step = message.assignment_version, message.step
        if self._told.setdefault((assignment_version, step), message) != message:
            raise Violation(f"step {step} of assignment version {assignment_version} is given other records")

    def end(self, message: StepsOver) -> None:
        self._over[message.assignment_version] = message

    def is_told(self, step: int) -> bool:
        return (self.assignment_version, step) in self._told

    def over_after(self, step: int) -> StepsOver | None:
        """Return the message that this step is the last one, if it came."""
        over = self._over.get(self.assignment_version)
        return over if over is not None and over.step == step else None

    def runs_of(self, step: int) -> tuple[RecordRun, ...]:
        return self._told[self.assignment_version, step].runs if self.are_needed else ()

    def is_last(self, step: int) -> bool:
        """Return whether a step is known to be the last one."""
        return bool(self.runs_of(step)) and self._told[self.assignment_version, step].is_last

    def read(self, step: int) -> None:
        """Read the records of a step. Raises ShardUnreadable."""
        problem = self._shards.problem_in(self.runs_of(step))
        if problem is not None:
            raise ShardUnreadable("spoiled", shard=problem[0], position=problem[1])


class VirtualShards:
    """The lengths and unreadable parts of shards, the same for all workers. Both may change."""

    def __init__(self, names: Sequence[str], lengths: Sequence[int | None]) -> None:
        """Take a length of None for an endless shard."""
        assert len(names) == len(lengths), (names, lengths)
        self.names = tuple(names)
        self.lengths = list(lengths)
        self.is_complete = True  # no shard grows further
        self.spoiled: dict[int, int] = {}  # the first unreadable position of a shard

    @classmethod
    def of(cls, job: JobSpec) -> VirtualShards:
        """Return a job's shards, all endless."""
        return cls(job.data.shards, [None] * len(job.data.shards))

    def survey(self, want: ScanRange, *, items: int) -> ScanResult:
        """Return the records that begin at a position; each predicts `items` tokens."""
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
        """Return (shard, position) of the first unreadable record."""
        for run in runs:
            limit = self.spoiled.get(run.shard)
            if limit is not None and run.bounds[-1] > limit:
                return run.shard, max(limit, run.bounds[0])
        return None
