"""What the coordinator makes of evaluations: no step is to be expected meanwhile, and each is told once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import Record, Turn
from oobleck.control.journal import Evaluated, NodeLost, PlanAdopted, PlanCause, RecoveryStarted
from oobleck.control.protocol import Evaluating, EvaluationDone, PlanUpdate
from oobleck.control.steps.progress import Progress
from tests.control.bench import Bench, record
from tests.control.journals import replay_run
from tests.control.model import Shape

NODES = ("n0", "n1", "n2")


def training(*, eval_steps: int | None = None) -> Bench:
    shape = Shape(num_nodes=3, num_pipelines=3)
    bench = Bench(shape, job=replace(shape.job, eval_steps=eval_steps, max_steps=9))
    bench.prepare()
    return bench


def done(step: int, loss: float = 2.0) -> EvaluationDone:
    return EvaluationDone(device=0, step=step, loss=loss, num_samples=8, duration_s=0.5)


def test_an_evaluation_that_goes_on_is_no_hang_and_one_that_says_nothing_is():
    bench = training()
    bench.commit("n0", 1)
    for _ in range(5):
        bench.beat_until(bench.now_s + 9.0, *NODES)
        bench.say("n1", Evaluating(device=0, step=1))
    assert not bench.journal(RecoveryStarted)
    bench.say("n0", done(1))
    bench.beat_until(bench.now_s + 9.9, *NODES)
    assert not bench.journal(RecoveryStarted)
    bench.beat_until(bench.now_s + 5.0, *NODES)
    assert bench.journal(RecoveryStarted)[0].cause is PlanCause.HANG


def test_an_evaluation_is_told_once_by_whichever_pipeline_tells_it_first():
    bench = training()
    bench.commit("n0", 3)
    bench.say("n1", done(3))
    bench.say("n0", done(3))
    bench.say("n2", done(6, loss=1.5))
    assert [(entry.step, entry.loss) for entry in bench.journal(Evaluated)] == [(3, 2.0), (6, 1.5)]


def test_one_that_is_told_during_a_recovery_counts_and_prolongs_nothing():
    bench = training()
    bench.commit("n0", 3)
    bench.fail("n2")
    before_s = bench.coordinator.next_deadline()
    bench.say("n0", done(3))
    assert [entry.step for entry in bench.journal(Evaluated)] == [3]
    assert bench.coordinator.next_deadline() == before_s


def test_words_about_a_device_that_a_node_does_not_have_cost_it():
    bench = training()
    bench.say("n1", Evaluating(device=5, step=1))
    assert [entry.node for entry in bench.journal(NodeLost)] == ["n1"]


def plan_after_a_loss(bench: Bench, applied: int) -> PlanUpdate:
    """What is ordered once n2 is lost and the others have told that this step is their last."""
    bench.commit("n0", applied)
    bench.fail("n2")
    bench.wait(0.1)
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, applied=applied, last_record=record(applied), layers=(0, 1, 2, 3))
    bench.wait(0.1)
    return bench.updates[-1]


@pytest.mark.parametrize(("applied", "finish"), [(1, 2), (2, None), (3, 4)])
def test_a_plan_takes_effect_where_an_evaluation_was_broken_off(applied: int, finish: int | None):
    """It begins with the evaluation there; a step that follows no evaluation is finished as ever."""
    update = plan_after_a_loss(training(eval_steps=2), applied)
    assert (update.finish, update.boundary) == (finish, finish or applied)


def test_an_evaluation_that_is_told_is_not_made_again():
    bench = training(eval_steps=2)
    bench.say("n1", done(2))
    assert plan_after_a_loss(bench, 2).finish == 3


def test_a_new_master_knows_what_was_evaluated_and_what_was_forgotten_with_a_checkpoint():
    bench = training(eval_steps=3)
    bench.commit("n0", 6)
    bench.say("n0", done(3), done(6))
    entries = bench.entries(bench.commands)
    replayed = replay_run(entries)
    assert replayed is not None
    assert replayed.evaluated_step == 6
    adopted = next(entry for entry in entries if isinstance(entry, PlanAdopted))
    replayed = replay_run([*entries, replace(adopted, generation=2, restored="step-4", restored_step=4)])
    assert replayed is not None
    assert replayed.evaluated_step == 4


def test_what_is_evaluated_again_after_going_back_is_told_again():
    progress = Progress(Shape(num_nodes=3).job)
    turn = Turn(0.0)
    progress.evaluate(turn, done(3))
    progress.evaluate(turn, done(6))
    progress.go_back(4, generation=2)
    progress.evaluate(turn, done(3))
    progress.evaluate(turn, done(6, loss=1.0))
    entries = [record.entry for record in turn.commands if isinstance(record, Record)]
    assert [(entry.step, entry.loss) for entry in entries if isinstance(entry, Evaluated)] == [
        (3, 2.0),
        (6, 2.0),
        (6, 1.0),
    ]
