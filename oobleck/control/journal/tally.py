"""The committed steps of a run, counted: a step that was committed again counts once, and what it redid is stated."""

from __future__ import annotations

from array import array
from itertools import compress
from math import ceil

from .step_entries import StepDone, StepsDone

__all__ = ["StepTally"]


class StepTally:
    """Counts the commits of a journal. When a step comes again, those from it on were lost.

    Runs have millions of steps, so no entry is kept: each is a number in every one of these columns.
    """

    def __init__(self) -> None:
        self._first = array("q")
        """Each entry is about steps `first` to `last`, which are alike."""
        self._last = array("q")
        self._samples = array("q")
        self._repeated = array("q")
        self._missing = array("q")
        self._tokens = array("q")
        self._at_s = array("d")
        self._loss = array("d")
        self._is_single = array("b")
        """Whether its step has an entry of its own."""
        self._first_step = 1
        self.num_committed_again = 0
        """Steps that were committed, lost, and had to be run again."""
        self._duration_s = array("d")
        """Of all entries, those of lost steps too; each stands for `num_alike` steps."""
        self._num_alike = array("q")

    def begin_after(self, step: int) -> None:
        """The run continues from a checkpoint of this step, which another run has saved."""
        if not self._last:
            self._first_step = step + 1

    @property
    def begun_after(self) -> int:
        """The step that a run before this one has left; 0 for none."""
        return self._first_step - 1

    def add(self, entry: StepDone | StepsDone) -> None:
        """Take a commit in; O(1) amortised."""
        record, is_single = entry.record, isinstance(entry, StepDone)
        last = record.step
        first = last if isinstance(entry, StepDone) else entry.first_step
        self._cut(first)
        self._first.append(first)
        self._last.append(last)
        self._samples.append(record.num_samples)
        self._repeated.append(record.samples_repeated)
        self._missing.append(record.samples_missing)
        self._tokens.append(entry.tokens if isinstance(entry, StepDone) else entry.tokens_per_step)
        self._at_s.append(entry.t_s)
        self._loss.append(record.loss)
        self._is_single.append(is_single)
        self._duration_s.append(record.duration_s)
        self._num_alike.append(last - first + 1)

    def _cut(self, first: int) -> None:
        """Forget what was committed from a step on."""
        while self._last and self._last[-1] >= first:
            self.num_committed_again += self._last[-1] - max(first, self._first[-1]) + 1
            if self._first[-1] < first:
                self._last[-1] = first - 1
                return
            for column in (self._first, self._last, self._samples, self._repeated, self._missing, self._tokens):
                column.pop()
            for numbers in (self._at_s, self._loss):
                numbers.pop()
            self._is_single.pop()

    @property
    def num_steps(self) -> int:
        return sum(self._last) - sum(self._first) + len(self._last)

    @property
    def num_missing(self) -> int:
        """Steps that were never committed although a later one was; those of a run before this one do not count."""
        return (self._last[-1] - self._first_step + 1 if self._last else 0) - self.num_steps

    @property
    def num_samples(self) -> int:
        return self._total(self._samples)

    @property
    def samples_repeated(self) -> int:
        return self._total(self._repeated)

    @property
    def samples_missing(self) -> int:
        return self._total(self._missing)

    @property
    def tokens(self) -> int:
        return self._total(self._tokens)

    @property
    def losses(self) -> tuple[float, ...]:
        """One a step where every step has an entry of its own; simulated steps have none."""
        return tuple(compress(self._loss, self._is_single))

    @property
    def last_s(self) -> float | None:
        """When the newest step was committed."""
        return self._at_s[-1] if self._at_s else None

    def step_time_s(self) -> tuple[float, float] | None:
        """Median and 95th percentile of a step's seconds (nearest rank); None without steps."""
        ordered = sorted(zip(self._duration_s, self._num_alike, strict=True))
        total = sum(count for _, count in ordered)
        if not total:
            return None
        low, high = _at_rank(ordered, (total + 1) // 2), _at_rank(ordered, total // 2 + 1)
        return (low + high) / 2, _at_rank(ordered, ceil(0.95 * total))

    def _total(self, each: array[int]) -> int:
        """The sum over all steps of what each of an entry's has."""
        return sum(value * (last - first + 1) for value, first, last in zip(each, self._first, self._last, strict=True))


def _at_rank(ordered: list[tuple[float, int]], rank: int) -> float:
    """The value at a rank, from 1, of values that each come so many times."""
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            return value
    raise AssertionError("a rank beyond all values")
