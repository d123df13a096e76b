"""How much N nodes can take within a step time, and the least time within which they take a whole batch.

A pipeline of n nodes takes floor((T - first) / next) + 1 microbatches within T. Nodes may idle, so that may be
replaced by the best of any size up to n; then every size between the smallest and the largest may be used. The
least T is found among the finitely many values that a pipeline's time can have, by bisection; each T asked is
one knapsack at most (see `knapsack`), and none where a bound or a simple filling already settles it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from .costs import Floats, Timing
from .knapsack import best_filling, best_items, best_values

__all__ = ["Capacity", "Filled", "share_s"]

Filled = tuple[tuple[int, ...], float]
"""Sizes of pipelines, largest first, and the seconds of the slowest."""

_NEVER_S = 1e300
_GALLOP = 1 / 256
"""The first step up from a time that is too short, as a share of it; each further one doubles."""


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
        for size, timing in timings.items():
            self._first_s[size - self._smallest] = timing.first_s
            self._next_s[size - self._smallest] = timing.next_s
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
        """Bisect for the least time within which `answer` finds pipelines for what they take."""
        if limit_s < least_s:
            return None
        # One smallest pipeline could take everything while the others take one each.
        high_s = float(self._first_s[0] + self.num_microbatches * self._next_s[0])
        if limit_s < high_s:
            # Most limits cannot be met, so they are tried first.
            high_s = limit_s
            if answer(self._taken_within(high_s)) is None:
                return None
        if (best := answer(self._taken_within(least_s))) is not None:
            return self._settled(best, least_s), least_s
        best = answer(self._taken_within(high_s))
        assert best is not None, "enough time has an answer"
        low_s, step = least_s, _GALLOP
        while (target_s := least_s * (1 + step)) < high_s:
            if (found := answer(self._taken_within(target_s))) is not None:
                best, high_s = found, target_s
            else:
                low_s, step = target_s, 2 * step
        while (middle_s := self._middle_candidate(low_s, high_s)) is not None:
            if (found := answer(self._taken_within(middle_s))) is not None:
                best, high_s = found, middle_s
            else:
                low_s = middle_s
        return self._settled(best, high_s), high_s

    def _settled(self, items: Counter[int], step_s: float) -> tuple[int, ...]:
        """Return the sizes, as even as they can be in that number within that time, none with idle nodes."""
        taken = self._taken_within(step_s)
        even = self._even(taken, sum(items.values()))
        return self._without_idle(taken, items if even is None else even)

    def _taken_within(self, step_s: float) -> Floats:
        taken: Floats = self._taken(np.array([step_s]))[0]
        return taken

    def _more_taken(self, low_s: float, high_s: float) -> Floats:
        """Return by how many microbatches pipelines take more within `high_s` than within `low_s`."""
        taken = np.maximum(self._taken(np.array([low_s, high_s])), 0.0)
        more: Floats = taken[1] - taken[0]
        return more

    def _middle_candidate(self, low_s: float, high_s: float) -> float | None:
        """Return the median of the times that pipelines can take, strictly between two times; None for none."""
        numbers = self._more_taken(low_s, math.nextafter(high_s, 0.0)).astype(np.int64)
        if not numbers.any():
            return None
        below = np.maximum(self._taken_within(low_s), 0.0)
        which = np.repeat(np.arange(len(numbers)), numbers)
        following = np.arange(len(which)) - np.repeat(np.cumsum(numbers) - numbers, numbers) + below[which]
        times_s = self._first_s[which] + following * self._next_s[which]
        return float(np.partition(times_s, len(times_s) // 2)[len(times_s) // 2])

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
        if (even := self._even(taken, num_pipelines)) is not None:
            return even
        values = np.maximum.accumulate(taken)
        total = min(self._num_nodes, num_pipelines * self._largest)
        return best_items(self._smallest, values, count=num_pipelines, total=total, enough=self.num_microbatches)

    def _even(self, taken: Floats, num_pipelines: int) -> Counter[int] | None:
        """Return pipelines of sizes as even as can be, if they take the whole batch."""
        small, num_large = divmod(min(self._num_nodes, num_pipelines * self._largest), num_pipelines)
        even = +Counter({small: num_pipelines - num_large, small + 1: num_large})
        return even if self._sum(np.maximum.accumulate(taken), even) >= self.num_microbatches else None

    def _sum(self, values: Floats, items: Counter[int]) -> float:
        return sum(float(values[size - self._smallest]) * times for size, times in items.items())

    def _without_idle(self, taken: Floats, items: Counter[int]) -> tuple[int, ...]:
        """Replace each size by the largest up to it that takes the most, and pass on no more than the batch."""
        sizes: list[int] = []
        for size, times in sorted(items.items(), reverse=True):
            upto = taken[: size - self._smallest + 1]
            sizes += [self._smallest + len(upto) - 1 - int(upto[::-1].argmax())] * times
        return tuple(sizes[: self.num_microbatches])
