"""Which schedules the pipelines of a plan run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.journal import PlanAdopted
from oobleck.control.training.planning import check_possible, schedules_for
from oobleck.errors import PlanningError
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate
from oobleck.schedule import ScheduleKind
from tests.control.bench import Bench
from tests.control.model import Shape

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
    check_possible(replace(job, schedule="1f1b"), num_layers=2)
    with pytest.raises(PlanningError, match=r"num_chunks is 3: .* need 6 layers, and the model has 5"):
        check_possible(job, num_layers=5)
