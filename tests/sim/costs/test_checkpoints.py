from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.sim.costs import daly_interval_s, mean_time_to_loss_s
from oobleck.sim.trace import Lost, Trace, WorkerCrashed

NODES = ("a", "b", "c")


def wasted_share(interval_s: float, saving_s: float, mean_s: float) -> float:
    """What checkpoints and the work since the newest one waste of the time, for rare losses."""
    return saving_s / interval_s + interval_s / (2 * mean_s)


@given(saving_s=st.floats(0.1, 60), mean_s=st.floats(10_000, 1e6))
def test_rare_losses_have_youngs_interval_and_no_other_wastes_much_less(saving_s: float, mean_s: float):
    interval_s = daly_interval_s(saving_s, mean_s)
    assert interval_s == pytest.approx(sqrt(2 * saving_s * mean_s), rel=0.1)
    least = min(wasted_share(interval_s * factor, saving_s, mean_s) for factor in (0.25, 0.5, 2.0, 4.0))
    assert wasted_share(interval_s, saving_s, mean_s) < least


def test_an_interval_is_never_above_the_time_between_losses_and_none_is_needed_without_any():
    assert daly_interval_s(100.0, 40.0) == 40.0
    assert daly_interval_s(1.0, inf) == inf


def test_losses_at_once_count_once_and_only_if_they_are_enough():
    events = (
        Lost(t_s=10.0, node="a"),
        Lost(t_s=10.0, node="b"),
        WorkerCrashed(t_s=50.0, node="c"),
    )
    trace = Trace(duration_s=100.0, nodes=NODES, start=NODES, events=events)
    assert [mean_time_to_loss_s(trace, at_least=number) for number in (1, 2, 3)] == [50.0, 100.0, inf]
