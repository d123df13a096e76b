"""What answers to a fence mean, and how microbatches are dealt again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.plans import shares_of
from oobleck.control.protocol import CommitRecord, SectionRecord, Segment, Status
from oobleck.control.steps.judgement import (
    NO_SECTION,
    SectionId,
    broken_pipelines,
    judge,
    microbatches_redone,
    reassign_microbatches,
    rests_of,
    uncovered,
    without,
)
from oobleck.planner import ExecutionPlan, WorkerId
from tests.control.journals import plan

PLAN = plan(("a", "b"), ("c", "d"), ("e", "f"), microbatches=12, spares=("s",))


def as_it_is(generation: int, _step: int, number: int) -> SectionId:
    """No plan came into force in the middle of a step."""
    return (generation, number) if number else NO_SECTION


def at(node: str) -> WorkerId:
    return WorkerId(node=node, device=0)


def record(step: int, generation: int = 1, *, duration_s: float = 1.0) -> CommitRecord:
    return CommitRecord(
        step=step,
        generation=generation,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        num_samples=1,
        samples_repeated=0,
        samples_missing=0,
        duration_s=duration_s,
    )


def status(applied: int = 3, **fields) -> Status:
    defaults = {
        "device": 0,
        "generation": 2,
        "last_record": record(applied) if applied else None,
        "reduced": None,
        "adopted": 1,
        "layers": (0, 1),
        "microbatches_done": 0,
        "broken": False,
    }
    return Status(applied=applied, **(defaults | fields))


def test_a_step_that_all_applied_is_committed():
    verdict = judge({at("a"): status(), at("b"): status(layers=(2, 3))}, record(3), {1: PLAN}, as_it_is)
    assert (verdict.applied, verdict.catch_up, verdict.adopted) == (3, None, 1)
    assert verdict.held == {at("a"): {0, 1}, at("b"): {2, 3}}


def test_whoever_holds_the_reduced_gradients_catches_up_with_whoever_applied_them():
    statuses = {at("a"): status(4), at("b"): status(3, reduced=4)}
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert verdict.applied == 4
    assert verdict.catch_up == record(4)


def test_a_step_that_only_the_dead_applied_is_committed_once_they_told_of_it():
    statuses = {at("a"): status(3, reduced=4), at("b"): status(3, reduced=4)}
    assert judge(statuses, record(3), {1: PLAN}, as_it_is).applied == 3
    told = judge(statuses, record(4), {1: PLAN}, as_it_is)
    assert (told.applied, told.catch_up) == (4, record(4))


def test_who_missed_a_step_holds_nothing_and_delays_nothing():
    statuses = {at("a"): status(5, adopted=2), at("c"): status(3, adopted=1, layers=(0, 1, 2, 3))}
    verdict = judge(statuses, record(5), {1: PLAN, 2: PLAN}, as_it_is)
    assert (verdict.applied, verdict.catch_up, verdict.adopted) == (5, None, 2)
    assert verdict.held == {at("a"): {0, 1}}


def test_layers_kept_for_others_do_not_count_with_a_worker_that_has_to_catch_up():
    kept = (0, 1, 2, 3, 4, 5)
    statuses = {at("a"): status(4, layers=kept), at("c"): status(3, reduced=4, layers=kept)}
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert verdict.held == {at("a"): frozenset(kept), at("c"): {0, 1, 2, 3}}


def partial(number: int, generation: int = 1) -> SectionRecord:
    return SectionRecord(step=4, generation=generation, number=number, loss=0.5)


def test_what_a_survivor_has_committed_counts_and_those_who_can_commit_it_too():
    statuses = {at("a"): status(partial=partial(2)), at("b"): status(partial=partial(1), section_reduced=2)}
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert (verdict.section, verdict.partial, verdict.is_section_behind) == ((1, 2), partial(2), True)
    assert set(verdict.held) == {at("a"), at("b")}


def test_a_section_that_only_the_dead_have_committed_does_not_count():
    statuses = {
        at("a"): status(partial=partial(1), section_reduced=2),
        at("b"): status(partial=partial(1), section_reduced=2),
    }
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert (verdict.section, verdict.is_section_behind) == ((1, 1), False)


def test_who_missed_a_section_holds_nothing():
    statuses = {at("a"): status(partial=partial(2)), at("b"): status(partial=partial(1))}
    assert set(judge(statuses, record(3), {1: PLAN}, as_it_is).held) == {at("a")}


def test_what_was_committed_before_a_plan_is_the_same_for_those_who_have_adopted_it_and_those_who_have_not():
    statuses = {at("a"): status(adopted=2), at("b"): status(partial=partial(3)), at("c"): status(partial=partial(2))}

    def section_of(generation: int, step: int, number: int) -> tuple[int, int]:
        assert step == 4
        return (generation, number) if number else (1, 3)

    verdict = judge(statuses, record(3), {1: PLAN, 2: PLAN}, section_of)
    assert verdict.section == (1, 3)
    assert set(verdict.held) == {at("a"), at("b")}
    assert verdict.adopted is None


def test_nothing_is_committed_of_a_step_that_somebody_has_still_to_begin():
    statuses = {at("a"): status(4), at("b"): status(3, reduced=4, partial=partial(2))}
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert (verdict.applied, verdict.section) == (4, (0, 0))
    assert set(verdict.held) == {at("a"), at("b")}


def test_layers_kept_for_others_do_not_count_with_a_worker_that_has_to_commit():
    kept = (0, 1, 2, 3, 4, 5)
    statuses = {at("a"): status(layers=kept, partial=partial(1)), at("c"): status(layers=kept, section_reduced=1)}
    verdict = judge(statuses, record(3), {1: PLAN}, as_it_is)
    assert verdict.held == {at("a"): frozenset(kept), at("c"): {0, 1, 2, 3}}


def test_spares_and_newcomers_are_ignored():
    statuses = {at("a"): status(3), at("s"): status(0, layers=(), adopted=0)}
    verdict = judge(statuses, None, {1: PLAN}, as_it_is)
    assert (verdict.applied, verdict.adopted, set(verdict.held)) == (3, 1, {at("a")})


def test_nobody_left_holds_nothing():
    verdict = judge({}, None, {}, as_it_is)
    assert (verdict.applied, verdict.catch_up, verdict.adopted, verdict.held) == (0, None, None, {})


def test_survivors_that_differ_have_no_plan_in_force():
    verdict = judge({at("a"): status(adopted=1), at("b"): status(adopted=2)}, None, {1: PLAN, 2: PLAN}, as_it_is)
    assert verdict.adopted is None


def test_a_pipeline_is_broken_by_any_of_its_nodes():
    assert broken_pipelines(PLAN, ["d", "s"]) == (1,)
    assert broken_pipelines(PLAN, []) == ()


def test_no_whole_pipeline_deals_nothing():
    assert reassign_microbatches(PLAN, ["a", "c", "e"], (), next_segment=0, shares=shares_of(PLAN)) is None


def test_nothing_left_over_is_no_segment():
    assert reassign_microbatches(PLAN, ["s"], (), next_segment=0, shares=shares_of(PLAN)) == ()


def test_shares_follow_the_planned_ones_and_ties_go_to_the_earlier():
    dealt = reassign_microbatches(PLAN, ["c"], (), next_segment=7, shares=shares_of(PLAN))
    assert dealt == (
        Segment(segment=7, pipeline=0, microbatches=(4, 5)),
        Segment(segment=8, pipeline=2, microbatches=(6, 7)),
    )


def test_segments_of_a_pipeline_that_broke_since_are_dealt_again_and_others_are_kept():
    first = reassign_microbatches(PLAN, ["c"], (), next_segment=0, shares=shares_of(PLAN))
    assert first is not None
    second = reassign_microbatches(PLAN, ["c", "e"], first, next_segment=2, shares=shares_of(PLAN))
    assert second is not None
    assert second[0] == first[0]
    assert second[1] == Segment(segment=2, pipeline=0, microbatches=(6, 7, 8, 9, 10, 11))


NODES = ("a", "b", "c", "d", "e", "f")


def test_what_is_committed_is_not_dealt_again():
    shares = ((2, 3, 4), (5, 6, 7), (8, 9, 10, 11))
    dealt = reassign_microbatches(PLAN, ["c"], (), next_segment=0, shares=shares, partial=(0, 1, 2, 5, 8))
    assert dealt is not None
    assert [each.microbatches for each in dealt] == [(6,), (7,)]


@given(losses=st.lists(st.lists(st.sampled_from(NODES), max_size=2), max_size=4), microbatches=st.integers(3, 20))
def test_every_microbatch_is_dealt_once_however_losses_follow_each_other(losses, microbatches):
    layout = plan(("a", "b"), ("c", "d"), ("e", "f"), microbatches=microbatches)
    lost: list[str] = []
    segments: tuple[Segment, ...] = ()
    number = 0
    for more in losses:
        lost += more
        dealt = reassign_microbatches(layout, lost, segments, next_segment=number, shares=shares_of(layout))
        if dealt is None:
            assert len(broken_pipelines(layout, lost)) == 3
            return
        whole = [index for index in range(3) if index not in broken_pipelines(layout, lost)]
        assert {segment for segment in segments if segment.pipeline in whole} <= set(dealt), "taken back"
        counted = [microbatch for segment in dealt for microbatch in segment.microbatches]
        counted += [microbatch for index in whole for microbatch in layout.microbatches_of(index)]
        assert sorted(counted) == list(range(microbatches))
        assert {segment.pipeline for segment in dealt} <= set(whole)
        assert len({segment.segment for segment in dealt}) == len(dealt)
        segments = dealt
        number = max([number, *(segment.segment + 1 for segment in dealt)])


def test_a_pipeline_has_left_what_its_slowest_worker_has():
    segments = (
        Segment(segment=0, pipeline=0, microbatches=(8, 9, 10)),
        Segment(segment=1, pipeline=1, microbatches=(11,)),
    )
    statuses = {at("a"): status(microbatches_done=2), at("b"): status(microbatches_done=4)}
    statuses |= {at("c"): status(microbatches_done=5), at("d"): status(microbatches_done=6)}
    assert rests_of(PLAN, ["e"], segments, statuses, step=4, shares=shares_of(PLAN)) == {0: (2, 3), 1: (0, 0)}


def test_who_has_still_to_apply_the_step_before_has_done_nothing_of_this_one():
    statuses = {at(node): status(microbatches_done=4) for node in NODES}
    statuses[at("d")] = status(applied=2, reduced=3, microbatches_done=4)
    rests = rests_of(PLAN, [], (), statuses, step=4, shares=shares_of(PLAN))
    assert rests == {0: (0, 0), 1: (4, 0), 2: (0, 0)}


@given(
    done=st.lists(st.integers(0, 24), min_size=6, max_size=6),
    lost=st.lists(st.sampled_from(NODES), max_size=4),
    microbatches=st.integers(3, 20),
)
def test_what_is_left_is_what_was_given_without_what_is_done(done, lost, microbatches):
    layout = plan(("a", "b"), ("c", "d"), ("e", "f"), microbatches=microbatches)
    segments = reassign_microbatches(layout, lost, (), next_segment=0, shares=shares_of(layout))
    statuses = {at(node): status(microbatches_done=done) for node, done in zip(NODES, done, strict=True)}
    rests = rests_of(layout, lost, segments or (), statuses, step=4, shares=shares_of(layout))
    assert sorted(rests) == [index for index in range(3) if index not in broken_pipelines(layout, lost)]
    for index, (own, others) in rests.items():
        pipeline = layout.pipelines[index]
        assert 0 <= own <= pipeline.num_microbatches
        given_to_it = sum(len(each.microbatches) for each in segments or () if each.pipeline == index)
        slowest = min(statuses[worker_id].microbatches_done for worker_id in pipeline.worker_ids)
        assert own + others == max(0, pipeline.num_microbatches + given_to_it - slowest)
        assert not own or others == given_to_it, "segments come after all others"


def test_what_broken_pipelines_had_done_is_what_their_furthest_survivor_knows():
    statuses = {at("c"): status(microbatches_done=3), at("a"): status(microbatches_done=4)}
    assert microbatches_redone(PLAN, ["d", "e", "f"], statuses, shares=shares_of(PLAN)) == 3


def test_what_broken_pipelines_had_committed_is_not_done_again():
    statuses = {at("c"): status(microbatches_done=3)}
    shares = ((0, 1), (2, 3, 4, 5), (6, 7))
    assert microbatches_redone(PLAN, ["d"], statuses, shares=shares, partial=(0, 2, 3)) == 1
    assert microbatches_redone(PLAN, ["d"], statuses, shares=shares, partial=(2, 3, 4, 5)) == 0


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 10.0),
        ([(0.0, 3.0), (2.0, 5.0)], 5.0),
        ([(-5.0, -1.0)], 10.0),
        ([(12.0, 13.0)], 10.0),
        ([(-1.0, 20.0)], 0.0),
        ([(1.0, 9.0), (2.0, 3.0)], 2.0),
    ],
)
def test_uncovered_time(intervals, expected):
    assert uncovered(0.0, 10.0, intervals) == expected


@pytest.mark.parametrize(
    ("gap", "expected"),
    [
        ((0.0, 0.0), ((2.0, 10.0),)),
        ((3.0, 5.0), ((2.0, 3.0), (5.0, 10.0))),
        ((1.0, 5.0), ((5.0, 10.0),)),
        ((5.0, 12.0), ((2.0, 5.0),)),
        ((1.0, 12.0), ()),
        ((11.0, 12.0), ((2.0, 10.0),)),
    ],
)
def test_an_interval_without_a_gap(gap, expected):
    assert without((2.0, 10.0), gap) == expected


def test_plans_compare_by_value():
    assert isinstance(PLAN, ExecutionPlan)
    assert plan(("a", "b")) == plan(("a", "b"))
