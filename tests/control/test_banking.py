"""What a plan in the middle of a step takes over: sections that are banked are run once."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.commit.judgement import NOTHING_BANKED
from oobleck.control.commit.sections import shares_of
from oobleck.control.coordinator.replayed_run import replay_run
from oobleck.control.journal import PlanAdopted, RecoveryDone
from oobleck.control.protocol import NOTHING, Banked, BankRecord
from tests.control.coordinator.test_coordinator import LONG, answer_all, held, training

SECTIONS = replace(LONG, reductions=8)


def banked(number: int, *, generation: int = 1) -> BankRecord:
    return BankRecord(step=1, generation=generation, number=number, loss=0.25 * number)


def test_what_is_banked_of_a_step_is_not_run_again():
    bench = training(SECTIONS)
    first = bench.orders[0]
    lost, *others = sorted(first.plan.nodes)
    bench.fail(lost)
    answer_all(bench, *others, microbatches_done=14, banked=banked(5))
    bench.resume(*others)
    order = bench.orders[-1]
    done = (*range(12), *range(20, 32))
    assert order.banked == Banked(microbatches=done, loss=1.25, generation=1, number=5)
    assert (order.finish, order.boundary, order.initial, order.catch_up_bank) == (None, 0, False, None)
    adopted = bench.journal(PlanAdopted)[-1]
    assert "24 of 40 microbatches of step 1 are banked, the others are run again" in adopted.reason
    assert (adopted.banked, adopted.num_sections) == (order.banked, order.num_sections)
    assert bench.journal(RecoveryDone)[-1].microbatches_redone == 2 + 2


def test_who_holds_the_sums_of_a_section_that_others_have_banked_banks_it_by_order():
    bench = training(SECTIONS)
    lost, behind, *others = sorted(bench.orders[0].plan.nodes)
    bench.fail(lost)
    bench.answer(behind, adopted=1, layers=held(bench, behind), banked=banked(4), bank_reduced=5)
    answer_all(bench, *others, banked=banked(5))
    order = bench.orders[-1]
    assert order.catch_up_bank == banked(5)
    assert len(order.banked.microbatches) == 24


def test_what_is_banked_is_not_dealt_where_the_step_is_finished():
    bench = training(SECTIONS)
    plan = bench.orders[0].plan
    lost = plan.pipelines[1].nodes[0]
    bench.fail(lost)
    answer_all(bench, *(node for node in sorted(plan.nodes) if node != lost), microbatches_done=20, banked=banked(7))
    order = bench.orders[-1]
    assert (order.finish, order.banked) == (1, NOTHING)
    dealt = [microbatch for segment in order.segments for microbatch in segment.microbatches]
    assert dealt == [37, 38, 39]


def test_a_plan_in_the_middle_of_a_step_is_followed_by_others_in_the_same_step():
    bench = training(replace(SECTIONS, num_nodes=6))
    first = bench.orders[0]
    one, two, *others = sorted(first.plan.nodes)
    bench.fail(one)
    answer_all(bench, two, *others, microbatches_done=3, banked=banked(3))
    second = bench.orders[-1]
    assert second.banked.microbatches
    bench.resume(two, *others)
    bench.fail(two)
    for node in others:
        layers = next(
            tuple(sorted(held)) for worker_id, held in second.plan.layers_at.items() if worker_id.node == node
        )
        bench.answer(node, adopted=second.generation, layers=layers, banked=banked(1, generation=second.generation))
    bench.wait(0.01)
    third = bench.orders[-1]
    assert set(second.banked.microbatches) < set(third.banked.microbatches)
    assert (third.banked.generation, third.banked.number) == (second.generation, 1)


def test_a_master_that_takes_over_in_the_middle_of_a_step_knows_what_is_banked():
    bench = training(SECTIONS)
    lost, *others = sorted(bench.orders[0].plan.nodes)
    bench.fail(lost)
    answer_all(bench, *others, microbatches_done=14, banked=banked(5))
    order = bench.orders[-1]
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    assert replayed.generations.bank_of(order.generation, 1, 0) == (1, 5)
    assert replayed.generations.bank_of(order.generation, 2, 0) == NOTHING_BANKED
    assert replayed.generations.shares(order.generation, 1) == shares_of(order.plan, order.banked.microbatches)
