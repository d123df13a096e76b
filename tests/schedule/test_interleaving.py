"""Pipelines are cut into chunks where that fits and, if it is left open, where the timeline says that it saves time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oobleck.planner import NetworkProfile, PipelineTemplate, Planner, PlannerSettings, Profile, with_speed
from oobleck.schedule import ScheduleKind
from oobleck.schedule.choice import LEAST_GAIN, choose_schedule, evaluate, kind_for
from oobleck.schedule.forecast import forecast
from oobleck.schedule.interleaving import Interleaving, make_cutter
from tests.examples import examples
from tests.planner.drawing import ROOMY_BYTES, profiles, uniform_profile

from .test_choice import template, with_split

PLAIN, CUT = ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED
FAST = NetworkProfile(
    inter_node_bytes_per_s=1e12, inter_node_latency_s=0.0, intra_node_bytes_per_s=1e12, intra_node_latency_s=0.0
)
SLOW = replace(FAST, inter_node_latency_s=10.0)


def is_in_turn(cut: PipelineTemplate, plain: PipelineTemplate) -> bool:
    """Chunks of all layers, on the devices of each stage in turn."""
    ends = [(chunk.first_layer, chunk.stop_layer) for chunk in cut.stages]
    places = [stage.place for stage in plain.stages] * cut.num_chunks
    return (
        all(one[1] == other[0] for one, other in pairwise(ends))
        and ends[-1][1] == plain.num_layers
        and [chunk.place for chunk in cut.stages] == places
    )


@given(profile=profiles(min_layers=4), data=st.data())
def test_it_pays_where_it_is_left_open_and_fits_always(profile: Profile, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, profile.num_layers - 1), min_size=1, max_size=3))
    chain = template(*sorted(cuts), profile.num_layers)
    num_microbatches, num_chunks = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 3))
    always = data.draw(st.booleans())
    cut = Interleaving(profile, num_chunks=num_chunks, always=always).cut(chain, num_microbatches)
    if cut is chain:
        return
    assert (cut.num_stages, cut.num_chunks) == (chain.num_stages, num_chunks)
    assert is_in_turn(cut, chain)
    found = evaluate(CUT, profile, cut, num_microbatches)
    for stage, peak_bytes in enumerate(found.peak_memory_bytes):
        assert peak_bytes <= cut.stages[stage].num_devices * profile.device.memory_bytes
    if not always:
        best_s = choose_schedule(profile, chain, num_microbatches).timeline.makespan_s
        assert found.makespan_s <= (1 - LEAST_GAIN / 2) * best_s


def test_a_cheap_network_makes_it_pay_and_a_dear_one_does_not() -> None:
    chain = template(4, 8)
    for network, num_chunks in ((FAST, 2), (SLOW, 1)):
        blocks = with_split(uniform_profile(8, memory_bytes=ROOMY_BYTES, seconds=1.0), overhead=1.3)
        profile = replace(blocks, network=network)  # with passes in two parts that take longer
        cut = Interleaving(profile, num_chunks=2).cut(chain, 4)
        assert cut.num_chunks == num_chunks
        assert (choose_schedule(profile, cut, 4).kind is CUT) == (num_chunks == 2)


def test_the_bubble_is_as_much_smaller_as_there_are_chunks() -> None:
    profile = replace(uniform_profile(8, memory_bytes=ROOMY_BYTES, seconds=1.0), network=FAST)
    chain = template(4, 8)
    plain = evaluate(PLAIN, profile, chain, 4)
    busy_s = max(plain.busy_s)
    cut = Interleaving(profile, num_chunks=2, always=True).cut(chain, 4)
    found = evaluate(CUT, profile, cut, 4)
    assert found.makespan_s - busy_s == pytest.approx((plain.makespan_s - busy_s) / 2, rel=1e-6)


def test_what_splits_backward_passes_for_nothing_is_left_to_the_zero_bubble_schedule() -> None:
    profile = replace(with_split(uniform_profile(8, memory_bytes=ROOMY_BYTES, seconds=1.0)), network=FAST)
    cut = Interleaving(profile, num_chunks=2).cut(template(4, 8), 16)
    kinds = {choose_schedule(profile, cut, 16).kind, kind_for(cut, ScheduleKind.ZERO_BUBBLE)}
    assert kinds == {ScheduleKind.ZERO_BUBBLE}


def test_where_there_are_too_few_layers_or_stages_or_bytes_a_template_stays_the_object_that_it_is() -> None:
    profile = replace(uniform_profile(8, memory_bytes=ROOMY_BYTES, seconds=1.0), network=FAST)
    cutter = Interleaving(profile, num_chunks=3, always=True)
    for chain in (template(2, 4, 8), template(8)):
        assert cutter.cut(chain, 4) is chain
    chain = template(4, 8)
    plain = evaluate(PLAIN, profile, chain, 4)
    assert cutter.cut(chain, 4) is not chain
    tight = replace(profile, device=replace(profile.device, memory_bytes=max(plain.peak_memory_bytes)))
    assert Interleaving(tight, num_chunks=3, always=True).cut(chain, 4) is chain


def test_a_planner_cuts_its_plans_and_goes_on_with_them() -> None:
    """A pipeline that loses nobody keeps its chunks; one that has as many stages as another has the same."""
    profile = replace(uniform_profile(12, memory_bytes=140, seconds=1.0), network=FAST)
    planner = Planner(profile, PlannerSettings(num_microbatches=16), make_cutter=make_cutter(CUT, 2))
    names = [f"node{index}" for index in range(6)]
    plan = planner.initial_plan(names).plan
    assert {pipeline.template.num_chunks for pipeline in plan.pipelines} == {2}
    assert {each.timeline.schedule.kind for each in forecast(profile, plan).pipelines} == {CUT}
    after = planner.reconfigure(plan, lost=["node1"])
    whole = [pipeline for pipeline in plan.pipelines if "node1" not in pipeline.nodes]
    assert {pipeline.nodes: pipeline.template.stages for pipeline in whole}.items() <= {
        pipeline.nodes: pipeline.template.stages for pipeline in after.plan.pipelines
    }.items()
    for pipeline in after.plan.pipelines:
        assert pipeline.template.num_chunks == (2 if pipeline.template.num_stages > 1 else 1)
        for worker_id, layers in pipeline.layers_at.items():
            held = plan.layers_at.get(worker_id, frozenset())
            received = {item.layer for item in after.transfers if item.target == worker_id}
            assert layers - held == received


def test_other_schedules_have_one_chunk_a_stage() -> None:
    assert make_cutter(PLAIN, 2) is None
    assert make_cutter(ScheduleKind.ZERO_BUBBLE, 2) is None


@examples(40)
@given(data=st.data(), profile=profiles(min_layers=4, max_layers=10), num_chunks=st.integers(2, 3))
def test_predicted_steps_of_interleaved_plans_are_those_of_their_timelines(
    data: st.DataObject, profile: Profile, num_chunks: int
) -> None:
    """At the start, after a loss, with a slow node, and for more microbatches than are looked at one by one."""
    num_microbatches = data.draw(st.integers(4, 150))
    planner = Planner(
        profile,
        PlannerSettings(num_microbatches=num_microbatches, num_pipelines=data.draw(st.integers(1, 2))),
        make_cutter=make_cutter(CUT, num_chunks),
    )
    names = [f"node{index}" for index in range(data.draw(st.integers(4, 7)))]
    assume(planner.can_hold(names))
    plans = [(planner.initial_plan(names), {})]
    slow = {names[1]: 2.0}
    plans.append((planner.reconfigure(plans[0][0].plan, slow=slow), slow))
    if len(plans[0][0].plan.pipelines) > 1:
        plans.append((planner.reconfigure(plans[0][0].plan, lost=[names[0]]), {}))
    for decision, factors in plans:
        if all(pipeline.template.num_chunks == 1 for pipeline in decision.plan.pipelines):
            continue
        found = forecast(
            profile,
            decision.plan,
            kind=CUT,
            profile_of=lambda node, factors=factors: with_speed(profile, 1 / factors.get(node, 1.0)),
        )
        assert decision.predicted_step_s == pytest.approx(found.step_s, rel=0.01)


def test_the_predicted_step_of_an_interleaved_plan_is_exact_where_each_microbatch_is_looked_at() -> None:
    profile = replace(uniform_profile(24, memory_bytes=ROOMY_BYTES, seconds=1.0), network=FAST)
    planner = Planner(profile, PlannerSettings(num_microbatches=48, num_pipelines=2), make_cutter=make_cutter(CUT, 2))
    decision = planner.initial_plan([f"node{index}" for index in range(8)])
    assert decision.predicted_step_s == pytest.approx(forecast(profile, decision.plan, kind=CUT).step_s, rel=1e-12)
    plain = Planner(profile, planner.settings).initial_plan([f"node{index}" for index in range(8)])
    assert decision.predicted_step_s < 0.97 * plain.predicted_step_s
