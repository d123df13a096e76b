"""The choice of pipelines over kinds of nodes for the shortest step, and of the cheapest nodes.

Within a target T a pipeline takes `floor((T - first) / next) + 1` microbatches, so T is possible if a knapsack with one
weight for each kind of node reaches the batch. Nodes may be left as spares. The choice is exact for the slowest
pipeline; the reduction of gradients comes on top.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.costs import Timing, taken_within
from oobleck.planner.instantiation import distribute_microbatches
from oobleck.planner.kinds import Counts
from oobleck.planner.tables import Floats

Ints = NDArray[np.int64]

_MOST_STATES = 1 << 16
_CLOSE = 1e-3
_MOST_ROUNDS = 64
# The cheapest nodes are searched with this many targets, between the shortest step and 16 times that.
_PRICED_STEPS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The nodes of each pipeline, their microbatches, and the seconds of the slowest."""

    pipelines: tuple[Counts, ...]
    num_microbatches: tuple[int, ...]
    slowest_s: float


class Chooser:
    def __init__(
        self, timings: Mapping[Counts, Timing], num_microbatches: int, *, most_states: int = _MOST_STATES
    ) -> None:
        """Take at most `most_states` combinations of numbers of nodes; beyond, each pipeline has nodes of one kind."""
        self._timings = timings
        self._most_states = most_states
        self._total = num_microbatches
        self._items = np.array(list(timings), dtype=np.int64)
        self._first_s = np.array([timing.first_s for timing in timings.values()])
        self._next_s = np.array([timing.next_s for timing in timings.values()])
        self._most = np.array([min(num_microbatches, timing.most_microbatches) for timing in timings.values()])

    def most_pipelines(self, nodes: Counts) -> int:
        """Return how many pipelines the nodes can form, at most one for each microbatch."""
        found = self._filling(np.ones(len(self._items)), nodes, 1, exactly=False).total
        most = min(self._total, max(0, int(found))) if math.isfinite(found) else 0
        if (self._most >= self._total).all():
            return most
        # If some number of pipelines or more can take the batch, so can any smaller number or more.
        return bisect_left(range(1, most + 1), 1, key=lambda number: int(not self.can_take(nodes, number)))

    def can_take(self, nodes: Counts, number: int, *, exactly: bool = False) -> bool:
        """Return whether `number` or more pipelines of these nodes have memory for the batch, or exactly as many."""
        return self._filling(self._most, nodes, number, exactly=exactly).total >= self._total

    def choose(
        self, nodes: Counts, *, fewest: int, exactly: bool = False, least_s: float = 0.0, below_s: float = math.inf
    ) -> Choice | None:
        """Return the fastest `fewest` or more pipelines (or exactly as many) that these nodes can form.

        The slowest is known to take at least `least_s`. Returns None where the nodes are too few, or where the slowest
        would take `below_s` or longer.
        """
        high_s = min(float(self._first_s.max() + self._total * self._next_s.max()), math.nextafter(below_s, 0.0))
        best = self._within(high_s, nodes, fewest, exactly)
        if best is None:
            return None
        low_s = least_s
        # Bisection brings the limit close to the best.
        while best.slowest_s - low_s > _CLOSE * best.slowest_s:
            middle_s = (low_s + best.slowest_s) / 2
            found = self._within(middle_s, nodes, fewest, exactly)
            if found is None:
                low_s = middle_s
            else:
                best = found
        # Then the exact time of the pipelines found is the next one to beat.
        for _ in range(_MOST_ROUNDS):
            found = self._within(math.nextafter(best.slowest_s, 0.0) * (1 - 1e-12), nodes, fewest, exactly)
            if found is None:
                break
            best = found
        return best

    def cheapest(self, nodes: Counts, prices: Sequence[float], *, fewest: int) -> Counts | None:
        """Return the numbers of nodes whose step costs least; `prices` are for one node of each kind.

        Returns None where the nodes cannot hold the model, or are too many to try all combinations.
        """
        if not self._together(nodes):
            return None
        fastest = self.choose(nodes, fewest=fewest)
        if fastest is None:
            return None
        grid = np.indices(tuple(number + 1 for number in nodes))
        rate = np.tensordot(np.array(prices, dtype=np.float64), grid, axes=1)
        best: tuple[float, Counts] | None = None
        for target_s in fastest.slowest_s * np.geomspace(1.0, 16.0, _PRICED_STEPS):
            taken = self._taken(float(target_s))
            values = _Knapsack(self._items, taken, nodes, fewest, exactly=False).values[fewest]
            cost = np.where(values >= self._total, target_s * rate, np.inf)
            counts = tuple(int(number) for number in np.unravel_index(int(cost.argmin()), cost.shape))
            if best is None or cost[counts] < best[0]:
                best = float(cost[counts]), counts
        return None if best is None else best[1]

    def _within(self, limit_s: float, nodes: Counts, fewest: int, exactly: bool) -> Choice | None:
        """Return pipelines that take the batch within the limit, with their time; None where there are none."""
        filling = self._filling(self._taken(limit_s), nodes, fewest, exactly=exactly)
        if not filling.total >= self._total:
            return None
        pipelines = filling.items()
        if len(pipelines) > max(self._total, fewest):  # each pipeline needs a microbatch: keep the quickest
            pipelines = sorted(pipelines, key=lambda counts: self._timings[counts].first_s)[: self._total]
        pipelines.sort(key=lambda counts: (-sum(counts), *(-number for number in counts)))
        timings = [self._timings[counts] for counts in pipelines]
        counts = distribute_microbatches(timings, self._total)
        slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
        return Choice(pipelines=tuple(pipelines), num_microbatches=counts, slowest_s=min(slowest_s, limit_s))

    def _together(self, nodes: Counts) -> bool:
        return math.prod(number + 1 for number in nodes) <= self._most_states

    def _filling(self, values: Floats, nodes: Counts, most: int, *, exactly: bool) -> _Knapsack | _Apart:
        kind = _Knapsack if self._together(nodes) else _Apart
        return kind(self._items, values, nodes, most, exactly=exactly)

    def _taken(self, limit_s: float) -> Floats:
        """Return the microbatches that each pipeline takes within the limit, at most the batch."""
        return taken_within(limit_s, self._first_s, self._next_s, self._most)


