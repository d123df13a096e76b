"""Counts the committed steps of a run, each once, however often it was committed.

Runs have millions of steps, so none is kept: equal steps in a row are one record, and durations are counted by their
first digits.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from math import ceil

from .rank_entries import StepsSaved
from .step_entries import StepDone, StepsDone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Steps `first` to `last`, which all committed the same."""

    first: int
    last: int
    samples: int
    repeated: int
    missing: int
    tokens: int

    @property
    def num_steps(self) -> int:
        return self.last - self.first + 1

    def is_followed_by(self, other: _Alike) -> bool:
        """Whether `other` are the next steps, and equal."""
        ours = (self.last + 1, self.samples, self.repeated, self.missing, self.tokens)
        return ours == (other.first, other.samples, other.repeated, other.missing, other.tokens)


@dataclass(slots=True, kw_only=True)
class StepTally:
    """Counts the commits of a journal. When a step is committed again, all from it on were lost. A wire value."""

    _alike: list[_Alike] = field(default_factory=list)
    _first_step: int = 1
    num_committed_again: int = 0
    last_s: float | None = None
    _durations: dict[float, int] = field(default_factory=dict)
    """How many steps took each duration in seconds, to four digits; lost steps included."""

    def begin_after(self, step: int) -> None:
        """Note that the run continues from another run's checkpoint of this step."""
        # A run that goes back to a checkpoint later still began where it did.
        if not self._alike:
            self._first_step = step + 1

    @property
    def begun_after(self) -> int:
        """The step that the run began after; 0 at its beginning."""
        return self._first_step - 1

    def add(self, entry: StepDone | StepsDone) -> None:
        record = entry.record
        new = _Alike(
            first=record.step if isinstance(entry, StepDone) else entry.first_step,
            last=record.step,
            samples=record.num_samples,
            repeated=record.samples_repeated,
            missing=record.samples_missing,
            tokens=entry.tokens if isinstance(entry, StepDone) else entry.tokens_per_step,
        )
        self._append(new, entry.t_s, record.duration_s)

    def _append(self, new: _Alike, t_s: float, duration_s: float) -> None:
        # A step that comes again shows that all steps from it on were lost.
        self._cut(new.first)
        if self._alike and self._alike[-1].is_followed_by(new):
            self._alike[-1] = replace(new, first=self._alike[-1].first)
        else:
            self._alike.append(new)
        self.last_s = t_s
        # Rounded, because millions of steps take as many different durations, and would need as many counts.
        rounded_s = float(f"{duration_s:.3e}")
        self._durations[rounded_s] = self._durations.get(rounded_s, 0) + new.num_steps

    def save(self, entry: StepsSaved) -> None:
        """Add steps of a script, which knows no samples."""
        self.begin_after(entry.first_step - 1)
        new = _Alike(first=entry.first_step, last=entry.step, samples=0, repeated=0, missing=0, tokens=0)
        self._append(new, entry.t_s, entry.worked_s / new.num_steps)

    def _cut(self, first: int) -> None:
        while self._alike and self._alike[-1].last >= first:
            newest = self._alike.pop()
            self.num_committed_again += newest.last - max(first, newest.first) + 1
            if newest.first < first:
                self._alike.append(replace(newest, last=first - 1))

    @property
    def num_steps(self) -> int:
        return sum(each.num_steps for each in self._alike)

    @property
    def num_missing(self) -> int:
        """How many steps were never committed although a later one was, not counting those of earlier runs."""
        return (self._alike[-1].last - self._first_step + 1 if self._alike else 0) - self.num_steps

    @property
    def num_samples(self) -> int:
        return sum(each.samples * each.num_steps for each in self._alike)

    @property
    def samples_repeated(self) -> int:
        return sum(each.repeated * each.num_steps for each in self._alike)

    @property
    def samples_missing(self) -> int:
        return sum(each.missing * each.num_steps for each in self._alike)

    @property
    def tokens(self) -> int:
        return sum(each.tokens * each.num_steps for each in self._alike)

    def step_time_s(self) -> tuple[float, float] | None:
        """Median and 95th percentile of a step's seconds (nearest rank), to four digits; None without steps."""
        ordered = sorted(self._durations.items())
        total = sum(self._durations.values())
        if not total:
            return None
        low, high = _at_rank(ordered, (total + 1) // 2), _at_rank(ordered, total // 2 + 1)
        return (low + high) / 2, _at_rank(ordered, ceil(0.95 * total))


class LossTally:
    """The losses of the committed steps, 16 bytes each; steps that share an entry have none."""

    def __init__(self) -> None:
        # Arrays, because lists of Python's numbers would take four times as much room.
        self._steps = array("q")
        self._losses = array("d")

    def add(self, entry: StepDone | StepsDone) -> None:
        if isinstance(entry, StepDone):
            self.add_loss(entry.record.step, entry.record.loss)
        else:
            self._cut(entry.first_step)

    def add_loss(self, step: int, loss: float) -> None:
        """Add a step's loss, and forget those from that step on."""
        self._cut(step)
        self._steps.append(step)
        self._losses.append(loss)

    def _cut(self, first: int) -> None:
        while self._steps and self._steps[-1] >= first:
            self._steps.pop()
            self._losses.pop()

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(self._losses)


def _at_rank(ordered: list[tuple[float, int]], rank: int) -> float:
    """Return the value at a rank, counted from 1, of (value, count) pairs in order."""
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            return value
    raise AssertionError("a rank beyond all values")
