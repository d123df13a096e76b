from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import PipelineTemplate, Profile
from oobleck.planner.costs import StageCosts
from oobleck.planner.makespan import PassTimes, stops_of
from oobleck.schedule import ScheduleKind, compile_schedule, timeline
from oobleck.schedule.costs_of_stages import stage_costs
from tests.examples import examples
from tests.planner.drawing import profiles
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


@examples(30)
@given(profile=profiles(max_layers=6))
def test_many_cuts_are_evaluated_as_each_alone(profile: Profile) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    times = PassTimes(costs)
    templates = list(all_templates(costs, 3))
    if templates:
        together = times.steps_s(templates[0], np.concatenate([stops_of(each) for each in templates]), 7)
        assert together.tolist() == [times.step_s(each, 7) for each in templates]


@examples(40)
@given(profile=profiles(max_layers=5), num_microbatches=st.integers(33, 300))
def test_long_steps_go_on_as_they_have_begun(profile: Profile, num_microbatches: int) -> None:
    costs = StageCosts(profile, max_in_flight=8)
    times = PassTimes(costs)
    for template in all_templates(costs, 4):
        expected = on_the_timeline(profile, template, num_microbatches)
        assert times.step_s(template, num_microbatches) == pytest.approx(expected, rel=0.03)
