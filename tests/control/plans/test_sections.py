from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.plans.sections import apportion, committed_after, num_sections_of, sections_wanted, shares_of
from oobleck.job import DataSpec, JobSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate
from tests.control.journals import plan

PAIRS = (("a", "b"), ("c", "d"), ("e",))


def job(**fields) -> JobSpec:
    return JobSpec(global_batch_size=24, **fields)


def test_with_nothing_committed_every_pipeline_takes_what_is_planned():
    layout = plan(("a", "b"), ("c", "d"), microbatches=5)
    assert [tuple(share) for share in shares_of(layout)] == [(0, 1, 2), (3, 4)]


def test_what_is_left_is_dealt_in_proportion_to_the_planned_numbers():
    layout = plan(("a", "b"), ("c", "d"), microbatches=12)
    assert shares_of(layout, (0, 1, 2, 6)) == ((3, 4, 5, 7), (8, 9, 10, 11))


def test_sections_of_a_rest_are_as_long_as_those_of_a_step():
    layout = plan(("a", "b"), ("c", "d"), microbatches=24)
    assert num_sections_of(layout, (), 4) == 4
    assert num_sections_of(layout, tuple(range(12)), 4) == 2
    assert num_sections_of(layout, tuple(range(23)), 4) == 1


def interleaved(layout: ExecutionPlan) -> ExecutionPlan:
    """The same nodes and shares, with two chunks a stage where there are several."""
    return replace(layout, pipelines=tuple(map(_interleaved, layout.pipelines)))


def _interleaved(pipeline: Pipeline) -> Pipeline:
    if pipeline.template.num_stages == 1:
        return pipeline
    places = pipeline.template.stages * 2
    chunks = (replace(each, first_layer=index, stop_layer=index + 1) for index, each in enumerate(places))
    return replace(pipeline, template=PipelineTemplate(stages=tuple(chunks)))


def test_sections_of_interleaved_pipelines_end_with_rounds_of_as_many_microbatches_as_they_have_stages():
    layout = interleaved(plan(("a", "b"), ("c", "d"), microbatches=14))
    assert num_sections_of(layout, (), 9) == 4
    assert committed_after(layout, (), 4, 1) == (0, 1, 7, 8)
    assert committed_after(layout, (), 2, 1) == (0, 1, 2, 3, 7, 8, 9, 10)
    assert sections_wanted(job(reductions_per_step=9, schedule="interleaved"), layout, 1.0) == 4


def test_every_pipeline_has_a_microbatch_in_each_section():
    assert num_sections_of(plan(("a", "b"), ("c", "d"), microbatches=5), (), 4) == 2


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[object, tuple[int, ...], int, int]]:
    """Plans that follow each other within a step: (plan, what was committed before, sections, committed ones)."""
    microbatches = draw(st.integers(3, 40))
    partial: tuple[int, ...] = ()
    chain = []
    for _ in range(draw(st.integers(1, 4))):
        layout = plan(*draw(st.sampled_from((PAIRS, PAIRS[:2], PAIRS[1:]))), microbatches=microbatches)
        layout = interleaved(layout) if draw(st.booleans()) else layout
        wanted = draw(st.integers(1, 9))
        sections = num_sections_of(layout, partial, wanted)
        number = draw(st.integers(0, sections - 1))
        chain.append((layout, partial, wanted, number))
        partial = committed_after(layout, partial, wanted, number)
    return chain


@given(chain=chains())
def test_through_any_plans_of_a_step_each_microbatch_is_committed_once_or_left_for_one_pipeline(chain):
    for layout, partial, wanted, number in chain:
        after = committed_after(layout, partial, wanted, number)
        assert after == tuple(sorted(set(after)))
        assert set(partial) <= set(after)
        assert len(after) - len(partial) >= number, "a section without a microbatch"
        left = [microbatch for share in shares_of(layout, after) for microbatch in share]
        assert sorted((*after, *left)) == list(range(layout.num_microbatches))
        own = {microbatch for share in shares_of(layout, partial) for microbatch in share}
        assert set(after) - set(partial) <= own


@given(total=st.integers(0, 99), weights=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_shares_sum_up_and_are_within_one_of_their_proportion(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * weight / sum(weights)) < 1 for share, weight in zip(shares, weights, strict=True))


def test_a_short_step_is_one_section_and_a_long_one_many():
    layout = plan(("a", "b"), ("c", "d"), microbatches=24)
    assert sections_wanted(job(), layout, 7.9) == 1
    assert sections_wanted(job(), layout, 40.0) == 5
    assert sections_wanted(job(), layout, 4000.0) == 12, "no more than a pipeline has microbatches"
    in_shards = replace(job(), data=DataSpec(shards=("a.bin",)))
    assert sections_wanted(in_shards, layout, 4000.0) == 1, "the step may be begun anew with other records"
    assert sections_wanted(job(), plan(("a", "b"), ("c", "d"), microbatches=400), 4000.0) == 32


def test_without_room_for_what_is_committed_only_a_job_that_says_so_has_sections():
    layout = plan(("a", "b"), ("c", "d"), microbatches=24)
    assert sections_wanted(job(), layout, 40.0, has_room=False) == 1
    assert sections_wanted(job(reductions_per_step=3), layout, 40.0, has_room=False) == 3


def test_a_job_may_say_how_often_gradients_are_reduced():
    layout = plan(("a", "b"), ("c", "d"), microbatches=24)
    assert sections_wanted(job(reductions_per_step=3), layout, 0.1) == 3
    assert sections_wanted(job(reductions_per_step=99), layout, 0.1) == 12


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (job(), plan(("a", "b"), microbatches=24)),
        (job(schedule="zero-bubble"), plan(("a", "b"), ("c", "d"), microbatches=24)),
        (replace(job(), reductions_per_step=4), plan(("a", "b"), microbatches=24)),
    ],
)
def test_where_partial_commits_protects_nothing_or_cannot_be_done_a_step_is_one_section(spec, layout):
    assert sections_wanted(spec, layout, 4000.0) == 1
