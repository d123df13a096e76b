from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from oobleck.control.training.planning import schedules_for
from oobleck.errors import PlanningError
from oobleck.job import JobSpec
from oobleck.planner import DeviceProfile, ExecutionPlan, Planner, PlannerSettings, Profile
from oobleck.schedule import ScheduleKind, compile_schedule, timeline
from oobleck.schedule.forecast import forecast
from oobleck.sim.costs.step_times import StepTimes, costs_on
from tests.planner.drawing import ROOMY_BYTES, make_layer, make_profile, profiles, uniform_profile

PLAIN = ScheduleKind.ONE_F_ONE_B
KINDS = (PLAIN, ScheduleKind.GPIPE, ScheduleKind.ZERO_BUBBLE)


def make_plan(profile: Profile, num_nodes: int, num_microbatches: int) -> ExecutionPlan:
    planner = Planner(profile, PlannerSettings(num_microbatches=num_microbatches))
    return planner.initial_plan([f"node{number}" for number in range(num_nodes)]).plan


def roomy(profile: Profile) -> Profile:
    return replace(profile, device=DeviceProfile(name="roomy", memory_bytes=ROOMY_BYTES))


@given(
    profile=profiles(min_layers=2).map(roomy),
    num_nodes=st.integers(1, 9),
    num_microbatches=st.integers(1, 70),
    kind=st.sampled_from(KINDS),
)
def test_a_step_takes_what_the_event_exact_forecast_says(
    profile: Profile, num_nodes: int, num_microbatches: int, kind: ScheduleKind
) -> None:
    plan = make_plan(profile, num_nodes, num_microbatches)
    step_s = StepTimes(profile).step_s(plan, {}, (kind,) * len(plan.pipelines))
    assert step_s == pytest.approx(forecast(profile, plan, kind=kind).step_s, rel=1e-12)


@given(
    profile=profiles(min_layers=2),
    num_nodes=st.integers(1, 9),
    num_microbatches=st.integers(1, 70),
    slowness=st.floats(1.0, 4.0),
)
def test_a_step_under_the_schedules_that_are_chosen_is_never_slower_than_under_1f1b(
    profile: Profile, num_nodes: int, num_microbatches: int, slowness: float
) -> None:
    try:
        plan = make_plan(profile, num_nodes, num_microbatches)
    except PlanningError:
        reject()
    schedules = schedules_for(JobSpec(schedule="auto"), profile, plan)
    pace = StepTimes(profile)
    chosen_s = pace.step_s(plan, {}, schedules)
    assert chosen_s == pytest.approx(forecast(profile, plan, kind=None).step_s, rel=1e-12)
    assert chosen_s <= pace.step_s(plan, {}) * (1 + 1e-12)
    all_slow = dict.fromkeys(plan.nodes, slowness)
    assert pace.step_s(plan, all_slow, schedules) <= slowness * chosen_s * (1 + 1e-12)


@given(
    profile=profiles(min_layers=2).map(roomy),
    num_nodes=st.integers(1, 9),
    num_microbatches=st.integers(1, 70),
    factor=st.floats(1.0, 4.0),
)
def test_a_pipeline_takes_what_its_timeline_says_to_the_last_bit(
    profile: Profile, num_nodes: int, num_microbatches: int, factor: float
) -> None:
    pipeline = make_plan(profile, num_nodes, num_microbatches).pipelines[0]
    template, factors = pipeline.template, dict.fromkeys(pipeline.nodes[:1], factor)
    schedule = compile_schedule(PLAIN, num_stages=template.num_stages, num_microbatches=num_microbatches)
    slowed = [factors.get(pipeline.nodes[stage.node_index], 1.0) for stage in template.stages]
    expected = timeline(schedule, costs_on(profile, template, PLAIN, slowed)).makespan_s
    assert StepTimes(profile).compute_s(pipeline, num_microbatches, factors) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_very_long_step_takes_what_its_beginning_lets_expect(kind: ScheduleKind) -> None:
    profile = make_profile([make_layer(seconds) for seconds in (3.0, 3.1, 2.9, 3.3)])
    settings = PlannerSettings(num_microbatches=1500, num_pipelines=1, fault_threshold=0)
    plan = Planner(profile, settings).initial_plan(["a", "b", "c", "d"]).plan
    assert plan.pipelines[0].template.num_stages == 4
    step_s = StepTimes(profile).step_s(plan, {}, (kind,))
    assert step_s == pytest.approx(forecast(profile, plan, kind=kind).step_s, rel=1e-6)


def test_a_slow_node_holds_up_the_step_of_all() -> None:
    profile = uniform_profile(4, seconds=1.0)
    settings = PlannerSettings(num_microbatches=8, num_pipelines=2)
    plan = Planner(profile, settings).initial_plan(["a", "b", "c", "d"]).plan
    pace = StepTimes(profile)
    usual_s, slowed_s = pace.step_s(plan, {}), pace.step_s(plan, {"a": 2.0})
    assert plan.pipelines[0].num_microbatches == 4
    assert usual_s < slowed_s < 2 * usual_s
    assert pace.step_s(plan, {"a": 2.0, "c": 2.0}) == pytest.approx(slowed_s)
    assert pace.step_s(plan, {}) == usual_s


def test_no_microbatches_take_no_time() -> None:
    profile = make_profile([make_layer()])
    plan = Planner(profile, PlannerSettings(num_microbatches=1)).initial_plan(["a"]).plan
    assert StepTimes(profile).compute_s(plan.pipelines[0], 0, {}) == 0.0
