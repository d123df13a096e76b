"""On how many nodes to train: the decision alone, on curves of throughput that are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.scaling.policy import WORTHWHILE, ScalingState, ScalingTarget, scaling_target
from oobleck.errors import ConfigError
from oobleck.job import ScalingSpec

EFFICIENT = ScalingSpec(policy="efficient")


def decided(spec: ScalingSpec, step_s: Callable[[int], float], **changes: object) -> ScalingTarget:
    fields: dict[str, object] = {
        "num_available": 8,
        "num_used": 8,
        "fewest": 2,
        "steps_left": 10_000,
        "elapsed_s": 0.0,
        "horizon_s": 3600.0,
        "change_s": 1.0,
    }
    return scaling_target(ScalingState(spec=spec, step_s=step_s, **(fields | changes)))  # type: ignore[arg-type]


def within(seconds: float) -> ScalingSpec:
    return ScalingSpec(policy="deadline", deadline_s=seconds)


def linear(count: int) -> float:
    return 8.0 / count


def useless_from(most: int) -> Callable[[int], float]:
    return lambda count: 8.0 / min(count, most)


def test_all_takes_all_whatever_it_gives() -> None:
    assert decided(ScalingSpec(), useless_from(3)).num_nodes == 8


def test_nodes_that_add_as_much_as_the_others_are_used() -> None:
    assert decided(EFFICIENT, linear).num_nodes == 8


def test_nodes_that_add_nothing_are_not_used_and_the_reason_says_so() -> None:
    target = decided(EFFICIENT, useless_from(5))
    assert target.num_nodes == 5
    assert " 0%" in target.reason


@pytest.mark.parametrize(("share", "expected"), [(WORTHWHILE + 0.01, 8), (WORTHWHILE - 0.01, 4)])
def test_a_node_has_to_add_a_fifth_of_what_one_gives(share: float, expected: int) -> None:
    """Four nodes give one step a second each; each one more adds `share` of the average that it finds."""

    def step_s(count: int) -> float:
        rate = float(min(count, 4))
        for number in range(5, count + 1):
            rate += share * rate / (number - 1)
        return 1 / rate

    assert decided(EFFICIENT, step_s).num_nodes == expected


def test_nodes_that_pay_only_together_are_used_together() -> None:
    """An odd node finds no place; with the next one there is another pipeline."""
    assert decided(EFFICIENT, lambda count: 8.0 / (count - count % 2)).num_nodes == 8


def test_a_deadline_takes_the_fewest_that_meet_it() -> None:
    target = decided(within(10_000 * linear(5) * 1.2), linear)
    assert (target.num_nodes, target.is_late) == (5, False)


def test_a_deadline_that_none_meets_takes_what_is_fastest_and_says_so() -> None:
    target = decided(within(100.0), lambda count: 1.0 + abs(count - 6), num_used=6)
    assert (target.num_nodes, target.is_late) == (6, True)


def test_a_deadline_that_draws_near_brings_nodes_back() -> None:
    spec = within(10_000.0)
    early = decided(spec, linear, steps_left=5_000, elapsed_s=0.0)
    late = decided(spec, linear, steps_left=5_000, elapsed_s=4_000.0, num_used=early.num_nodes)
    assert early.num_nodes == 5
    assert late.num_nodes == 8


def test_what_costs_more_than_it_gains_is_left() -> None:
    """Three nodes for half a minute are worth ninety node seconds; eight wait for the change."""
    few = {"steps_left": 20, "change_s": 10.0, "num_used": 8}
    assert decided(EFFICIENT, useless_from(5), **few).num_nodes == 5
    dear = decided(EFFICIENT, useless_from(5), **few | {"change_s": 13.0})
    assert dear.num_nodes == 8
    assert "13.0 s" in dear.reason
    assert decided(EFFICIENT, linear, num_used=4, change_s=100.0, horizon_s=190.0).num_nodes == 4
    assert decided(EFFICIENT, linear, num_used=4, change_s=100.0, horizon_s=210.0).num_nodes == 8


@st.composite
def states(draw: st.DrawFn) -> ScalingState:
    available = draw(st.integers(1, 300))
    fewest = min(available, draw(st.integers(1, 12)))
    pieces = draw(st.lists(st.tuples(st.integers(1, 300), st.floats(0.1, 10)), min_size=1, max_size=5))
    spec = draw(st.sampled_from([ScalingSpec(), EFFICIENT, within(draw(st.floats(1, 1e6)))]))
    return ScalingState(
        spec=spec,
        num_available=available,
        num_used=draw(st.integers(fewest, available)),
        fewest=fewest,
        step_s=lambda count: sum(seconds / min(count, limit) for limit, seconds in pieces),
        steps_left=draw(st.integers(0, 10**6)),
        elapsed_s=draw(st.floats(0, 1e6)),
        horizon_s=draw(st.floats(1, 1e5)),
        change_s=draw(st.floats(0, 1e3)),
    )


@given(states())
def test_never_fewer_than_hold_the_model_and_never_more_than_there_are(state: ScalingState) -> None:
    target = scaling_target(state)
    assert state.fewest <= target.num_nodes <= state.num_available
    assert target.reason
    assert scaling_target(state) == target


@given(states())
def test_a_change_gains_more_than_it_costs(state: ScalingState) -> None:
    target = scaling_target(state)
    used, wanted = state.num_used, target.num_nodes
    if state.spec.policy == "all" or state.num_available <= state.fewest or wanted == used:
        return
    if wanted < used:
        lasts_s = min(state.horizon_s, state.left_s(wanted))
        assert (used - wanted) * lasts_s > used * state.change_s
    elif state.spec.policy == "deadline":
        assert state.left_s(used) - state.left_s(wanted) > 0.999999 * state.change_s
    else:
        assert state.horizon_s * (1 - state.step_s(wanted) / state.step_s(used)) > state.change_s


@given(states())
def test_a_deadline_that_can_be_met_is_met(state: ScalingState) -> None:
    target = scaling_target(state)
    if state.spec.policy != "deadline" or target.is_late or state.num_available <= state.fewest:
        return
    assert state.spec.deadline_s is not None
    if target.num_nodes != state.num_used:
        assert state.elapsed_s + state.left_s(target.num_nodes) <= state.spec.deadline_s


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"policy": "deadline"}, "set if"),
        ({"deadline_s": 5.0}, "left out"),
        ({"policy": "deadline", "deadline_s": 0.0}, "but not 0"),
        ({"hysteresis_s": -1.0}, "from 0 to"),
    ],
)
def test_impossible_settings_say_what_to_change(fields: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ScalingSpec(**fields)  # type: ignore[arg-type]
