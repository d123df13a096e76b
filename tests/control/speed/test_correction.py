"""Profiles that the reports of a run's workers correct."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.protocol import Pace
from oobleck.control.speed import REPORTS_NEEDED, SpeedTracker, corrected, microbatch_s
from oobleck.control.speed.correction import CLOSE
from oobleck.plan import ScheduleKind
from oobleck.planner import ExecutionPlan, NodeKind, Planner, PlannerSettings, Profile, SplitBackward, with_speed
from tests.control.model import Shape

SPLIT = SplitBackward(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, kept_bytes=1)
NODES = ("n0", "n1")
KIND_OF = dict.fromkeys(NODES, "default")


def profile_and_plan() -> tuple[Profile, ExecutionPlan]:
    """Two stages, whose layers were measured whole and in parts."""
    profile = Shape().profile
    profile = replace(profile, layers=tuple(replace(layer, split=SPLIT) for layer in profile.layers))
    settings = PlannerSettings(num_microbatches=4, num_pipelines=1, fault_threshold=0)
    return profile, Planner(profile, settings).initial_plan(NODES).plan


def reported(
    profile: Profile, plan: ExecutionPlan, kind: ScheduleKind, *, plain: float, split: float
) -> dict[tuple[str, bool], float] | None:
    """Let all workers report that passes take so many times the profile's seconds."""
    tracker, (pipeline,) = SpeedTracker(), plan.pipelines
    for _ in range(REPORTS_NEEDED):
        for index, stage in enumerate(pipeline.stages):
            is_split = kind is ScheduleKind.ZERO_BUBBLE and index > 0
            seconds = microbatch_s(profile, stage, splits=is_split) * (split if is_split else plain)
            tracker.note(stage.worker_ids[0], Pace(device=0, compute_s=seconds, microbatches=1), plan, profile, (kind,))
    return tracker.usual(plan, (kind,))


def test_a_profile_is_as_much_too_short_as_all_passes_are_longer():
    profile, plan = profile_and_plan()
    usual = reported(profile, plan, ScheduleKind.ONE_F_ONE_B, plain=1.5, split=1.0)
    assert usual is not None
    kind = NodeKind(name="default", profile=profile, devices_per_node=1)
    (found,) = corrected([kind], usual, KIND_OF)
    assert found.profile.layers[0].forward_s[1] == pytest.approx(1.5 * profile.layers[0].forward_s[1])
    assert found.profile.layers[0].split == replace(
        SPLIT, forward_s=1.5, backward_input_s=1.5, backward_weight_s=1.5
    ), "what no node has run is taken to be off by as much"


def test_split_passes_are_corrected_apart():
    profile, plan = profile_and_plan()
    usual = reported(profile, plan, ScheduleKind.ZERO_BUBBLE, plain=1.25, split=2.0)
    assert usual is not None
    (found,) = corrected([NodeKind(name="default", profile=profile, devices_per_node=1)], usual, KIND_OF)
    assert found.profile.layers[0].backward_s[1] == pytest.approx(1.25 * profile.layers[0].backward_s[1])
    assert found.profile.layers[0].split == replace(SPLIT, forward_s=2.0, backward_input_s=2.0, backward_weight_s=2.0)


@pytest.mark.parametrize("times", [1 - CLOSE / 2, 1.0, 1 + CLOSE / 2])
def test_a_profile_that_is_close_stays_the_object_that_it_is(times: float):
    profile, plan = profile_and_plan()
    usual = reported(profile, plan, ScheduleKind.ONE_F_ONE_B, plain=times, split=1.0)
    assert usual is not None
    kind = NodeKind(name="default", profile=profile, devices_per_node=1)
    (found,) = corrected([kind], usual, KIND_OF)
    assert found is kind


def test_each_kind_is_corrected_by_its_own_nodes():
    profile, _ = profile_and_plan()
    kinds = [NodeKind(name=name, profile=profile, devices_per_node=1) for name in ("a", "b", "unused")]
    usual = {("n0", False): 2.0, ("n1", False): 1.0}
    one, other, unused = corrected(kinds, usual, {"n0": "a", "n1": "b"})
    assert one.profile == with_speed(profile, 0.5)
    assert other is kinds[1]
    assert unused is kinds[2]


def test_nothing_is_known_before_all_have_reported():
    profile, plan = profile_and_plan()
    tracker = SpeedTracker()
    pace = Pace(device=0, compute_s=1.0, microbatches=1)
    for _ in range(REPORTS_NEEDED):
        assert tracker.usual(plan, ()) is None
        tracker.note(plan.worker_ids[0], pace, plan, profile)
    assert tracker.usual(plan, ()) is None
