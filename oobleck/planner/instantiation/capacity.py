"""The microbatches that N nodes take within a step time, and the least time for a whole batch.

A pipeline of n nodes takes floor((T - first) / next) + 1 microbatches within T. The search lowers T to what the
pipelines found truly take, until none beat it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from oobleck.planner.costs import Timing, taken_within
from oobleck.planner.tables import Floats

from .knapsack import Ints, best_filling, best_items, best_values

Filled = tuple[tuple[int, ...], float]
"""The sizes of pipelines, largest first, and the seconds of the slowest."""

# Finite, since infinities would make NaN of the sums in `taken_within`.
_NEVER_S = 1e300


def share_s(size: int, timing: Timing, *, num_nodes: int, num_microbatches: int) -> float:
    """Return the seconds in which a pipeline of `size` of `num_nodes` nodes takes at least its share of a batch."""
    return timing.step_s(-(-num_microbatches * size // num_nodes))


class Capacity:
    """The microbatches that pipelines take on `num_nodes` nodes; `timings` are by size."""

    def __init__(self, timings: Mapping[int, Timing], *, num_nodes: int, num_microbatches: int) -> None:
        self._num_nodes, self.num_microbatches = num_nodes, num_microbatches
        self._smallest, self._largest = min(timings), max(timings)
        self._sizes = np.arange(self._smallest, self._largest + 1)
        # A size without a template takes no microbatch, so it is used as a smaller one with idle nodes.
        self._first_s, self._next_s = np.full(len(self._sizes), _NEVER_S), np.ones(len(self._sizes))
        indices = np.array(list(timings)) - self._smallest
        self._most = np.full(len(self._sizes), np.inf)
        self._most[indices] = [timing.most_microbatches for timing in timings.values()]
        self._first_s[indices] = [timing.first_s for timing in timings.values()]
        self._next_s[indices] = [timing.next_s for timing in timings.values()]
        # For each size, the index of the largest size up to it that has a template.
        self._usable = np.maximum.accumulate(np.where(self._first_s < _NEVER_S, self._sizes - self._smallest, 0))
        # No pipelines are faster: some size has to take its nodes' share of the batch.
        self.least_s = min(
            share_s(size, timing, num_nodes=num_nodes, num_microbatches=num_microbatches)
            for size, timing in timings.items()
        )

    def any_number(self, limit_s: float) -> Filled | None:
        """Return the fastest pipelines in any number, or None where none are within the limit."""
        return self._fastest(self._fill, self.least_s, limit_s)

    def exactly(self, num_pipelines: int, least_s: float, limit_s: float) -> Filled | None:
        """Return the fastest `num_pipelines` pipelines, or None where none are within the limit.

        `least_s` is a known lower bound, such as the time of the fastest in any number.
        """
        return self._fastest(lambda taken: self._choose(taken, num_pipelines), least_s, limit_s)

    def evenly(self, num_pipelines: int) -> list[tuple[int, int]]:
        """Return the most even sizes of `num_pipelines` pipelines, largest first, as (size, times)."""
        return [
            (self._smallest + int(self._usable[size - self._smallest]), times)
            for size, times in sorted(self._even(num_pipelines).items(), reverse=True)
        ]

    def evenly_s(self, numbers: Ints) -> Floats:
        """Return the seconds in which pipelines of even sizes take the batch, for each number of pipelines."""
        small, num_large = np.divmod(np.minimum(self._num_nodes, numbers * self._largest), numbers)
        kinds = self._usable[np.stack([small, np.minimum(small + 1, self._largest)]) - self._smallest]
        return self._dealt_s(kinds, np.stack([numbers - num_large, num_large]))

    def fewest_within(self, limit_s: float) -> float:
        """Return how many pipelines of the best size would take the batch within the limit, given enough nodes."""
        each = float(self._taken_within(limit_s).max())
        return self.num_microbatches / each if each > 0 else math.inf

    def most_taken(self, most_pipelines: int, limit_s: float) -> Floats:
        """Return, at [p], the most microbatches that p pipelines take within the limit; meant for a few pipelines."""
        values = np.maximum.accumulate(self._taken_within(limit_s))
        return best_values(self._smallest, values, most=most_pipelines, total=self._num_nodes)

    def _taken_within(self, limit_s: float) -> Floats:
        """Return the microbatches that a pipeline of each size takes within the limit; -inf for none."""
        taken = taken_within(limit_s, self._first_s, self._next_s, self._most)
        # Every pipeline of a plan takes a microbatch.
        taken[taken < 1] = -np.inf
        return taken

    def _fastest(
        self, answer: Callable[[Floats], Counter[int] | None], least_s: float, limit_s: float
    ) -> Filled | None:
        """Lower the limit to the time of the pipelines found, until `answer` finds none that beat it."""
        best: Counter[int] | None = None
        target_s = high_s = limit_s
        while target_s >= least_s and (found := answer(taken := self._taken_within(target_s))) is not None:
            sizes, counts = np.array(list(Counter(self._without_idle(taken, found)).items())).T
            best, high_s = found, min(target_s, float(self._dealt_s(sizes - self._smallest, counts)))
            # The next limit excludes equal times, so every round makes progress.
            target_s = math.nextafter(high_s, 0.0)
        return None if best is None else (self._settled(best, high_s), high_s)

    def _dealt_s(self, kinds: Ints, counts: Ints) -> Floats:
        """Return the seconds in which `counts` pipelines of some sizes, [size, …], take the whole batch.

        Infinity where their memory is too small for it.
        """
        # As in `distribute_microbatches`: a continuous solution at once, then the rest one by one to the first to end.
        first_s, next_s, most = self._first_s[kinds], self._next_s[kinds], self._most[kinds]
        rates = counts / next_s
        target_s = (self.num_microbatches + (rates * first_s - counts).sum(axis=0)) / rates.sum(axis=0)
        each = np.minimum(np.maximum(np.floor((target_s - first_s) / next_s), 0) + 1, most)
        while True:
            ends_s = np.where((counts > 0) & (each < most), first_s + each * next_s, np.inf)
            least_s = ends_s.min(axis=0)
            short = (counts * each).sum(axis=0) < self.num_microbatches
            if not (growing := short & (least_s < np.inf)).any():
                break
            each += growing & (ends_s == least_s)
        slowest_s: Floats = np.where(counts > 0, first_s + (each - 1) * next_s, 0.0).max(axis=0)
        return np.where(short, np.inf, slowest_s)

    def _settled(self, items: Counter[int], step_s: float) -> tuple[int, ...]:
        """Return the most even sizes in that number within that time, none with idle nodes."""
        taken = self._taken_within(step_s)
        even = self._even(sum(items.values()))
        enough = self._sum(np.maximum.accumulate(taken), even) >= self.num_microbatches
        return self._without_idle(taken, even if enough else items)

    def _fill(self, taken: Floats) -> Counter[int] | None:
        # Nodes may idle, so n nodes take the most of any size up to n.
        values = np.maximum.accumulate(taken)
        size = int(self._sizes[(taken / self._sizes).argmax()])
        times, rest = divmod(self._num_nodes, size)
        filled = Counter({size: times})
        if self._smallest <= rest:
            filled[min(rest, self._largest)] += 1
        # A simple filling that takes the batch spares the knapsack.
        if self._sum(values, filled) >= self.num_microbatches:
            return filled
        return best_filling(self._smallest, values, total=self._num_nodes, enough=self.num_microbatches)

    def _choose(self, taken: Floats, num_pipelines: int) -> Counter[int] | None:
        values = np.maximum.accumulate(taken)
        total = min(self._num_nodes, num_pipelines * self._largest)
        return best_items(self._smallest, values, count=num_pipelines, total=total, enough=self.num_microbatches)

    def _even(self, num_pipelines: int) -> Counter[int]:
        small, num_large = divmod(min(self._num_nodes, num_pipelines * self._largest), num_pipelines)
        # The plus drops a size that no pipeline has.
        return +Counter({small: num_pipelines - num_large, small + 1: num_large})

    def _sum(self, values: Floats, items: Counter[int]) -> float:
        return sum(float(values[size - self._smallest]) * times for size, times in items.items())

    def _without_idle(self, taken: Floats, items: Counter[int]) -> tuple[int, ...]:
        """Replace each size by the largest up to it that takes the most; at most one pipeline for each microbatch."""
        sizes: list[int] = []
        for size, times in sorted(items.items(), reverse=True):
            upto = taken[: size - self._smallest + 1]
            # Reversed, since `argmax` returns the first of equals, and the largest is wanted.
            sizes += [self._smallest + len(upto) - 1 - int(upto[::-1].argmax())] * times
        return tuple(sizes[: self.num_microbatches])
