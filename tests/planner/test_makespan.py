from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import PipelineTemplate, Profile
from oobleck.planner.costs import StageCosts
from oobleck.planner.makespan import PassTimes, stops_of
from oobleck.planner.zero_bubble import SplitPasses
from oobleck.schedule import ScheduleKind, compile_schedule, timeline
from oobleck.schedule.choice import choose_schedule
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.schedule.step_flow import step_flow
from tests.examples import examples
from tests.planner.drawing import profiles, uniform_profile
from tests.planner.templates.test_templates import all_templates


def on_the_timeline(profile: Profile, template: PipelineTemplate, num_microbatches: int) -> float:
    schedule = compile_schedule(
        ScheduleKind.ONE_F_ONE_B, num_stages=template.num_stages, num_microbatches=num_microbatches
    )
    return timeline(schedule, stage_costs(profile, template)).makespan_s


@examples(150)
@given(
    profile=profiles(max_layers=6, device_counts=(1, 2)),
    shape=st.sampled_from(((1, 1, 4), (1, 1, 2), (2, 1, 2), (4, 2, 1))),
    rounds=st.integers(1, 12),
)
def test_a_step_takes_as_long_as_on_the_timeline(profile: Profile, shape: tuple[int, int, int], rounds: int) -> None:
    per_node, per_stage, num_nodes = shape
    costs = StageCosts(profile, devices_per_node=per_node, max_devices_per_stage=per_stage, max_in_flight=rounds)
    times = PassTimes(costs)
    for template in all_templates(costs, num_nodes):
        num_microbatches = min(rounds, 8 * template.num_stages)
        expected = on_the_timeline(profile, template, num_microbatches)
        assert times.step_s(template, num_microbatches) == pytest.approx(expected, rel=1e-9)


@examples(100)
@given(profile=profiles(max_layers=6), num_microbatches=st.integers(1, 12), reduce_s=st.sampled_from((0.0, 1.0, 20.0)))
def test_where_the_schedule_is_open_a_step_takes_what_the_chosen_one_does(
    profile: Profile, num_microbatches: int, reduce_s: float
) -> None:
    costs = StageCosts(profile, max_in_flight=num_microbatches)
    times, split = PassTimes(costs, splits=True), SplitPasses(costs)
    for template in all_templates(costs, 4):
        count = min(num_microbatches, 8 * template.num_stages)
        choice = choose_schedule(profile, template, count, reduce_s=reduce_s)
        flow = step_flow(ScheduleKind.ZERO_BUBBLE, num_stages=template.num_stages, num_microbatches=count)
        peaks = flow.peak_memory_bytes(stage_costs(profile, template, splits=True))
        fits = bool(split.fit(template, stops_of(template), count)[0])
        assert not fits or max(peaks) <= profile.device.memory_bytes
        if all(layer.split is None or layer.split.kept_bytes <= layer.activation_bytes for layer in profile.layers):
            assert fits == (max(peaks) <= profile.device.memory_bytes)
        if fits or template.num_stages == 1 or choice.kind is ScheduleKind.ONE_F_ONE_B:
            own_s = times.step_s(template, count, reduce_s=reduce_s)
            assert own_s == pytest.approx(choice.timeline.makespan_s - reduce_s, rel=1e-9)


@examples(30)
@given(profile=profiles(max_layers=6))
def test_many_cuts_are_evaluated_as_each_alone(profile: Profile) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    times = PassTimes(costs)
    templates = list(all_templates(costs, 3))
    if templates:
        together = times.steps_s(templates[0], np.concatenate([stops_of(each) for each in templates]), 7)
        assert together.tolist() == [times.step_s(each, 7) for each in templates]


@examples(60)
@given(
    profile=profiles(max_layers=6), num_microbatches=st.integers(1, 30), which=st.integers(0), share=st.floats(0.5, 2)
)
def test_cuts_that_are_faster_than_a_bound_are_evaluated_as_without_it(
    profile: Profile, num_microbatches: int, which: int, share: float
) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    times = PassTimes(costs)
    templates = list(all_templates(costs, 3))
    if templates:
        stops = np.concatenate([stops_of(each) for each in templates])
        steps_s = times.steps_s(templates[0], stops, num_microbatches)
        for below_s in (steps_s[which % len(steps_s)], share * steps_s.min()):
            bounded_s = times.steps_s(templates[0], stops, num_microbatches, below_s=np.full(len(stops), below_s))
            is_faster = steps_s < below_s
            assert (bounded_s[is_faster] == steps_s[is_faster]).all()
            assert (bounded_s[~is_faster] >= below_s).all()


def test_cuts_that_cannot_be_faster_are_not_evaluated() -> None:
    costs = StageCosts(uniform_profile(6), max_in_flight=8)
    template = max(all_templates(costs, 3), key=lambda each: min(len(stage.layers) for stage in each.stages))
    stops = np.array([[0, 2, 4, 6], [0, 1, 2, 6]])
    steps_s = PassTimes(costs).steps_s(template, stops, 20)
    bounded_s = PassTimes(costs).steps_s(template, stops, 20, below_s=steps_s[:1].repeat(2) * 1.01)
    assert bounded_s.tolist() == [steps_s[0], np.inf]


@examples(40)
@given(profile=profiles(max_layers=5), num_microbatches=st.integers(33, 300))
def test_long_steps_go_on_as_they_have_begun(profile: Profile, num_microbatches: int) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    times = PassTimes(costs)
    for template in all_templates(costs, 4):
        expected = on_the_timeline(profile, template, num_microbatches)
        assert times.step_s(template, num_microbatches) == pytest.approx(expected, rel=0.03)
