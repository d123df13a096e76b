"""When a save is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.checkpoints.saves import SavePolicy, best_interval_s
from oobleck.job import CheckpointSpec

positive = st.floats(1e-3, 1e6)


@given(cost_s=positive, mean_failure_s=positive, factor=st.floats(0.1, 10.0))
def test_no_other_interval_costs_less(cost_s: float, mean_failure_s: float, factor: float) -> None:
    def overhead(interval_s: float) -> float:
        return cost_s / interval_s + interval_s / 2 / mean_failure_s

    best_s = best_interval_s(cost_s, mean_failure_s)
    assert overhead(best_s) <= overhead(best_s * factor) * (1 + 1e-12)


@given(every=st.integers(1, 1000), last_step=st.integers(0, 10_000))
def test_steps_are_counted_in_multiples(every: int, last_step: int) -> None:
    step = SavePolicy(spec=CheckpointSpec(save_steps=every)).next_step(last_step)
    assert step is not None
    assert step % every == 0
    assert last_step < step <= last_step + every


def test_who_says_seconds_gets_seconds() -> None:
    policy = SavePolicy(spec=CheckpointSpec(save_interval_s=7.5), cost_s=3.0, disk_s=100.0)
    assert policy.next_step(5) is None
    assert policy.interval_s(1e6) == 7.5


def test_left_to_itself_it_saves_more_often_the_more_failures_need_it() -> None:
    intervals = [
        SavePolicy(spec=CheckpointSpec(), cost_s=0.1, num_failures=count).interval_s(3600.0) for count in range(40)
    ]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] == pytest.approx(math.sqrt(2 * 0.1 * 90_000.0))
    assert intervals[-1] < intervals[0] / 5


def test_a_slow_disk_is_not_asked_for_more_than_it_can_do() -> None:
    policy = SavePolicy(spec=CheckpointSpec(), cost_s=0.001, disk_s=300.0)
    assert policy.interval_s(0.0) >= 600.0
