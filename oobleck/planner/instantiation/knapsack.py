"""Knapsacks with whole sizes and very many items: N nodes for pipelines of a few sizes.

An item of size `smallest + i` is worth `values[i]`; -inf forbids a size. Halving solves both kinds: the best of a total
is the best of two parts whose totals lie in a window around the half, and each level needs one window about as wide as
the sizes: O(r² log N) for sizes up to r and a total of N, or O(r² log p) for exactly p items.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.tables import Floats

Ints = NDArray[np.int64]

# Totals up to this many times the largest size are not halved further.
_BASE = 4


class _Fillings:
    """The values of the best items for the totals of each level's window, at [level][total - start]."""

    def __init__(self, smallest: int, values: Floats, total: int) -> None:
        self._smallest, self._item_values = smallest, values
        self._reach = smallest + len(values) - 1
        windows = [(total, total)]
        # Items in a row can be cut so that the parts' totals differ by at most the largest size.
        while windows[-1][1] > _BASE * self._reach:
            low, high = windows[-1]
            windows.append((max(0, (low - self._reach) // 2), (high + self._reach + 1) // 2))
        self._starts = [low for low, _ in windows[:-1]] + [0]
        self.values = [np.zeros(0)] * (len(windows) - 1) + [self._small(windows[-1][1])]
        for level in reversed(range(len(windows) - 1)):
            low, high = windows[level]
            self.values[level] = self._sums(level, np.arange(low, high + 1)).max(axis=1)

    def _small(self, total: int) -> Floats:
        """Return the best values for every total up to this one."""
        # Totals that differ by less than the smallest size do not depend on each other: they form a block.
        block, reach, length = self._smallest, self._reach, len(self._item_values)
        filled = np.full(reach + total + block, -np.inf)
        filled[reach] = 0.0
        backwards = self._item_values[::-1]
        for start in range(1, total + 1, block):
            # Strides of 8 bytes: each row is the window of the next total.
            windows = np.ndarray((block, length), np.float64, filled, 8 * start, (8, 8))
            with_item = (windows + backwards).max(axis=1)
            # Nodes may idle, so a total takes at least what a smaller one does.
            with_item[0] = max(filled[reach + start - 1], with_item[0])
            filled[reach + start : reach + start + block] = np.maximum.accumulate(with_item)
        return filled[reach : reach + total + 1]

    def _sums(self, level: int, totals: Ints) -> Floats:
        """Return the values of all splits: [total, excess of the first part over the half]."""
        start, values = self._starts[level + 1], self.values[level + 1]
        firsts = (totals[:, None] + 1) // 2 + np.arange(self._reach // 2 + 1)[None, :]
        others = totals[:, None] - firsts
        inside = (firsts < start + len(values)) & (others >= start)
        first_values = values[np.where(inside, firsts - start, 0)]
        other_values = values[np.where(inside, others - start, 0)]
        found: Floats = np.where(inside, first_values + other_values, -np.inf)
        return found

    def items(self) -> Counter[int]:
        """Return how many items of each size the best choice has."""
        wanted = Counter({self._starts[0] + len(self.values[0]) - 1: 1})
        for level in range(len(self.values) - 1):
            parts: Counter[int] = Counter()
            for amount, times in sorted(wanted.items()):
                first = (amount + 1) // 2 + int(self._sums(level, np.array([amount])).argmax())
                parts[first] += times
                parts[amount - first] += times
            wanted = parts
        items: Counter[int] = Counter()
        for amount, times in sorted(wanted.items()):
            for size in self._small_items(amount):
                items[size] += times
        return items

    def _small_items(self, amount: int) -> list[int]:
        values = self.values[-1]
        sizes = []
        while values[amount] > 0:
            if values[amount - 1] == values[amount]:
                amount -= 1
                continue
            rests = np.arange(amount - self._smallest, max(amount - self._reach, 0) - 1, -1)
            size = self._smallest + int((values[rests] + self._item_values[: len(rests)]).argmax())
            sizes.append(size)
            amount -= size
        return sizes


class _Windows:
    """The values of the best choices of up to `count` items, each number for the totals of one window."""

    def __init__(self, smallest: int, values: Floats, count: int, total: int) -> None:
        self._smallest, self._largest = smallest, smallest + len(values) - 1
        self._starts: dict[int, int] = {}
        self._values: dict[int, Floats] = {}
        windows = {count: (total, total)}
        self._order: list[int] = []
        while windows:
            current = max(windows)
            low, high = windows.pop(current)
            low, high = max(low, current * self._smallest), min(high, current * self._largest)
            self._order.append(current)
            self._starts[current] = low
            self._values[current] = np.full(high - low + 1, -np.inf)
            if current > 1:
                for part, bounds in self._parts(current, low, high):
                    known = windows.get(part, bounds)
                    windows[part] = (min(known[0], bounds[0]), max(known[1], bounds[1]))
        for current in reversed(self._order):
            start, size = self._starts[current], len(self._values[current])
            if current == 1:
                self._values[1] = values[start - smallest : start - smallest + size]
            else:
                self._values[current] = self._sums(current, np.arange(start, start + size)).max(axis=1)

    def _first_share(self, count: int, total: int) -> int:
        """Return the least total of the first part of `count` items, which is not the smaller one."""
        return (total + (self._smallest if count % 2 else 0) + 1) // 2

    def _parts(self, count: int, low: int, high: int) -> list[tuple[int, tuple[int, int]]]:
        first, second = (count + 1) // 2, count // 2
        # Items dealt alternately in the order of their sizes make parts that differ by the range of sizes only.
        slack = self._largest - self._smallest
        first_low = self._first_share(count, low)
        first_high = self._first_share(count, high) + slack // 2
        return [(first, (first_low, first_high)), (second, (low - first_low - slack // 2, high - (high + 1) // 2))]

    def _sums(self, count: int, totals: Ints) -> Floats:
        """Return the values of all splits in two parts: [total, excess of the first part over its least]."""
        extra = np.arange((self._largest - self._smallest) // 2 + 1)
        least = (totals + (self._smallest if count % 2 else 0) + 1) // 2
        firsts = least[:, None] + extra[None, :]
        return self._at((count + 1) // 2, firsts) + self._at(count // 2, totals[:, None] - firsts)

    def _at(self, count: int, totals: Ints) -> Floats:
        values, positions = self._values[count], totals - self._starts[count]
        inside = (positions >= 0) & (positions < len(values))
        found: Floats = np.where(inside, values[np.where(inside, positions, 0)], -np.inf)
        return found

    def best(self, count: int, total: int) -> float:
        return float(self._values[count][total - self._starts[count]])

    def items(self, count: int, total: int) -> Counter[int]:
        wanted: dict[int, Counter[int]] = {number: Counter() for number in self._order}
        wanted[count][total] = 1
        for current in self._order[:-1]:
            for amount, times in sorted(wanted[current].items()):
                share = self._first_share(current, amount) + int(self._sums(current, np.array([amount])).argmax())
                wanted[(current + 1) // 2][share] += times
                wanted[current // 2][amount - share] += times
        return wanted[1]


def best_filling(smallest: int, values: Floats, *, total: int, enough: float) -> Counter[int] | None:
    """Return the sizes of items up to `total` in all with the largest sum of values, None if less than `enough`.

    Values are whole numbers, or -inf.
    """
    fillings = _Fillings(smallest, values, total)
    return fillings.items() if fillings.values[0][-1] >= enough else None


def best_items(smallest: int, values: Floats, *, count: int, total: int, enough: float) -> Counter[int] | None:
    """Return the sizes of exactly `count` items that sum to `total`, with the largest sum of values.

    Returns None if there is no choice, or its sum is less than `enough`.
    """
    if not count * smallest <= total <= count * (smallest + len(values) - 1):
        return None
    windows = _Windows(smallest, values, count, total)
    best = windows.best(count, total)
    return windows.items(count, total) if np.isfinite(best) and best >= enough else None


def best_values(smallest: int, values: Floats, *, most: int, total: int) -> Floats:
    """Return, at [p] up to `most`, the largest sum of values of exactly p items of at most `total` in all.

    O(most · total · sizes), for few items.
    """
    length = len(values)
    reach = smallest + length - 1
    total = min(total, most * reach)
    sums, found = np.full(reach + total + 1, -np.inf), np.zeros(most + 1)
    sums[reach] = 0.0
    backwards = values[::-1]
    for number in range(1, most + 1):
        windows = np.ndarray((total + 1, length), np.float64, sums, 0, (8, 8))
        sums[reach:] = (windows + backwards).max(axis=1)
        sums[:reach] = -np.inf
        found[number] = sums[reach:].max()
    return found
