"""Instantiation: how many pipelines of each size make the shortest step.

For a number of pipelines p and a target T a pipeline of n nodes takes m_n(T) microbatches, and whether N nodes
take the whole batch is a knapsack with exactly p items (see `knapsack`). Nodes may idle, so m_n may be replaced
by the best of any size up to n; then every size between the smallest and the largest may be used, and all N
nodes are (or p times the largest size).

The search over T narrows a bracket over the finitely many values that a pipeline's time can have. The time to
reduce gradients depends on p and on the pipeline with the most bytes a node, so both are enumerated; those that
cannot beat the best so far are excluded together, by the Lagrangian bound of the same knapsack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .batches import deal_microbatches
from .costs import Floats, Timing
from .knapsack import Ints, best_items, value_bounds
from .profile import NetworkProfile

__all__ = ["SizeOption", "Sizing", "choose_sizes", "reduction_s", "sizing_of"]

_TOLERANCE = 1e-12
_BISECTIONS = 40
_ENUMERATED = 4096
"""Candidates for the step time are listed when there are no more than these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOption:
    """What a pipeline of one size can do."""

    timing: Timing
    reduced_bytes: int
    """The most gradient bytes that one of its nodes reduces with its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Pipelines by size, with their microbatches and the step time that results."""

    sizes: tuple[int, ...]
    """Nodes of each pipeline, largest first."""
    num_microbatches: tuple[int, ...]
    step_s: float


def reduction_s(network: NetworkProfile, reduced_bytes: int, num_pipelines: int) -> float:
    """Return the seconds in which `num_pipelines` owners reduce their gradients, none of it overlapped.

    A ring moves 2 (p - 1) / p of the bytes through every link; the latency is that of a tree.
    """
    if num_pipelines == 1:
        return 0.0
    moved = 2 * (num_pipelines - 1) / num_pipelines * reduced_bytes
    return moved / network.inter_node_bytes_per_s + 2 * (num_pipelines - 1).bit_length() * network.inter_node_latency_s


def sizing_of(
    options: Mapping[int, SizeOption], sizes: Sequence[int], num_microbatches: int, network: NetworkProfile
) -> Sizing:
    """Return the best division of the batch over pipelines of the given sizes."""
    ordered = tuple(sorted(sizes, reverse=True))
    timings = [options[size].timing for size in ordered]
    counts = deal_microbatches(timings, num_microbatches)
    slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
    reduced_bytes = max(options[size].reduced_bytes for size in ordered)
    return Sizing(
        sizes=ordered,
        num_microbatches=counts,
        step_s=slowest_s + reduction_s(network, reduced_bytes, len(ordered)),
    )


def choose_sizes(
    options: Mapping[int, SizeOption],
    *,
    num_nodes: int,
    num_microbatches: int,
    network: NetworkProfile,
    fewest: int,
    most: int,
) -> Sizing:
    """Return the sizes with the shortest step, reduction of gradients included: `fewest` to `most` pipelines.

    Exact over all multisets of the options' sizes that take at most `num_nodes` nodes, with whole microbatches,
    at least one for each pipeline. Nodes left over are spares. Of equal ones the most even is taken.
    """
    best: Sizing | None = None
    for reduced_bytes in sorted({option.reduced_bytes for option in options.values()}, reverse=True):
        allowed = {n: option for n, option in options.items() if option.reduced_bytes <= reduced_bytes}
        if min(allowed) * fewest <= num_nodes:
            group = _Group(allowed, num_nodes, num_microbatches, network, reduced_bytes)
            best = group.improve(best, fewest, most)
    assert best is not None, "the callers ask for a number of pipelines that fits"
    return best


