"""The distribution of a step's microbatches over pipelines that lets the slowest finish as early as possible."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

from oobleck.planner.costs import Timing


def distribute_microbatches(timings: Sequence[Timing], num_microbatches: int) -> tuple[int, ...]:
    """Return the microbatches of each pipeline: at least 1 each, `num_microbatches` in all; ties go to the first.

    Exact: no other division in whole numbers has a smaller largest `Timing.step_s`, which is infinite where the
    pipelines' memory is too small for the batch. O(p log k) for p pipelines with k different timings, whatever the
    number of microbatches, while memory limits none.
    """
    assert 1 <= len(timings) <= num_microbatches, "each pipeline takes a microbatch"
    alike: defaultdict[Timing, list[int]] = defaultdict(list)
    for index, timing in enumerate(timings):
        alike[timing].append(index)
    # All but the last few are dealt at once, up to a step time that the continuous problem cannot beat.
    target_s = _continuous_step_s([(timing, len(indices)) for timing, indices in alike.items()], num_microbatches)
    counts = [0] * len(timings)
    queue = []
    for timing, indices in alike.items():
        count = max(1, math.floor(min((target_s - timing.first_s) / timing.next_s, timing.most_microbatches)))
        for index in indices:
            counts[index] = count
        # Ties go to the first pipeline; no two entries share an index, so timings are never compared.
        queue.append((timing.step_s(count + 1), indices[0], 0, timing, indices))
    heapq.heapify(queue)
    # The next microbatch goes to the pipeline that would finish it first. That is optimal, since moving one from the
    # last to finish to any other only ends later.
    for _ in range(num_microbatches - sum(counts)):
        # Of like pipelines, each takes this round's microbatch before any takes the next one.
        end_s, index, turn, timing, indices = queue[0]
        counts[index] += 1
        turn += 1
        if turn == len(indices):
            turn, end_s = 0, timing.step_s(counts[index] + 1)
        heapq.heapreplace(queue, (end_s, indices[turn], turn, timing, indices))
    return tuple(counts)


def _continuous_step_s(timings: Sequence[tuple[Timing, int]], num_microbatches: int) -> float:
    """Return the least step time T if microbatches could be split: each takes max(1, (T - first) / next + 1)."""
    slope, constant, least_s = 0.0, 0.0, math.inf
    others = sum(number for _, number in timings)
    for timing, number in sorted(timings, key=lambda each: each[0].first_s):
        slope += number / timing.next_s
        constant += number * (timing.first_s / timing.next_s - 1)
        others -= number
        # The sum over pipelines is convex in T. With those of the shortest first microbatches at more than one and the
        # others at one, it is linear and never above the true sum; so the least T of these is the answer.
        least_s = min(least_s, (num_microbatches - others + constant) / slope)
    return least_s
