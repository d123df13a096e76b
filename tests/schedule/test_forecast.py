from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, Planner, PlannerSettings, StageTemplate
from oobleck.planner.costs import StageCosts, footprint
from oobleck.schedule import ScheduleKind
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.schedule.forecast import forecast
from tests.planner.simple_profiles import make_profile, node_names

forwards = st.lists(st.floats(0.001, 1.0), min_size=4, max_size=9)


@given(forwards_s=forwards, devices_per_node=st.sampled_from([1, 2, 4]), num_nodes=st.integers(1, 3))
def test_costs_are_the_planners_own_told_apart(forwards_s, devices_per_node, num_nodes):
    profile = make_profile(forwards_s, device_counts=(1, 2, 4))
    settings = PlannerSettings(
        num_microbatches=16, devices_per_node=devices_per_node, max_devices_per_stage=devices_per_node
    )
    costs = StageCosts(
        profile, devices_per_node=devices_per_node, max_devices_per_stage=devices_per_node, max_in_flight=16
    )
    for template in Planner(profile, settings).templates(num_nodes).values():
        told_apart = stage_costs(profile, template)
        for cost, stage, seconds in zip(told_apart, template.stages, costs.stage_seconds(template), strict=True):
            whole = cost.forward_s + cost.backward_s + cost.send_forward_s + cost.send_backward_s
            assert whole == pytest.approx(seconds, rel=1e-9)
            held = footprint(costs.profile, stage.first_layer, stage.stop_layer, num_devices=stage.num_devices)
            assert (cost.static_bytes, cost.activation_bytes) == (held.static_bytes, held.activation_bytes)


@given(forwards_s=forwards, num_nodes=st.integers(2, 8), num_microbatches=st.integers(4, 40))
def test_a_forecast_is_no_slower_than_the_planners_bound(forwards_s, num_nodes, num_microbatches):
    profile = make_profile(forwards_s)
    decision = Planner(profile, PlannerSettings(num_microbatches=num_microbatches)).initial_plan(node_names(num_nodes))
    found = forecast(profile, decision.plan)
    # Every layer takes twice as long backward, which makes the planner's objective a bound.
    assert found.step_s <= decision.predicted_step_s * (1 + 1e-9)
    assert sorted(index for each in found.pipelines for index in each.pipelines) == list(
        range(len(decision.plan.pipelines))
    )
    for each in found.pipelines:
        assert min(each.headroom_bytes) > 0


def test_a_forecast_in_numbers():
    profile = make_profile([1.0, 1.0, 1.0, 1.0], memory_bytes=2 * 10**9)
    template = PipelineTemplate(
        stages=(
            StageTemplate(first_layer=0, stop_layer=2, node_index=0),
            StageTemplate(first_layer=2, stop_layer=4, node_index=1),
        )
    )
    plan = ExecutionPlan(
        pipelines=(
            Pipeline(template=template, nodes=("a", "b"), num_microbatches=3),
            Pipeline(template=template, nodes=("c", "d"), num_microbatches=2),
            Pipeline(template=template, nodes=("e", "f"), num_microbatches=3),
        ),
        spares=("g",),
    )
    found = forecast(profile, plan, reserved_memory_bytes=10**8)
    assert [each.pipelines for each in found.pipelines] == [(0, 2), (1,)]
    # Each node reduces the 200 MB of its two layers with two others over 1 GB/s, in a tree of latency.
    assert found.reduce_s == pytest.approx(2 * 2 / 3 * 0.2 + 4 * 1e-4)
    # Forward, then the message, then backward and the way back; two more microbatches at the slowest stage.
    assert found.step_s == pytest.approx(6 + 6 + 2 * 6 + 2 * (0.002 + 1e-4) + found.reduce_s, abs=0.02)
    slow = found.pipelines[0]
    assert slow.available_bytes == (19 * 10**8, 19 * 10**8)
    # Parameters, gradients and twice as many bytes of optimizer state; two microbatches of two layers.
    assert slow.timeline.peak_memory_bytes == (8 * 10**8 + 4 * 10**6, 8 * 10**8 + 2 * 10**6)
    assert slow.headroom_bytes == (11 * 10**8 - 4 * 10**6, 11 * 10**8 - 2 * 10**6)
    busy_s = 2 * 2 * 18 + 2 * 12
    assert found.bubble_share == pytest.approx(1 - busy_s / (6 * found.step_s))


def test_the_kind_of_schedule_is_the_callers():
    profile = make_profile([1.0] * 4)
    plan = Planner(profile, PlannerSettings(num_microbatches=8, num_pipelines=1)).initial_plan(node_names(4)).plan
    bubbles = {kind: forecast(profile, plan, kind=kind).pipelines[0].timeline.bubble_share for kind in ScheduleKind}
    assert bubbles[ScheduleKind.ZERO_BUBBLE] < bubbles[ScheduleKind.ONE_F_ONE_B]


def test_one_pipeline_has_nothing_to_reduce():
    profile = make_profile([1.0, 1.0])
    template = PipelineTemplate(stages=(StageTemplate(first_layer=0, stop_layer=2, node_index=0),))
    plan = ExecutionPlan(pipelines=(Pipeline(template=template, nodes=("a",), num_microbatches=1),))
    found = forecast(profile, plan)
    assert (found.reduce_s, found.bubble_share) == (0.0, 0.0)
    assert found.step_s == found.pipelines[0].timeline.makespan_s
