"""What a plan in the middle of a step takes over: sections that are committed are run once."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.journal import PlanAdopted, RecoveryDone
from oobleck.control.plans.sections import shares_of
from oobleck.control.protocol import NOTHING, PartialStep, SectionRecord
from oobleck.control.steps.judgement import NO_SECTION
from tests.control.journals import replay_run
from tests.control.training.test_coordinator import LONG, answer_all, held, training

SECTIONS = replace(LONG, reductions=8)


def partial(number: int, *, generation: int = 1) -> SectionRecord:
    return SectionRecord(step=1, generation=generation, number=number, loss=0.25 * number, num_items=7 * number)


def test_what_is_committed_of_a_step_is_not_run_again():
    bench = training(SECTIONS)
    first = bench.updates[0]
    lost, *others = sorted(first.plan.nodes)
    bench.fail(lost)
    answer_all(bench, *others, microbatches_done=14, partial=partial(5))
    bench.resume(*others)
    update = bench.updates[-1]
    done = (*range(12), *range(20, 32))
    assert update.partial == PartialStep(microbatches=done, loss=1.25, num_items=35, generation=1, number=5)
    assert (update.finish, update.boundary, update.initial, update.catch_up_section) == (None, 0, False, None)
    adopted = bench.journal(PlanAdopted)[-1]
    assert "24 of 40 microbatches" in adopted.reason
    assert (adopted.partial, adopted.num_sections) == (update.partial, update.num_sections)
    assert bench.journal(RecoveryDone)[-1].microbatches_redone == 2 + 2


def test_who_holds_the_sums_of_a_section_that_others_have_committed_commits_it_by_order():
    bench = training(SECTIONS)
    lost, behind, *others = sorted(bench.updates[0].plan.nodes)
    bench.fail(lost)
    bench.answer(behind, adopted=1, layers=held(bench, behind), partial=partial(4), section_reduced=5)
    answer_all(bench, *others, partial=partial(5))
    update = bench.updates[-1]
    assert update.catch_up_section == partial(5)
    assert len(update.partial.microbatches) == 24


def test_what_is_committed_is_not_dealt_where_the_step_is_finished():
    bench = training(SECTIONS)
    plan = bench.updates[0].plan
    lost = plan.pipelines[1].nodes[0]
    bench.fail(lost)
    answer_all(bench, *(node for node in sorted(plan.nodes) if node != lost), microbatches_done=20, partial=partial(7))
    update = bench.updates[-1]
    assert (update.finish, update.partial) == (1, NOTHING)
    dealt = [microbatch for segment in update.segments for microbatch in segment.microbatches]
    assert dealt == [37, 38, 39]


def test_a_plan_in_the_middle_of_a_step_is_followed_by_others_in_the_same_step():
    bench = training(replace(SECTIONS, num_nodes=6))
    first = bench.updates[0]
    one, two, *others = sorted(first.plan.nodes)
    bench.fail(one)
    answer_all(bench, two, *others, microbatches_done=3, partial=partial(3))
    second = bench.updates[-1]
    assert second.partial.microbatches
    bench.resume(two, *others)
    bench.fail(two)
    for node in others:
        layers = next(
            tuple(sorted(held)) for worker_id, held in second.plan.layers_at.items() if worker_id.node == node
        )
        bench.answer(node, adopted=second.generation, layers=layers, partial=partial(1, generation=second.generation))
    bench.wait(0.01)
    third = bench.updates[-1]
    assert set(second.partial.microbatches) < set(third.partial.microbatches)
    assert (third.partial.generation, third.partial.number) == (second.generation, 1)


def test_a_master_that_takes_over_in_the_middle_of_a_step_knows_what_is_committed():
    bench = training(SECTIONS)
    lost, *others = sorted(bench.updates[0].plan.nodes)
    bench.fail(lost)
    answer_all(bench, *others, microbatches_done=14, partial=partial(5))
    update = bench.updates[-1]
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    assert replayed.generations.section_of(update.generation, 1, 0) == (1, 5)
    assert replayed.generations.section_of(update.generation, 2, 0) == NO_SECTION
    assert replayed.generations.shares(update.generation, 1) == shares_of(update.plan, update.partial.microbatches)
