from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner import DeviceProfile, Planner, PlannerSettings, Profile
from oobleck.schedule.forecast import forecast
from oobleck.sim.pace import Pace
from tests.planner.drawing import ROOMY_BYTES, make_layer, make_profile, profiles, uniform_profile


@given(profile=profiles(min_layers=2), num_nodes=st.integers(1, 9), num_microbatches=st.integers(1, 70))
def test_a_step_takes_what_the_event_exact_forecast_says(
    profile: Profile, num_nodes: int, num_microbatches: int
) -> None:
    profile = replace(profile, device=DeviceProfile(name="roomy", memory_bytes=ROOMY_BYTES))
    planner = Planner(profile, PlannerSettings(num_microbatches=num_microbatches))
    plan = planner.initial_plan([f"node{number}" for number in range(num_nodes)]).plan
    assert Pace(profile).step_s(plan, {}) == pytest.approx(forecast(profile, plan).step_s, rel=1e-12)


def test_a_slow_node_holds_up_the_step_of_all() -> None:
    profile = uniform_profile(4, seconds=1.0)
    settings = PlannerSettings(num_microbatches=8, num_pipelines=2)
    plan = Planner(profile, settings).initial_plan(["a", "b", "c", "d"]).plan
    pace = Pace(profile)
    usual_s, slowed_s = pace.step_s(plan, {}), pace.step_s(plan, {"a": 2.0})
    assert plan.pipelines[0].num_microbatches == 4
    assert usual_s < slowed_s < 2 * usual_s
    assert pace.step_s(plan, {"a": 2.0, "c": 2.0}) == pytest.approx(slowed_s)
    assert pace.step_s(plan, {}) == usual_s


def test_no_microbatches_take_no_time() -> None:
    profile = make_profile([make_layer()])
    plan = Planner(profile, PlannerSettings(num_microbatches=1)).initial_plan(["a"]).plan
    assert Pace(profile).compute_s(plan.pipelines[0], 0, {}) == 0.0
