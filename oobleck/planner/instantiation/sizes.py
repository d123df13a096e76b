"""Instantiation: how many pipelines of each size make the shortest step.

Within a target T a pipeline of n nodes takes m_n(T) microbatches, and whether N nodes take the whole batch is a
knapsack (see `capacity`). The time to reduce gradients comes on top. It depends on the pipeline with the most
bytes a node, so the limits on these are enumerated; and it grows with the number of pipelines, so the best of
any number, p of them, beats all larger numbers. Only smaller ones are tried besides, below the number from which
on the reduction takes the same time. The search starts from the best pipelines of even sizes.
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
_MANY = 16
"""From this many pipelines on, a ring's share 2 (p - 1) / p is taken as constant: within 1 / 16 of its limit."""


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
    """Return the seconds in which owners in `num_pipelines` pipelines reduce their gradients, nothing overlapped.

    A ring sends 2 (p - 1) / p of the bytes over every link, in 2 (p - 1) messages (Patarasuk and Yuan 2009).
    From 16 pipelines on its growth is neglected.
    """
    others = min(num_pipelines, _MANY) - 1
    moved = 2 * others / (others + 1) * reduced_bytes
    return moved / network.inter_node_bytes_per_s + 2 * others * network.inter_node_latency_s


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
    at least one for each pipeline. Nodes left over are spares. Of equal ones the most even is preferred.
    """
    best = _best_even(options, num_nodes, num_microbatches, network, range(fewest, most + 1))
    for least_s, reduced_bytes in _limits(options, num_nodes, num_microbatches, network, fewest):
        if least_s >= best.step_s * (1 - _TOLERANCE):
            break
        timings = {n: o.timing for n, o in options.items() if o.reduced_bytes <= reduced_bytes and n <= num_nodes}
        if min(timings) * fewest <= num_nodes:
            search = _Search(
                Capacity(timings, num_nodes=num_nodes, num_microbatches=num_microbatches),
                [reduction_s(network, reduced_bytes, max(number, 1)) for number in range(_MANY + 1)],
            )
            best = search.improve(best, fewest, min(most, num_nodes // min(timings)))
    return sizing_of(options, best.sizes, num_microbatches, network)


def _best_even(
    options: Mapping[int, SizeOption], num_nodes: int, num_microbatches: int, network: NetworkProfile, numbers: range
) -> _Found:
    """Return the best pipelines of even sizes, among few of them and the number whose slowest is the fastest."""
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
    """Return the limits on reduced bytes with a time that no plan within each can beat, the most promising first."""
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
    """The search under one limit on the bytes to reduce; `reductions_s` is by number of pipelines."""

    def __init__(self, capacity: Capacity, reductions_s: Sequence[float]) -> None:
        self._capacity = capacity
        self._reductions_s = reductions_s

    def improve(self, best: _Found, fewest: int, most: int) -> _Found:
        """Return the best within the limit, or `best` where that is not beaten."""
        numbers, least_s = range(fewest, most + 1), self._capacity.least_s
        if fewest < most:
            # Nothing with more pipelines than the best of any number is better, nor with as many as beat it nowhere.
            number = min(len(best.sizes), most)
            limit_s = self._limit_s(best, number)
            if (free := self._capacity.any_number(limit_s)) is None:
                least_s, numbers = limit_s, range(fewest, min(number, _MANY))
            elif len(free[0]) in numbers:
                least_s, numbers = free[1], range(fewest, min(len(free[0]), _MANY))
                best = self._better(best, free)
        return self._try(best, list(numbers), least_s)

    def _try(self, best: _Found, numbers: list[int], least_s: float) -> _Found:
        """Search exact numbers of pipelines, from the one that reduces fastest, where they can still be better."""
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
        """Return what the slowest of so many pipelines may take for the step to beat the best."""
        return best.step_s * (1 - _TOLERANCE) - self._reductions_s[min(num_pipelines, _MANY)]

    def _better(self, best: _Found, filled: Filled | None) -> _Found:
        if filled is None:
            return best
        sizes, slowest_s = filled
        step_s = slowest_s + self._reductions_s[min(len(sizes), _MANY)]
        return _Found(sizes=sizes, step_s=step_s) if step_s < best.step_s else best
