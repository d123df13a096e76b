"""The committed steps of a run, counted: a step that was committed again counts once, and what it redid is stated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from .step_entries import StepDone, StepsDone

__all__ = ["StepTally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Steps `first` to `last` of one journal entry; each like the others."""

    first: int
    last: int
    entry: StepDone | StepsDone

    @property
    def length(self) -> int:
        return self.last - self.first + 1

    @property
    def tokens(self) -> int:
        entry = self.entry
        return entry.tokens * self.length if isinstance(entry, StepDone) else entry.tokens_per_step * self.length


class StepTally:
    """Counts the commits of a journal. When a step comes again, those from it on were lost."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._first_step = 1
        self.num_committed_again = 0
        """Steps that were committed, lost, and had to be run again."""
        self._times_s: list[tuple[float, int]] = []

    def begin_after(self, step: int) -> None:
        """The run continues from a checkpoint of this step, which another run has saved."""
        if not self._runs:
            self._first_step = step + 1

    @property
    def begun_after(self) -> int:
        """The step that a run before this one has left; 0 for none."""
        return self._first_step - 1

    def add(self, entry: StepDone | StepsDone) -> None:
        """Take a commit in; O(1) amortised."""
        last = entry.record.step
        first = last if isinstance(entry, StepDone) else entry.first_step
        while self._runs and self._runs[-1].last >= first:
            run = self._runs.pop()
            if run.first < first:
                self._runs.append(replace(run, last=first - 1))
            self.num_committed_again += run.last - max(first, run.first) + 1
        self._runs.append(_Run(first=first, last=last, entry=entry))
        self._times_s.append((entry.record.duration_s, last - first + 1))

    @property
    def num_steps(self) -> int:
        return sum(run.length for run in self._runs)

    @property
    def num_missing(self) -> int:
        """Steps that were never committed although a later one was; those of a run before this one do not count."""
        return (self._runs[-1].last - self._first_step + 1 if self._runs else 0) - self.num_steps

    @property
    def num_samples(self) -> int:
        return sum(run.entry.record.num_samples * run.length for run in self._runs)

    @property
    def samples_repeated(self) -> int:
        return sum(run.entry.record.samples_repeated * run.length for run in self._runs)

    @property
    def samples_missing(self) -> int:
        return sum(run.entry.record.samples_missing * run.length for run in self._runs)

    @property
    def tokens(self) -> int:
        return sum(run.tokens for run in self._runs)

    @property
    def losses(self) -> tuple[float, ...]:
        """One a step where every step has an entry of its own; simulated steps have none."""
        return tuple(run.entry.record.loss for run in self._runs if isinstance(run.entry, StepDone))

    @property
    def last_s(self) -> float | None:
        """When the newest step was committed."""
        return self._runs[-1].entry.t_s if self._runs else None

    def step_time_s(self) -> tuple[float, float] | None:
        """Median and 95th percentile of a step's seconds (nearest rank); None without steps."""
        ordered = sorted(self._times_s)
        total = sum(count for _, count in ordered)
        if not total:
            return None
        low, high = _at_rank(ordered, (total + 1) // 2), _at_rank(ordered, total // 2 + 1)
        return (low + high) / 2, _at_rank(ordered, ceil(0.95 * total))


def _at_rank(ordered: list[tuple[float, int]], rank: int) -> float:
    """The value at a rank, from 1, of values that each come so many times."""
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            return value
    raise AssertionError("a rank beyond all values")
