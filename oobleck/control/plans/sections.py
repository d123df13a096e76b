"""Sections of a step: which microbatches are committed at the end of each, and which pipeline takes the others.

A long step may reduce its gradients several times. At the end of each section but the last, all owners of a parameter
get the sum of its gradients so far: they are committed, and no failure can undo that. A plan that comes into force in
the middle of a step assigns the uncommitted microbatches again.

All of this follows from a plan, the microbatches committed before it, and the number of sections in a whole step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Pipeline
from oobleck.schedule import SECTIONED_KINDS, ScheduleKind, section_stops

# The target length of a section: long compared to a reduction, while a failure costs about half of it.
_SECTION_S = 8.0
_MOST_SECTIONS = 32
PARTIAL_COMMIT_COPIES = 2
"""The copies of the gradients that partial commits need: the committed sums, and the section on its way."""


def sections_wanted(job: JobSpec, plan: ExecutionPlan, step_s: float, *, has_room: bool = True) -> int:
    """Return the number of sections of a whole step under a plan whose steps take `step_s` seconds.

    Unless devices have room for the committed sums (`has_room`), only a job with a fixed number gets more than one.
    """
    # Gradients need a second owner that can keep them, and a schedule under which they are final before the step ends.
    # Where each plan chooses its schedules, the caller looks at those. A step on shards may begin again without a
    # shard, and then takes other records than those committed of it.
    never_in_sections = job.schedule != "auto" and ScheduleKind(job.schedule) not in SECTIONED_KINDS
    fewest = _fewest_rounds(plan, [pipeline.num_microbatches for pipeline in plan.pipelines])
    if len(plan.pipelines) == 1 or never_in_sections or job.data.shards:
        return 1
    if job.reductions_per_step == "auto":
        return max(1, min(int(step_s / _SECTION_S), fewest, _MOST_SECTIONS)) if has_room else 1
    return max(1, min(job.reductions_per_step, fewest))


def shares_of(plan: ExecutionPlan, partial: Collection[int] = ()) -> tuple[Sequence[int], ...]:
    """Return the microbatches of a step that each pipeline takes after those in `partial` were committed."""
    if not partial:
        return plan.shares
    gone = frozenset(partial)
    left = [microbatch for microbatch in range(plan.num_microbatches) if microbatch not in gone]
    counts = apportion(len(left), [pipeline.num_microbatches for pipeline in plan.pipelines])
    return tuple(tuple(left[start:stop]) for start, stop in pairwise(accumulate(counts, initial=0)))


def num_sections_of(plan: ExecutionPlan, partial: Collection[int], num_sections: int) -> int:
    """Return the number of sections of the rest of a step, if a whole one has `num_sections`."""
    if num_sections == 1:
        return 1
    # Sections have about the same length, and every pipeline has a microbatch in each, or a round of them.
    left = plan.num_microbatches - len(partial)
    fewest = _fewest_rounds(plan, list(map(len, shares_of(plan, partial))))
    return max(1, min(round(num_sections * left / plan.num_microbatches), fewest))


def committed_after(plan: ExecutionPlan, partial: tuple[int, ...], num_sections: int, number: int) -> tuple[int, ...]:
    """Return all microbatches that are committed after `number` sections of a plan that began with those in
    `partial`."""
    if not number:
        return partial
    sections = num_sections_of(plan, partial, num_sections)
    assert number < sections, f"section {number} of {sections} ends with the step"
    shares = shares_of(plan, partial)
    added = (
        microbatch
        for pipeline, share in zip(plan.pipelines, shares, strict=True)
        for microbatch in share[: _stops_of(pipeline, len(share), sections)[number - 1]]
    )
    return tuple(sorted((*partial, *added)))


def _stops_of(pipeline: Pipeline, num_microbatches: int, num_sections: int) -> tuple[int, ...]:
    return section_stops(num_microbatches, num_sections, round_size=pipeline.template.round_size)


def _fewest_rounds(plan: ExecutionPlan, counts: Sequence[int]) -> int:
    # A round has one microbatch, except in interleaved pipelines.
    return min(
        math.ceil(count / pipeline.template.round_size) for pipeline, count in zip(plan.pipelines, counts, strict=True)
    )


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `weights`, by largest remainders; ties go to the earlier."""
    # Integers alone, so that all workers and the coordinator come to the same shares on any machine.
    weight = sum(weights)
    shares = [total * each // weight for each in weights]
    by_remainder = sorted(range(len(weights)), key=lambda index: (-(total * weights[index] % weight), index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
