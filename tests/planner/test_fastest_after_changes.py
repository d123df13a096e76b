"""After losses and joins a plan is as fast by its timeline as a fresh one of the same nodes, where that repays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import Planner, PlannerSettings, Profile, device_sheet, estimate_profile, model_shape, with_speed
from oobleck.planner.one_kind import OneKindCatalog
from oobleck.schedule.forecast import forecast
from tests.examples import examples
from tests.planner.drawing import profiles, uniform_profile
from tests.planner.test_cut_for_slow_nodes import FOREVER_S, is_sound, names


@examples(100)
@given(data=st.data(), profile=profiles(min_layers=3, max_layers=8), rounds=st.integers(1, 6))
def test_a_plan_is_within_a_percent_of_a_fresh_one_where_moves_repay(
    data: st.DataObject, profile: Profile, rounds: int
) -> None:
    nodes = names(data.draw(st.integers(2, 8), label="nodes"))
    settings = PlannerSettings(
        num_microbatches=rounds * len(nodes),
        fault_threshold=data.draw(st.integers(0, 1)),
        mean_time_to_failure_s=FOREVER_S,
    )
    planner, catalog = Planner(profile, settings), OneKindCatalog(profile, settings)
    try:
        decision = planner.initial_plan(nodes)
        for number in range(data.draw(st.integers(1, 4), label="changes")):
            before, lost, joined = decision.plan, [], []
            change = data.draw(st.sampled_from(("loss", "join", "slow for a while")), label="change")
            if change == "loss":
                lost = [data.draw(st.sampled_from(before.nodes))]
            elif change == "join":
                joined = [f"joined{number}"]
            else:
                slowed = planner.reconfigure(before, slow={data.draw(st.sampled_from(before.nodes)): 2.0})
                assert is_sound(slowed, before, planner)
                before = slowed.plan
            decision = planner.reconfigure(before, lost=lost, joined=joined)
            assert is_sound(decision, before, planner, lost)
            fresh = Planner(profile, settings).initial_plan([*decision.plan.nodes, *decision.plan.spares])
            own_s, fresh_s = catalog.exact_step_s(decision.plan, {}), catalog.exact_step_s(fresh.plan, {})
            assert own_s is not None
            assert fresh_s is not None
            # Beyond eight microbatches a stage, each further one counts with a constant time.
            assert own_s == pytest.approx(forecast(profile, decision.plan).step_s, rel=0.02)
            if len(fresh.plan.pipelines) <= len(decision.plan.pipelines):
                assert own_s <= 1.0101 * fresh_s
            assert own_s == decision.predicted_step_s
    except (PlanningError, Unrecoverable):
        assume(False)


def test_a_slow_network_is_counted_where_a_plan_is_cut_again() -> None:
    """At 1 Gb/s a node with most layers costs more in the reduction than it saves in compute."""
    profile = estimate_profile(
        model_shape("gpt3-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024, precision="bfloat16"
    )
    profile = replace(profile, network=replace(profile.network, inter_node_bytes_per_s=1.25e8))
    settings = PlannerSettings(num_microbatches=80, num_pipelines=2)
    planner, catalog = Planner(profile, settings), OneKindCatalog(profile, settings)
    nodes = names(20)
    by_bounds = catalog.build_plan(
        [(catalog.form((10,), (20,)), nodes[:10]), (catalog.form((10,), (20,)), nodes[10:])], (), {}
    )[0]
    bound_s, own_s = catalog.exact_step_s(by_bounds, {}), catalog.exact_step_s(planner.initial_plan(nodes).plan, {})
    assert bound_s is not None
    assert own_s is not None
    assert own_s < 0.9 * bound_s


@examples(30)
@given(data=st.data(), profile=profiles(min_layers=3, max_layers=8), horizon_s=st.sampled_from((0.1, 10.0, FOREVER_S)))
def test_moves_repay_within_the_horizon_of_the_decision(
    data: st.DataObject, profile: Profile, horizon_s: float
) -> None:
    nodes = names(data.draw(st.integers(3, 8), label="nodes"))
    usual = PlannerSettings(num_microbatches=3 * len(nodes), fault_threshold=0)
    own = replace(usual, mean_time_to_failure_s=horizon_s)
    lost = [data.draw(st.sampled_from(nodes))]
    try:
        plan = Planner(profile, usual).initial_plan(nodes).plan
        expected = Planner(profile, own).reconfigure(plan, lost=lost)
    except (PlanningError, Unrecoverable):
        assume(False)
    assert Planner(profile, usual).reconfigure(plan, lost=lost, horizon_s=horizon_s) == expected


@examples(60)
@given(data=st.data(), profile=profiles(min_layers=3, max_layers=8), rounds=st.integers(1, 6))
def test_no_move_of_a_layer_would_help_a_pipeline_with_a_slow_node(
    data: st.DataObject, profile: Profile, rounds: int
) -> None:
    nodes = names(data.draw(st.integers(2, 6), label="nodes"))
    settings = PlannerSettings(num_microbatches=rounds * len(nodes), mean_time_to_failure_s=FOREVER_S)
    planner, catalog = Planner(profile, settings), OneKindCatalog(profile, settings)
    try:
        plan = planner.initial_plan(nodes).plan
    except PlanningError:
        assume(False)
    slow = {data.draw(st.sampled_from(plan.nodes)): 2.0}
    decision = planner.reconfigure(plan, slow=slow)
    assert is_sound(decision, plan, planner)
    speeds = dict.fromkeys(slow, 0.5)
    own_s = catalog.exact_step_s(decision.plan, speeds)
    profile_of = {node: with_speed(profile, speeds.get(node, 1.0)) for node in nodes}
    assert own_s == pytest.approx(forecast(profile, decision.plan, profile_of=profile_of.__getitem__).step_s, rel=0.02)
    assert own_s == decision.predicted_step_s
    for index, pipeline in enumerate(decision.plan.pipelines):
        if slow.keys() & set(pipeline.nodes):
            form, own = catalog.form_of(pipeline), tuple(speeds.get(node, 1.0) for node in pipeline.nodes)
            cut = catalog.cut_again(form, pipeline.num_microbatches, len(decision.plan.pipelines), own)
            others = list(decision.plan.pipelines)
            others[index] = replace(pipeline, template=cut.template)
            other_s = catalog.exact_step_s(replace(decision.plan, pipelines=tuple(others)), speeds)
            assert own_s <= 1.0101 * other_s


@pytest.mark.parametrize("num_nodes", [601, 1021])
def test_what_decides_whether_many_nodes_are_planned_again_is_no_longer_than_their_fresh_plan(num_nodes: int) -> None:
    """It is that of a few nodes more."""
    profile = uniform_profile(12, seconds=1.0)
    settings = PlannerSettings(num_microbatches=4 * 1024)
    fresh = Planner(profile, settings).initial_plan(names(num_nodes))
    least_s = OneKindCatalog(profile, settings).least_start_s((num_nodes,))
    assert 0.9 * fresh.predicted_step_s <= least_s <= 1.005 * fresh.predicted_step_s
