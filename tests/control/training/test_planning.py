"""Which schedules the pipelines of a plan run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import PlanAdopted, ShardingChosen
from oobleck.control.training.planning import check_possible, choose_sharding, planner_for, schedules_for
from oobleck.errors import PlanningError, Unrecoverable
from oobleck.job import JobSpec, Sharding
from oobleck.planner import ExecutionPlan, NodeKind, Pipeline, PipelineTemplate, StageTemplate
from oobleck.schedule import ScheduleKind
from tests.control.bench import Bench, living
from tests.control.model import Shape
from tests.examples import examples
from tests.wire.strategies import job_specs

from .test_coordinator import succeed

PAIRS = Shape(layers_per_device=2)
"""Four nodes in two pipelines of two."""
AUTO = replace(PAIRS.job, schedule="auto")
PLAIN, SPLIT = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE


def mixed_plan() -> ExecutionPlan:
    """A pipeline of two stages, and one of a single stage."""
    two = tuple(StageTemplate(first_layer=2 * index, stop_layer=2 * index + 2, node_index=index) for index in range(2))
    one = (StageTemplate(first_layer=0, stop_layer=4, node_index=0),)
    return ExecutionPlan(
        pipelines=(
            Pipeline(template=PipelineTemplate(stages=two), nodes=("a", "b"), num_microbatches=3),
            Pipeline(template=PipelineTemplate(stages=one), nodes=("c",), num_microbatches=1),
        )
    )


def test_each_pipeline_gets_what_suits_it() -> None:
    profile = Shape(layers_per_device=8).profile
    assert schedules_for(AUTO, profile, mixed_plan()) == (SPLIT, PLAIN)


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (replace(AUTO, tensor_parallel=2), PLAIN),
        (replace(AUTO, compile=True), PLAIN),
        (replace(AUTO, schedule="zero-bubble"), SPLIT),
        (replace(AUTO, schedule="gpipe"), ScheduleKind.GPIPE),
        (replace(AUTO, schedule="1f1b"), PLAIN),
    ],
)
def test_where_there_is_nothing_to_choose_all_get_the_same(job: JobSpec, kind: ScheduleKind) -> None:
    profile = Shape(layers_per_device=8).profile
    assert schedules_for(job, profile, mixed_plan()) == (kind, kind)


def test_pipelines_of_several_chunks_are_interleaved_and_others_as_if_they_were_alone() -> None:
    profile = Shape(layers_per_device=8).profile
    plain = mixed_plan()
    two, one = plain.pipelines
    chunks = tuple(
        replace(two.template.stages[layer % 2], first_layer=layer, stop_layer=layer + 1) for layer in range(4)
    )
    plan = replace(plain, pipelines=(replace(two, template=PipelineTemplate(stages=chunks)), one))
    for schedule in ("interleaved", "auto"):
        job = replace(AUTO, schedule=schedule)
        assert schedules_for(job, profile, plan) == (ScheduleKind.INTERLEAVED, PLAIN)
    assert schedules_for(replace(AUTO, schedule="interleaved"), profile, plain) == (PLAIN, PLAIN)


@examples(300)
@given(job=job_specs(), num_nodes=st.integers(1, 5), groups=st.integers(1, 2))
def test_a_job_that_is_accepted_is_planned_or_the_planner_says_why_not(job: JobSpec, num_nodes: int, groups: int):
    """Nothing that the planner makes for itself is refused as if it were the user's."""
    kind = NodeKind(name="a", profile=PAIRS.profile, devices_per_node=groups * job.devices_per_stage)
    nodes = [f"node{number}" for number in range(num_nodes)]
    try:
        planner = planner_for(job, [kind])
        decision = planner.initial_plan(nodes)
    except PlanningError:
        return
    assert len(schedules_for(job, planner.profile, decision.plan)) == len(decision.plan.pipelines)
    with suppress(PlanningError, Unrecoverable):
        planner.reconfigure(decision.plan, lost=nodes[:1])


def test_workers_are_told_with_their_orders_and_readers_of_the_journal_too() -> None:
    bench = Bench(PAIRS, job=replace(AUTO, device_memory_bytes=None))
    bench.prepare()
    assert {update.schedules for update in bench.updates} == {(SPLIT, SPLIT)}
    (adopted,) = bench.journal(PlanAdopted)
    assert adopted.schedules == (SPLIT, SPLIT)
    assert adopted.reason.endswith("; the zero-bubble schedule")


