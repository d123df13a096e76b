"""Dealing the microbatches of a step among pipelines, so that the slowest is done as early as possible."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from oobleck.planner.costs import Timing


def distribute_microbatches(timings: Sequence[Timing], num_microbatches: int) -> tuple[int, ...]:
    """Return how many microbatches each pipeline takes: at least 1 each, `num_microbatches` in all.

    Exact: no other division in whole numbers has a smaller largest `Timing.step_s`. Giving the next microbatch
    to the pipeline that would finish it first is optimal, since taking one away from the last to finish and
    giving it to any other only ends later; all but the last few are given at once, by a step time that the
    continuous problem cannot beat. O(p log k) for p pipelines with k different timings, whatever the number of
    microbatches. Ties go to the first pipeline.
    """
    assert 1 <= len(timings) <= num_microbatches, "each pipeline takes a microbatch"
    alike: defaultdict[Timing, list[int]] = defaultdict(list)
    for index, timing in enumerate(timings):
        alike[timing].append(index)
    target_s = _continuous_step_s([(timing, len(indices)) for timing, indices in alike.items()], num_microbatches)
    counts = [0] * len(timings)
    queue = []
    for timing, indices in alike.items():
        count = max(1, _taken_within(timing, target_s) - 1)
        for index in indices:
            counts[index] = count
        queue.append((timing.step_s(count + 1), indices[0], 0, timing, indices))
    heapq.heapify(queue)
    for _ in range(num_microbatches - sum(counts)):
        # Of pipelines that are alike, those that have not had this round's microbatch come one after the other.
        end_s, index, turn, timing, indices = queue[0]
        counts[index] += 1
        turn += 1
        if turn == len(indices):
            turn, end_s = 0, timing.step_s(counts[index] + 1)
        heapq.heapreplace(queue, (end_s, indices[turn], turn, timing, indices))
    return tuple(counts)


def _taken_within(timing: Timing, step_s: float) -> int:
    return math.floor((step_s - timing.first_s) / timing.next_s) + 1


def _continuous_step_s(timings: Sequence[tuple[Timing, int]], num_microbatches: int) -> float:
    """Return the least step time if microbatches could be split: each takes max(1, (T - first) / next + 1).

    The number taken in all is convex in T. With the k pipelines of the shortest first microbatches at more than
    one and the others at one it is linear, and never above the true number; so the least T of these is the answer.
    """
    slope, constant, least_s = 0.0, 0.0, math.inf
    others = sum(number for _, number in timings)
    for timing, number in sorted(timings, key=lambda each: each[0].first_s):
        slope += number / timing.next_s
        constant += number * (timing.first_s / timing.next_s - 1)
        others -= number
        least_s = min(least_s, (num_microbatches - others + constant) / slope)
    return least_s
