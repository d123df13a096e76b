"""Virtual shards: how many records each has, and which of them cannot be read."""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.control.protocol import RecordRun, ScanRange, ScanResult
from oobleck.job import JobSpec

__all__ = ["VirtualShards"]


class VirtualShards:
    """The same for all workers. Shards may become unreadable, and grow."""

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