def test_steps_whose_backward_passes_are_split_are_not_cut_into_sections() -> None:
    """Their gradients are never those of a part of the microbatches."""
    for schedule, is_cut in (("1f1b", True), ("auto", False)):
        bench = Bench(PAIRS, job=replace(PAIRS.job, schedule=schedule, reductions_per_step=2))
        bench.prepare()
        assert {update.num_sections > 1 for update in bench.updates} == {is_cut}


def test_a_plan_of_which_some_pipelines_are_of_one_stage_says_how_many_split() -> None:
    shape = Shape(num_nodes=3, layers_per_device=4, num_pipelines=2)
    bench = Bench(shape, job=replace(shape.job, schedule="auto"))
    bench.prepare()
    (adopted,) = bench.journal(PlanAdopted)
    stages = [len(pipeline.stages) for pipeline in adopted.plan.pipelines]
    assert sorted(stages) == [1, 2]
    assert [kind is SPLIT for kind in adopted.schedules] == [count == 2 for count in stages]
    assert adopted.reason.endswith("1 of 2 pipelines")


def test_more_chunks_than_the_layers_of_two_stages_are_refused_by_name() -> None:
    job = replace(AUTO, schedule="interleaved", num_chunks=3)
    check_possible(job, num_layers=6)
    check_possible(replace(AUTO, schedule="1f1b"), num_layers=2)
    with pytest.raises(PlanningError, match=r"num_chunks is 3: .* need 6 layers, and the model has 5"):
        check_possible(job, num_layers=5)


SHARED = Shape(devices=2, sharding_devices=2, sharding="auto")
"""Four nodes of two devices that hold a stage together."""
NODES = tuple(node.name for node in SHARED.nodes)


@given(layers_per_device=st.integers(1, 9), sharding=st.sampled_from(["optimizer", "gradients", "all"]))
@examples(30)
def test_devices_share_out_as_little_as_a_short_step_allows(layers_per_device: int, sharding: Sharding) -> None:
    """No other choice keeps more copies, or has a step that is clearly shorter."""
    shape = replace(SHARED, layers_per_device=layers_per_device)
    kinds = [NodeKind(name="kind", profile=shape.profile, devices_per_node=2)]
    chosen, seconds = choose_sharding(shape.job, lambda each: planner_for(shape.job, kinds, sharding=each), NODES)
    assert [name for name, _ in seconds] == ["optimizer", "gradients", "all"]
    fixed = replace(shape.job, sharding=sharding)
    mine = planner_for(replace(shape.job, sharding=chosen), kinds).initial_plan(NODES)
    try:
        other = planner_for(fixed, kinds).initial_plan(NODES)
    except PlanningError:
        assert dict(seconds)[sharding] is None
        return
    assert dict(seconds)[sharding] == other.predicted_step_s
    assert mine.redundant >= other.redundant
    if mine.redundant == other.redundant:
        assert mine.predicted_step_s <= other.predicted_step_s / 0.97
        more = ["optimizer", "gradients", "all"]
        if more.index(sharding) < more.index(chosen):
            assert mine.predicted_step_s < other.predicted_step_s * 0.98


def test_where_no_choice_has_a_plan_the_reason_is_that_of_the_last() -> None:
    shape = replace(SHARED, num_nodes=1, layers_per_device=1, num_layers=9)
    kinds = [NodeKind(name="kind", profile=shape.profile, devices_per_node=2)]
    with pytest.raises(PlanningError, match="memory"):
        choose_sharding(shape.job, lambda each: planner_for(shape.job, kinds, sharding=each), ["n0"])


@pytest.mark.parametrize(("layers_per_device", "sharding"), [(3, "all"), (8, "optimizer")])
def test_what_is_shared_out_is_in_each_order_until_the_run_ends(layers_per_device: int, sharding: str) -> None:
    """After a loss and under another master, too, whatever would be chosen for fewer nodes."""
    bench = Bench(replace(SHARED, layers_per_device=layers_per_device))
    bench.prepare()
    (chosen,) = bench.journal(ShardingChosen)
    assert chosen.sharding == sharding
    assert chosen.sentence.startswith(f"sharding: {sharding} is chosen by the predicted steps: optimizer 0.")
    assert {update.sharding for update in bench.updates} == {sharding}
    succeed(bench)
    for node in NODES:
        bench.up(node, pid=7, generation=1, workers=living(0, 1))
    bench.fail("n3")
    bench.fail("n2")
    for node in NODES[:2]:
        for device in range(2):
            bench.answer(node, device=device, layers=(0, 1, 2, 3), adopted=1)
    bench.wait(0.01)
    assert {update.sharding for update in bench.updates} == {sharding}
    assert not bench.journal(ShardingChosen)
