"""Instantiation: the number of pipelines of each size that makes the shortest step.

Within a target T a pipeline of n nodes takes m_n(T) microbatches; whether N nodes take the whole batch is a knapsack
(see `capacity`). The time to reduce gradients comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from oobleck.planner.costs import Timing
from oobleck.planner.profiles import NetworkProfile

from .batches import distribute_microbatches
from .capacity import Capacity, Filled, share_s

_TOLERANCE = 1e-12
# From this many pipelines on, a ring's share 2 (p - 1) / p counts as constant: it is within 1 / 16 of its limit.
_MANY = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOption:
    timing: Timing
    reduced_bytes: int
    """The most gradient bytes that one node of the pipeline reduces with its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes of pipelines in nodes, largest first, their microbatches, and the step time that results."""

    sizes: tuple[int, ...]
    num_microbatches: tuple[int, ...]
    step_s: float


_NO_SIZES = Sizing(sizes=(), num_microbatches=(), step_s=math.inf)


def reduction_s(network: NetworkProfile, reduced_bytes: int, num_pipelines: int) -> float:
    """Return the seconds in which `num_pipelines` pipelines reduce their gradients, nothing overlapped.

    A ring sends 2 (p - 1) / p of the bytes over every link, in 2 (p - 1) messages (Patarasuk and Yuan 2009); from 16
    pipelines on this neglects its growth.
    """
    others = min(num_pipelines, _MANY) - 1
    return reduced_bytes * bytes_reduction_s(network, num_pipelines) + 2 * others * network.inter_node_latency_s


def bytes_reduction_s(network: NetworkProfile, num_pipelines: int) -> float:
    """Return the seconds that each byte adds to the reduction among `num_pipelines` pipelines."""
    others = min(num_pipelines, _MANY) - 1
    return 2 * others / (others + 1) / network.inter_node_bytes_per_s


def sizing_of(
    options: Mapping[int, SizeOption], sizes: Sequence[int], num_microbatches: int, network: NetworkProfile
) -> Sizing:
    """Return the best division of the batch over pipelines of the given sizes."""
    ordered = tuple(sorted(sizes, reverse=True))
    timings = [options[size].timing for size in ordered]
    counts = distribute_microbatches(timings, num_microbatches)
    slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
    reduced_bytes = max(options[size].reduced_bytes for size in ordered)
    return Sizing(
        sizes=ordered, num_microbatches=counts, step_s=slowest_s + reduction_s(network, reduced_bytes, len(ordered))
    )


def possible_numbers(options: Mapping[int, SizeOption], *, num_nodes: int, num_microbatches: int) -> Sequence[int]:
    """Return how many pipelines can take a batch on at most `num_nodes` nodes, smallest first; O(their number · N · r).

    Where memory limits no option, that takes no time.
    """
    timings = {size: option.timing for size, option in options.items() if size <= num_nodes}
    numbers = range(1, min(num_nodes // min(timings), num_microbatches) + 1) if timings else range(0)
    if all(timing.most_microbatches == math.inf for timing in timings.values()):
        return numbers
    capacity = Capacity(timings, num_nodes=num_nodes, num_microbatches=num_microbatches)
    longest_s = max(timing.first_s + num_microbatches * timing.next_s for timing in timings.values())
    taken = capacity.most_taken(len(numbers), longest_s)
    return [number for number in numbers if taken[number] >= num_microbatches]


def choose_sizes(
    options: Mapping[int, SizeOption],
    *,
    num_nodes: int,
    num_microbatches: int,
    network: NetworkProfile,
    fewest: int,
    most: int,
) -> Sizing:
    """Return the sizes of `fewest` to `most` pipelines with the shortest step, reduction of gradients included.

    Exact over all multisets of the options' sizes that take at most `num_nodes` nodes, with whole microbatches, at
    least one for each pipeline. Of equal ones the most even wins; nodes left over are spares. Returns no sizes, and a
    step without end, where the nodes form no such pipelines, or these have no memory for the batch.
    """
    if not options or min(options) * fewest > num_nodes:
        return _NO_SIZES
    most = min(most, num_nodes // min(options))
    # Even sizes need no search, and mostly nothing beats the best of them, as one knapsack proves.
    best = _best_even(options, num_nodes, num_microbatches, network, range(fewest, most + 1))
    if best.step_s == math.inf:
        best = _Found(sizes=(), step_s=_longest_s(options, num_microbatches, network))
    # The reduction depends on the pipeline with the most bytes a node, so the search enumerates limits on these.
    for least_s, reduced_bytes in _limits(options, num_nodes, num_microbatches, network, fewest):
        # Limits are sorted by their lower bounds: no later one is better.
        if least_s >= best.step_s * (1 - _TOLERANCE):
            break
        timings = {n: o.timing for n, o in options.items() if o.reduced_bytes <= reduced_bytes and n <= num_nodes}
        if min(timings) * fewest <= num_nodes:
            search = _Search(
                Capacity(timings, num_nodes=num_nodes, num_microbatches=num_microbatches),
                [reduction_s(network, reduced_bytes, max(number, 1)) for number in range(_MANY + 1)],
            )
            best = search.improve(best, fewest, min(most, num_nodes // min(timings)))
    if not best.sizes:
        return _NO_SIZES
    return sizing_of(options, best.sizes, num_microbatches, network)


def _longest_s(options: Mapping[int, SizeOption], num_microbatches: int, network: NetworkProfile) -> float:
    """Return more seconds than any step takes."""
    return 2 * max(
        option.timing.first_s
        + num_microbatches * option.timing.next_s
        + reduction_s(network, option.reduced_bytes, _MANY)
        for option in options.values()
    )


def _best_even(
    options: Mapping[int, SizeOption], num_nodes: int, num_microbatches: int, network: NetworkProfile, numbers: range
) -> _Found:
    """Return the best pipelines of even sizes, among the smallest numbers and the one with the fastest slowest."""
    timings = {size: option.timing for size, option in options.items() if size <= num_nodes}
    capacity = Capacity(timings, num_nodes=num_nodes, num_microbatches=num_microbatches)
    evenly_s = capacity.evenly_s(np.array(numbers))
    found = []
    for number in sorted({*numbers[:_MANY], numbers[int(evenly_s.argmin())]}):
        reduced_bytes = max(options[size].reduced_bytes for size, _ in capacity.evenly(number))
        step_s = float(evenly_s[number - numbers[0]]) + reduction_s(network, reduced_bytes, number)
        found.append((step_s, number))
    step_s, number = min(found)
    sizes = tuple(chain.from_iterable([size] * times for size, times in capacity.evenly(number)))
    return _Found(sizes=sizes, step_s=step_s)


def _limits(
    options: Mapping[int, SizeOption], num_nodes: int, num_microbatches: int, network: NetworkProfile, fewest: int
) -> list[tuple[float, int]]:
    """Return each limit on reduced bytes with a lower bound on the step within it, the most promising first."""
    limits: dict[int, float] = {}
    least_s = math.inf
    for size in sorted((n for n in options if n <= num_nodes), key=lambda n: (options[n].reduced_bytes, n)):
        option = options[size]
        alone_s = share_s(size, option.timing, num_nodes=num_nodes, num_microbatches=num_microbatches)
        least_s = min(least_s, alone_s)
        limits[option.reduced_bytes] = least_s + reduction_s(network, option.reduced_bytes, fewest)
    return sorted((bound_s, reduced_bytes) for reduced_bytes, bound_s in limits.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    sizes: tuple[int, ...]
    step_s: float


class _Search:
    """The search under one limit on the bytes to reduce; `reductions_s` is indexed by the number of pipelines."""

    def __init__(self, capacity: Capacity, reductions_s: Sequence[float]) -> None:
        self._capacity = capacity
        self._reductions_s = reductions_s

    def improve(self, best: _Found, fewest: int, most: int) -> _Found:
        """Return the best pipelines within the limit, or `best` if none beat it."""
        numbers, least_s = range(fewest, most + 1), self._capacity.least_s
        if fewest < most:
            # The reduction grows with the number of pipelines, up to `_MANY`.
            # No larger number than that of the best in any number is better, nor one whose limit nothing meets.
            number = min(len(best.sizes) or most, most)
            limit_s = self._limit_s(best, number)
            if (free := self._capacity.any_number(limit_s)) is None:
                least_s, numbers = limit_s, range(fewest, min(number, _MANY))
            elif len(free[0]) in numbers:
                least_s, numbers = free[1], range(fewest, min(len(free[0]), _MANY))
                best = self._better(best, free)
        return self._try(best, list(numbers), least_s)

    def _try(self, best: _Found, numbers: list[int], least_s: float) -> _Found:
        """Search exact numbers of pipelines that can still be better, from the one that reduces fastest."""
        if len(numbers) > 1:
            limit_s = self._limit_s(best, numbers[0])
            enough = self._capacity.fewest_within(limit_s)
            numbers = [number for number in numbers if number >= enough]
        if len(numbers) > 1:
            taken = self._capacity.most_taken(numbers[-1], limit_s)
            numbers = [number for number in numbers if taken[number] >= self._capacity.num_microbatches]
        for number in numbers:
            best = self._better(best, self._capacity.exactly(number, least_s, self._limit_s(best, number)))
        return best

    def _limit_s(self, best: _Found, num_pipelines: int) -> float:
        """Return the seconds within which the slowest of `num_pipelines` has to finish to beat the best."""
        return best.step_s * (1 - _TOLERANCE) - self._reductions_s[min(num_pipelines, _MANY)]

    def _better(self, best: _Found, filled: Filled | None) -> _Found:
        if filled is None:
            return best
        sizes, slowest_s = filled
        step_s = slowest_s + self._reductions_s[min(len(sizes), _MANY)]
        return _Found(sizes=sizes, step_s=step_s) if step_s < best.step_s else best
