from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.costs import Timing
from oobleck.planner.instantiation.batches import distribute_microbatches

# Quarters keep sums exact.
quarters = st.integers(1, 40).map(lambda number: number / 4)
timings = st.builds(
    lambda first, following: Timing(first_s=max(first, following), next_s=following), quarters, quarters
)


def step_s(pipelines: list[Timing], counts: tuple[int, ...]) -> float:
    return max(timing.step_s(count) for timing, count in zip(pipelines, counts, strict=True))


@given(pipelines=st.lists(timings, min_size=1, max_size=4), extra=st.integers(0, 8))
def test_no_other_division_is_faster(pipelines: list[Timing], extra: int) -> None:
    number = len(pipelines) + extra
    counts = distribute_microbatches(pipelines, number)
    assert sum(counts) == number
    assert min(counts) >= 1
    others = (c for c in itertools.product(range(1, extra + 2), repeat=len(pipelines)) if sum(c) == number)
    assert step_s(pipelines, counts) == min(step_s(pipelines, other) for other in others)


@given(pipelines=st.lists(timings, min_size=1, max_size=30), number=st.integers(0, 3000))
def test_giving_each_microbatch_to_who_is_done_first_gives_the_same(pipelines: list[Timing], number: int) -> None:
    number += len(pipelines)
    counts = [1] * len(pipelines)
    for _ in range(number - len(pipelines)):
        ends = [timing.step_s(count + 1) for timing, count in zip(pipelines, counts, strict=True)]
        counts[ends.index(min(ends))] += 1
    assert step_s(pipelines, distribute_microbatches(pipelines, number)) == step_s(pipelines, tuple(counts))


def test_equal_pipelines_share_evenly() -> None:
    assert distribute_microbatches([Timing(first_s=4.0, next_s=1.0)] * 3, 8) == (3, 3, 2)


def test_a_pipeline_half_as_fast_takes_about_half_as_many() -> None:
    assert distribute_microbatches([Timing(first_s=1.0, next_s=1.0), Timing(first_s=2.0, next_s=2.0)], 30) == (20, 10)
