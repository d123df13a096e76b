"""Dealing the microbatches of a step among pipelines, so that the slowest is done as early as possible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from .costs import Timing

__all__ = ["deal_microbatches"]


def deal_microbatches(timings: Sequence[Timing], num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches each pipeline takes: at least 1 each, `num_microbatches` in all.

    Exact: no other division in whole numbers has a smaller largest `Timing.step_s`. Giving the next microbatch
    to the pipeline that would finish it first is optimal, since taking one away from the last to finish and
    giving it to any other only ends later; all but the last few are given at once, by a step time that the
    continuous problem cannot beat. O(p log p) for p pipelines, whatever the number of microbatches. Ties go to
    the first pipeline.
    """
    assert 1 <= len(timings) <= num_microbatches, "each pipeline takes a microbatch"
    target_s = _continuous_step_s(timings, num_microbatches)
    counts = [max(1, _taken_within(timing, target_s) - 1) for timing in timings]
    left = num_microbatches - sum(counts)
    queue = [(timing.step_s(counts[index] + 1), index) for index, timing in enumerate(timings)]
    heapq.heapify(queue)
    for _ in range(left):
        _, index = queue[0]
        counts[index] += 1
        heapq.heapreplace(queue, (timings[index].step_s(counts[index] + 1), index))
    return tuple(counts)


def _taken_within(timing: Timing, step_s: float) -> int:
    return math.floor((step_s - timing.first_s) / timing.next_s) + 1


def _continuous_step_s(timings: Sequence[Timing], num_microbatches: int) -> float:
    """Return the least step time if microbatches could be split: each takes max(1, (T - first) / next + 1).

    The number taken in all is convex in T. With the k pipelines of the shortest first microbatches at more than
    one and the others at one it is linear, and never above the true number; so the least T of these is the answer.
    """
    slope, constant, least_s = 0.0, 0.0, math.inf
    for number, timing in enumerate(sorted(timings, key=lambda timing: timing.first_s), start=1):
        slope += 1 / timing.next_s
        constant += timing.first_s / timing.next_s - 1
        least_s = min(least_s, (num_microbatches - (len(timings) - number) + constant) / slope)
    return least_s