class _Group:
    """The pipelines of some sizes, none of which reduces more than `reduced_bytes` on a node."""

    def __init__(
        self,
        options: Mapping[int, SizeOption],
        num_nodes: int,
        num_microbatches: int,
        network: NetworkProfile,
        reduced_bytes: int,
    ) -> None:
        self._options = options
        self._num_nodes = num_nodes
        self._num_microbatches = num_microbatches
        self._network = network
        self._reduced_bytes = reduced_bytes
        self._smallest, self._largest = min(options), max(n for n in options if n == min(options) or n <= num_nodes)
        sizes = range(self._smallest, self._largest + 1)
        # A size without a template takes no microbatch, so it is used as a smaller one with idle nodes.
        self._first_s = np.array([options[n].timing.first_s if n in options else np.inf for n in sizes])
        self._next_s = np.array([options[n].timing.next_s if n in options else 1.0 for n in sizes])

    def improve(self, best: Sizing | None, fewest: int, most: int) -> Sizing | None:
        """Return the best sizing of this group, or `best` where that is not beaten."""
        numbers = np.arange(fewest, min(most, self._num_nodes // self._smallest) + 1)
        if best is None and len(numbers):
            first = int(np.abs(numbers - self._likely_number()).argmin())
            best = self._sizing(self._search(int(numbers[first]), math.inf))
            numbers = np.delete(numbers, first)
        while best is not None and len(numbers):
            limits_s = np.array([self._limit_s(best, int(number)) for number in numbers])
            bounds = self._capacity_bounds(numbers, limits_s)
            first = int(bounds.argmax())
            if bounds[first] < self._num_microbatches:
                break
            found = self._search(int(numbers[first]), float(limits_s[first]))
            if found:
                best = min(best, self._sizing(found), key=lambda sizing: sizing.step_s)
            bounds[first] = -np.inf
            numbers = numbers[bounds >= self._num_microbatches]
        return best

    def _limit_s(self, best: Sizing, num_pipelines: int) -> float:
        """Return what the slowest pipeline may take at most for the step to be shorter than the best."""
        return best.step_s * (1 - _TOLERANCE) - reduction_s(self._network, self._reduced_bytes, num_pipelines)

    def _sizing(self, sizes: Sequence[int]) -> Sizing:
        return sizing_of(self._options, sizes, self._num_microbatches, self._network)

    def _likely_number(self) -> float:
        """Return the number of pipelines that would be best if there were no remainders."""
        low_s, high_s = 0.0, float(self._first_s.min() + self._num_microbatches * self._next_s.max())
        sizes = np.arange(self._smallest, self._largest + 1)
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            rate = float(((middle_s - self._first_s) / self._next_s / sizes).max())
            low_s, high_s = (middle_s, high_s) if rate * self._num_nodes < self._num_microbatches else (low_s, middle_s)
        return self._num_nodes / float(sizes[((high_s - self._first_s) / self._next_s / sizes).argmax()])

    def _taken(self, step_s: Floats) -> Floats:
        """Return the microbatches that pipelines take within given seconds: [row, size]; -inf for none."""
        limits_s = np.asarray(step_s)[:, None]
        with np.errstate(invalid="ignore"):
            taken: Floats = np.floor((limits_s - self._first_s) / self._next_s) + 1
            # Corrected to agree with Timing.step_s to the last bit.
            taken += self._first_s + taken * self._next_s <= limits_s
            taken -= self._first_s + (taken - 1) * self._next_s > limits_s
        taken[~(taken >= 1)] = -np.inf
        return taken

    def _total(self, num_pipelines: int) -> int:
        return min(self._num_nodes, num_pipelines * self._largest)

    def _capacity_bounds(self, numbers: Ints, step_s: Floats) -> Floats:
        totals = np.minimum(self._num_nodes, numbers * self._largest)
        values = np.maximum.accumulate(self._taken(step_s), axis=1)
        return value_bounds(self._smallest, values, counts=numbers, totals=totals)

    def _search(self, num_pipelines: int, limit_s: float) -> tuple[int, ...]:
        """Return the sizes whose slowest pipeline is fastest, if within `limit_s`; else none."""
        best_s = min(limit_s, float(self._first_s[0] + self._num_microbatches * self._next_s[0]))
        best = self._within(num_pipelines, best_s)
        low_s = 0.0
        while best and (target_s := self._middle_candidate(low_s, best_s)) is not None:
            if found := self._within(num_pipelines, target_s):
                best, best_s = found, target_s
            else:
                low_s = target_s
        return best

    def _middle_candidate(self, low_s: float, high_s: float) -> float | None:
        """Return a time that some pipeline can take, strictly between two times and about in the middle."""
        taken = self._taken(np.array([low_s, math.nextafter(high_s, 0.0)]))
        below, above = np.maximum(taken[0], 0.0), np.maximum(taken[1], 0.0)
        most = int((above - below).argmax())
        if above[most] == below[most]:
            return None
        if (above - below).sum() > _ENUMERATED:
            number = (above[most] + below[most]) // 2 + 1
            return float(self._first_s[most] + (number - 1) * self._next_s[most])
        candidates = np.concatenate(
            [
                self._first_s[i] + (np.arange(below[i] + 1, above[i] + 1) - 1) * self._next_s[i]
                for i in np.nonzero(above > below)[0]
            ]
        )
        return float(np.partition(candidates, len(candidates) // 2)[len(candidates) // 2])

    def _within(self, num_pipelines: int, step_s: float) -> tuple[int, ...]:
        """Return sizes of pipelines that take the whole batch within `step_s`, or none."""
        taken = self._taken(np.array([step_s]))
        values = np.maximum.accumulate(taken, axis=1)
        total = self._total(num_pipelines)
        bound = value_bounds(self._smallest, values, counts=[num_pipelines], totals=[total])
        if bound[0] < self._num_microbatches:
            return ()
        small, num_large = divmod(total, num_pipelines)
        even = Counter({small: num_pipelines - num_large, small + 1: num_large})
        offset = small - self._smallest
        capacity = values[0, offset] * (num_pipelines - num_large)
        if num_large:
            capacity += values[0, offset + 1] * num_large
        if capacity >= self._num_microbatches:
            return self._without_idle(taken[0], even)
        capacity, items = best_items(self._smallest, values[0], count=num_pipelines, total=total)
        return self._without_idle(taken[0], items) if capacity >= self._num_microbatches else ()

    def _without_idle(self, taken: Floats, items: Counter[int]) -> tuple[int, ...]:
        """Replace each size by the smaller one that takes at least as much in its stead, where there is one."""
        sizes: list[int] = []
        for size, times in sorted(items.items(), reverse=True):
            prefix = taken[: size - self._smallest + 1]
            best = int(len(prefix) - 1 - prefix[::-1].argmax())
            sizes += [self._smallest + best] * times
        return tuple(sizes)