class _Apart:
    """The most microbatches of pipelines with one kind each: one knapsack for each kind."""

    def __init__(self, items: Ints, values: Floats, nodes: Counts, most: int, *, exactly: bool) -> None:
        self._parts = []
        for kind, number in enumerate(nodes):
            own = items[:, kind] == items.sum(axis=1)
            self._parts.append(_Knapsack(items[own][:, kind : kind + 1], values[own], (number,), most, exactly=exactly))
        self.total, self._numbers = max(
            (sum(part.value(number) for part, number in zip(self._parts, numbers, strict=True)), numbers)
            for numbers in product(range(most + 1), repeat=len(nodes))
            if sum(numbers) == most or (sum(numbers) > most and not exactly)
        )

    def items(self) -> list[Counts]:
        size = len(self._parts)
        return [
            tuple(item[0] if kind == k else 0 for k in range(size))
            for kind, (part, number) in enumerate(zip(self._parts, self._numbers, strict=True))
            for item in part.items(number)
        ]


class _Knapsack:
    """The most microbatches that pipelines take, at [pipelines, nodes of each kind]."""

    def __init__(self, items: Ints, values: Floats, nodes: Counts, most: int, *, exactly: bool) -> None:
        usable = (values >= 1) & (items <= np.array(nodes)).all(axis=1)
        self._items, self._worth = _undominated(items[usable], values[usable], nodes)
        self._nodes, self._most, self._exactly = nodes, most, exactly
        shape = tuple(number + 1 for number in nodes)
        self.values = np.full((most + 1, *shape), -np.inf)
        self.values[0] = 0.0
        for item, worth in zip(self._items.tolist(), self._worth.tolist(), strict=True):
            self._add(item, worth)

    def _add(self, item: list[int], worth: float) -> None:
        # Any number of an item is a sum of powers of two.
        times = 1
        while all(times * weight <= number for weight, number in zip(item, self._nodes, strict=True)):
            if self._exactly and times > self._most:
                break
            # A copy, since each multiple is added to values without it.
            before = self.values.copy()
            read = tuple(slice(None, -times * weight or None) for weight in item)
            written = tuple(slice(times * weight, None) for weight in item)
            for number in range(self._most + 1):
                target = number + times
                # The last number of pipelines stands for as many or more, unless `exactly`.
                if target > self._most:
                    if self._exactly:
                        break
                    target = self._most
                best = self.values[at(target, *written)]
                np.maximum(best, before[at(number, *read)] + times * worth, out=best)
            times *= 2

    @property
    def total(self) -> float:
        return self.value(self._most)

    def value(self, number: int) -> float:
        """Return the microbatches that `number` pipelines take on all nodes."""
        return float(self.values[(number, *self._nodes)])

    def items(self, number: int | None = None) -> list[Counts]:
        """Return the pipelines behind the value for all nodes."""
        found: list[Counts] = []
        number, left = self._most if number is None else number, self._nodes
        while (value := self.values[(number, *left)]) > 0:
            number, left, item = self._step_back(number, left, float(value))
            found.append(item)
        return found

    def _step_back(self, number: int, left: Counts, value: float) -> tuple[int, Counts, Counts]:
        befores = {number - 1, number} if number == self._most and not self._exactly else {number - 1}
        for item, worth in zip(self._items.tolist(), self._worth.tolist(), strict=True):
            rest = tuple(have - weight for have, weight in zip(left, item, strict=True))
            if min(rest) < 0:
                continue
            for before in sorted(befores):
                # Values are whole numbers, so equality is exact.
                if before >= 0 and self.values[(before, *rest)] + worth == value:
                    return before, rest, tuple(item)
        raise AssertionError("every value belongs to some pipelines")


def at(*parts: int | slice) -> tuple[int | slice, ...]:
    """Return the index of an array with one axis for each kind: `array[at(0, *counts)]`."""
    return parts


def _undominated(items: Ints, values: Floats, nodes: Counts) -> tuple[Ints, Floats]:
    """Leave out items if another with at most their weights is worth as much."""
    worth = np.full(tuple(number + 1 for number in nodes), -np.inf)
    worth[tuple(items.T)] = values
    best = worth.copy()
    for axis in range(len(nodes)):
        best = np.maximum.accumulate(best, axis=axis)
    # The most that an item with fewer nodes of some kind, and no more of any, is worth.
    smaller = np.full_like(best, -np.inf)
    for axis in range(len(nodes)):
        one_less = [slice(None)] * len(nodes)
        one_more = one_less.copy()
        one_less[axis], one_more[axis] = slice(None, -1), slice(1, None)
        target = smaller[tuple(one_more)]
        np.maximum(target, best[tuple(one_less)], out=target)
    kept = values > smaller[tuple(items.T)]
    items, values = items[kept], values[kept]
    order = np.lexsort((-values, items.sum(axis=1)))
    return items[order], values[order]
