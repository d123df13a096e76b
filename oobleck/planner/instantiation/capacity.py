"""How much N nodes can take within a step time, and the least time within which they take a whole batch.

A pipeline of n nodes takes floor((T - first) / next) + 1 microbatches within T. Nodes may idle, so that may be
replaced by the best of any size up to n; then every size between the smallest and the largest may be used. The
least T is found from above: pipelines that take the batch within T may do so sooner, and become the next T to beat,
until none do. Each T asked is one knapsack at most (see `knapsack`), and none where a simple filling already settles
it. Pipelines of even sizes are timed without any search; mostly nothing beats the best of them, and one knapsack
proves that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from oobleck.planner.costs import Floats, Timing

from .knapsack import Ints, best_filling, best_items, best_values

Filled = tuple[tuple[int, ...], float]
"""Sizes of pipelines, largest first, and the seconds of the slowest."""

_NEVER_S = 1e300


def share_s(size: int, timing: Timing, *, num_nodes: int, num_microbatches: int) -> float:
    """Return the seconds in which a pipeline of `size` of `num_nodes` nodes takes at least its share of a batch."""
    return timing.step_s(-(-num_microbatches * size // num_nodes))


class Capacity:
    """What pipelines of some sizes on `num_nodes` nodes can take; `timings` are by number of nodes."""

    def __init__(self, timings: Mapping[int, Timing], *, num_nodes: int, num_microbatches: int) -> None:
        self._num_nodes, self.num_microbatches = num_nodes, num_microbatches
        self._smallest, self._largest = min(timings), max(timings)
        self._sizes = np.arange(self._smallest, self._largest + 1)
        # A size without a template takes no microbatch, so it is used as a smaller one with idle nodes.
        self._first_s, self._next_s = np.full(len(self._sizes), _NEVER_S), np.ones(len(self._sizes))
        indices = np.array(list(timings)) - self._smallest
        self._first_s[indices] = [timing.first_s for timing in timings.values()]
        self._next_s[indices] = [timing.next_s for timing in timings.values()]
        self._usable = np.maximum.accumulate(np.where(self._first_s < _NEVER_S, self._sizes - self._smallest, 0))
        """Where the largest size up to each that has a template is."""
        self.least_s = min(
            share_s(size, timing, num_nodes=num_nodes, num_microbatches=num_microbatches)
            for size, timing in timings.items()
        )
        """No pipelines are faster, whatever their number: some size has to take its nodes' share of the batch."""

    def any_number(self, limit_s: float) -> Filled | None:
        """Return the fastest pipelines, whatever their number, or None where none is within the limit."""
        return self._fastest(self._fill, self.least_s, limit_s)

    def exactly(self, num_pipelines: int, least_s: float, limit_s: float) -> Filled | None:
        """Return the fastest `num_pipelines` pipelines, or None where none is within the limit.

        `least_s` is known to be beaten by none, such as the time of the fastest in any number.
        """
        return self._fastest(lambda taken: self._choose(taken, num_pipelines), least_s, limit_s)

    def evenly(self, num_pipelines: int) -> list[tuple[int, int]]:
        """Return the sizes of so many pipelines, as even as can be, largest first, and how many have each."""
        return [
            (self._smallest + int(self._usable[size - self._smallest]), times)
            for size, times in sorted(self._even(num_pipelines).items(), reverse=True)
        ]

    def evenly_s(self, numbers: Ints) -> Floats:
        """Return the seconds within which pipelines of even sizes take the batch, for each of some numbers of them."""
        small, num_large = np.divmod(np.minimum(self._num_nodes, numbers * self._largest), numbers)
        kinds = self._usable[np.stack([small, np.minimum(small + 1, self._largest)]) - self._smallest]
        return self._dealt_s(kinds, np.stack([numbers - num_large, num_large]))

    def fewest_within(self, limit_s: float) -> float:
        """Return how many pipelines of the best size take the batch within the limit, were there nodes for them."""
        each = float(self._taken_within(limit_s).max())
        return self.num_microbatches / each if each > 0 else math.inf

    def most_taken(self, most_pipelines: int, limit_s: float) -> Floats:
        """Return, at [p], the most microbatches that p pipelines take within the limit, for p up to a few."""
        values = np.maximum.accumulate(self._taken_within(limit_s))
        return best_values(self._smallest, values, most=most_pipelines, total=self._num_nodes)

    def _taken(self, limits_s: Floats) -> Floats:
        """Return the microbatches that pipelines take within given seconds: [limit, size]; -inf for none."""
        limits_s = limits_s[:, None]
        taken: Floats = np.floor((limits_s - self._first_s) / self._next_s) + 1
        # Corrected to agree with Timing.step_s to the last bit.
        taken += self._first_s + taken * self._next_s <= limits_s
        taken -= self._first_s + (taken - 1) * self._next_s > limits_s
        taken[taken < 1] = -np.inf
        return taken

    def _fastest(
        self, answer: Callable[[Floats], Counter[int] | None], least_s: float, limit_s: float
    ) -> Filled | None:
        """Lower the limit to what the pipelines found take, until `answer` finds none that take less."""
        best: Counter[int] | None = None
        target_s = high_s = limit_s
        while target_s >= least_s and (found := answer(taken := self._taken_within(target_s))) is not None:
            sizes, counts = np.array(list(Counter(self._without_idle(taken, found)).items())).T
            best, high_s = found, min(target_s, float(self._dealt_s(sizes - self._smallest, counts)))
            target_s = math.nextafter(high_s, 0.0)
        return None if best is None else (self._settled(best, high_s), high_s)

    def _dealt_s(self, kinds: Ints, counts: Ints) -> Floats:
        """Return the seconds within which `counts` pipelines of some sizes, [size, …], take the whole batch.

        The microbatches that fit a continuous problem are given at once, and then one more to all pipelines of the
        size that ends first, until the batch is dealt.
        """
        first_s, next_s = self._first_s[kinds], self._next_s[kinds]
        rates = counts / next_s
        target_s = (self.num_microbatches + (rates * first_s - counts).sum(axis=0)) / rates.sum(axis=0)
        each = np.maximum(np.floor((target_s - first_s) / next_s), 0) + 1
        while (short := (counts * each).sum(axis=0) < self.num_microbatches).any():
            ends_s = np.where(counts > 0, first_s + each * next_s, np.inf)
            each += short & (ends_s == ends_s.min(axis=0))
        slowest_s: Floats = np.where(counts > 0, first_s + (each - 1) * next_s, 0.0).max(axis=0)
        return slowest_s

    def _settled(self, items: Counter[int], step_s: float) -> tuple[int, ...]:
        """Return the sizes, as even as they can be in that number within that time, none with idle nodes."""
        taken = self._taken_within(step_s)
        even = self._even(sum(items.values()))
        enough = self._sum(np.maximum.accumulate(taken), even) >= self.num_microbatches
        return self._without_idle(taken, even if enough else items)

    def _taken_within(self, step_s: float) -> Floats:
        taken: Floats = self._taken(np.array([step_s]))[0]
        return taken

    def _fill(self, taken: Floats) -> Counter[int] | None:
        """Return pipelines, in any number, that take the whole batch."""
        values = np.maximum.accumulate(taken)
        size = int(self._sizes[(taken / self._sizes).argmax()])
        times, rest = divmod(self._num_nodes, size)
        filled = Counter({size: times})
        if self._smallest <= rest:
            filled[min(rest, self._largest)] += 1
        if self._sum(values, filled) >= self.num_microbatches:
            return filled
        return best_filling(self._smallest, values, total=self._num_nodes, enough=self.num_microbatches)

    def _choose(self, taken: Floats, num_pipelines: int) -> Counter[int] | None:
        """Return exactly so many pipelines that take the whole batch."""
        values = np.maximum.accumulate(taken)
        total = min(self._num_nodes, num_pipelines * self._largest)
        return best_items(self._smallest, values, count=num_pipelines, total=total, enough=self.num_microbatches)

    def _even(self, num_pipelines: int) -> Counter[int]:
        """Return pipelines of sizes as even as can be."""
        small, num_large = divmod(min(self._num_nodes, num_pipelines * self._largest), num_pipelines)
        return +Counter({small: num_pipelines - num_large, small + 1: num_large})

    def _sum(self, values: Floats, items: Counter[int]) -> float:
        return sum(float(values[size - self._smallest]) * times for size, times in items.items())

    def _without_idle(self, taken: Floats, items: Counter[int]) -> tuple[int, ...]:
        """Replace each size by the largest up to it that takes the most, and pass on no more than the batch."""
        sizes: list[int] = []
        for size, times in sorted(items.items(), reverse=True):
            upto = taken[: size - self._smallest + 1]
            sizes += [self._smallest + len(upto) - 1 - int(upto[::-1].argmax())] * times
        return tuple(sizes[: self.num_microbatches])
