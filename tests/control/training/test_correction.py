"""A run whose steps take longer than its profile says: it predicts them so then, and plans again if that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import ProfileFound
from oobleck.control.journal import Notice, PlanAdopted, PlanCause, ProfileKnown, RecoveryStarted
from oobleck.control.protocol import Pace
from oobleck.control.speed import REPORTS_NEEDED, is_split, microbatch_s
from oobleck.control.training import Phase
from oobleck.plan import ScheduleKind
from oobleck.planner import Profile, SplitBackward, profile_from_json, profile_to_json
from tests.control.bench import Bench, ready
from tests.control.journals import replay_run
from tests.control.model import Shape

SHAPE = Shape(num_nodes=2, num_microbatches=4, fault_threshold=0)


def tell_paces(bench: Bench, profile: Profile, *, plain: float, split: float = 1.0) -> None:
    """Let all workers report often enough that passes take so many times the profile's seconds."""
    entry = bench.journal(PlanAdopted)[-1]
    for _ in range(REPORTS_NEEDED + 1):
        for worker_id in entry.plan.worker_ids:
            pipeline, place = entry.plan.locate(worker_id) or (0, 0)
            splits = is_split((pipeline, place), entry.schedules)
            stage = entry.plan.pipelines[pipeline].stages[place]
            seconds = (split if splits else plain) * microbatch_s(profile, stage, splits=splits)
            bench.say(worker_id.node, Pace(device=0, compute_s=seconds, microbatches=1))


def training(profile: Profile, schedule: str = "1f1b", num_pipelines: int | None = None) -> Bench:
    job = replace(SHAPE.job, schedule=schedule, num_pipelines=num_pipelines, fault_threshold=0)
    bench = Bench(SHAPE, job=job)
    for spec in bench.nodes:
        bench.up(spec.name)
        bench.say(spec.name, ready())
    bench.feed(ProfileFound(profile_json=profile_to_json(profile)))
    bench.resume(*(spec.name for spec in bench.nodes))
    return bench


def test_steps_are_predicted_as_they_are_measured():
    profile = SHAPE.profile
    bench = training(profile)
    tell_paces(bench, profile, plain=1.5)
    first, again = bench.journal(ProfileKnown)
    measured = profile_from_json(again.profile_json).layers[0].forward_s[1]
    assert measured == pytest.approx(1.5 * profile_from_json(first.profile_json).layers[0].forward_s[1])
    assert "passes take 1.50 times as long as when they were measured" in bench.journal(Notice)[-1].text
    assert bench.coordinator.phase is Phase.TRAINING, "no other plan is better"
    assert not bench.journal(RecoveryStarted)
    tell_paces(bench, profile_from_json(again.profile_json), plain=1.0)
    assert len(bench.journal(ProfileKnown)) == 2
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    assert profile_from_json(again.profile_json) == replayed.kinds[0].profile, "a new master predicts so as well"


def test_steps_that_take_what_was_predicted_change_nothing():
    bench = training(SHAPE.profile)
    tell_paces(bench, SHAPE.profile, plain=1.05)
    assert len(bench.journal(ProfileKnown)) == 1


def test_a_schedule_that_turns_out_slower_is_given_up():
    """Splitting a backward pass was measured as free, and costs half as much again in training."""
    layers = []
    for layer in SHAPE.profile.layers:
        third_s = (layer.forward_s[1] + layer.backward_s[1]) / 3
        split = SplitBackward(forward_s=third_s, backward_input_s=third_s, backward_weight_s=third_s, kept_bytes=0)
        layers.append(replace(layer, split=split))
    profile = replace(SHAPE.profile, layers=tuple(layers))
    bench = training(profile, "auto", num_pipelines=1)
    assert bench.journal(PlanAdopted)[-1].schedules == (ScheduleKind.ZERO_BUBBLE,)
    tell_paces(bench, profile, plain=1.0, split=1.5)
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.MEASURED
    for worker_id, layers in bench.journal(PlanAdopted)[-1].plan.layers_at.items():
        bench.answer(worker_id.node, adopted=1, layers=tuple(sorted(layers)))
    bench.wait(0.01)
    assert bench.journal(PlanAdopted)[-1].schedules != (ScheduleKind.ZERO_BUBBLE,)
