"""Scaling: what each policy wants, and that nothing changes for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.scaling import (
    HYSTERESIS_S,
    ScalingDecision,
    ScalingPolicy,
    ScalingState,
    Wish,
    decide,
    efficient_count,
)

AMDAHL = {count: 0.1 + 0.9 / count for count in range(1, 65)}
"""A tenth of each step does not get faster."""


def state(num_nodes: int, **fields) -> ScalingState:
    known = {"now_s": 1000.0, "step_s": AMDAHL, "steps_left": 10**6, "horizon_s": 3600.0, "change_cost_s": 1.0}
    return ScalingState(num_nodes=num_nodes, **(known | fields))


def settled(now: ScalingState, policy: ScalingPolicy) -> ScalingDecision:
    """The decision once a wish has lasted."""
    first = decide(now, policy)
    return decide(replace(now, now_s=now.now_s + HYSTERESIS_S), policy, first.wish)


def test_all_takes_the_fastest_count_and_not_simply_the_largest():
    step_s = {1: 1.0, 2: 0.6, 3: 0.4, 4: 0.5}
    assert settled(state(2, step_s=step_s), ScalingPolicy.ALL).target == 3


def test_efficient_stops_where_nodes_bring_little():
    count = efficient_count(AMDAHL)
    gain = 1 / AMDAHL[count] - 1 / AMDAHL[count - 1]
    assert gain >= 0.2 / AMDAHL[count - 1] / (count - 1)
    assert 1 / AMDAHL[count + 1] - 1 / AMDAHL[count] < 0.2 / AMDAHL[count] / count


def test_counts_that_divide_badly_do_not_end_the_search():
    step_s = {1: 1.0, 2: 0.5, 3: 0.5, 4: 0.25, 5: 0.25, 6: 0.25, 7: 0.25, 8: 0.125}
    assert efficient_count(step_s) == 8


def test_a_deadline_takes_the_fewest_nodes_that_are_done_in_time():
    early = state(16, steps_left=1000, deadline_s=1000.0 + HYSTERESIS_S + 1.0 + 1000 * AMDAHL[8])
    assert settled(early, ScalingPolicy.DEADLINE).target == 8
    late = state(2, steps_left=1000, deadline_s=1000.0 + 1000 * AMDAHL[20])
    assert settled(late, ScalingPolicy.DEADLINE).target > 19
    hopeless = state(2, steps_left=1000, deadline_s=1001.0)
    assert settled(hopeless, ScalingPolicy.DEADLINE).target == 64


def test_a_wish_must_last_for_a_minute():
    first = decide(state(4), ScalingPolicy.ALL)
    assert (first.target, first.wish) == (4, Wish(target=64, since_s=1000.0))
    soon = decide(state(4, now_s=1059.0), ScalingPolicy.ALL, first.wish)
    assert soon.target == 4
    assert decide(state(4, now_s=1060.0), ScalingPolicy.ALL, soon.wish).target == 64


def test_a_wish_for_the_other_direction_begins_its_minute_anew():
    fewer = Wish(target=2, since_s=0.0)
    again = decide(state(4), ScalingPolicy.ALL, fewer)
    assert (again.target, again.wish) == (4, Wish(target=64, since_s=1000.0))
    assert decide(state(4), ScalingPolicy.ALL, Wish(target=32, since_s=0.0)).target == 64


def test_a_change_that_costs_more_than_it_gains_is_not_made():
    assert settled(state(32, change_cost_s=10.0), ScalingPolicy.ALL).target == 64
    assert settled(state(32, change_cost_s=10_000.0), ScalingPolicy.ALL).target == 32
    assert settled(state(32, steps_left=3), ScalingPolicy.ALL).target == 32


def test_nodes_that_cannot_go_on_are_left_at_once():
    assert decide(state(99), ScalingPolicy.EFFICIENT).target == efficient_count(AMDAHL)


STEP_TIMES = st.dictionaries(st.integers(1, 40), st.floats(0.01, 10.0), min_size=1, max_size=20)


@given(STEP_TIMES, st.sampled_from(list(ScalingPolicy)), st.integers(0, 10**6), st.floats(0.0, 1e4), st.data())
def test_decisions_are_possible_and_settle(step_s, policy, steps_left, change_cost_s, data):
    count = data.draw(st.sampled_from(sorted(step_s)))
    deadline_s = data.draw(st.none() | st.floats(1000.0, 1e6))
    now = state(count, step_s=step_s, steps_left=steps_left, change_cost_s=change_cost_s, deadline_s=deadline_s)
    decision = settled(now, policy)
    assert decision.target in step_s
    if policy is not ScalingPolicy.DEADLINE:  # time passes, and changes what is in time
        after = settled(replace(now, num_nodes=decision.target, now_s=now.now_s + 2 * HYSTERESIS_S), policy)
        assert after.target == decision.target
    if policy is ScalingPolicy.ALL and decision.target != count:
        saved_s = min(steps_left, 3600.0 / step_s[count]) * (step_s[count] - step_s[decision.target])
        assert saved_s > change_cost_s


@given(STEP_TIMES)
def test_the_efficient_count_is_on_no_plateau(step_s):
    count = efficient_count(step_s)
    fewer = [seconds for other, seconds in step_s.items() if other < count]
    assert all(seconds >= step_s[count] for seconds in fewer) or count == min(step_s)


@pytest.mark.parametrize("policy", list(ScalingPolicy))
def test_one_count_is_no_choice(policy):
    assert decide(state(3, step_s={3: 1.0}), policy).target == 3
