"""What the coordinator makes of evaluations: no step is to be expected meanwhile, and each is told once."""

from __future__ import annotations

from oobleck.control.journal import Cause, Evaluated, NodeLost, RecoveryStarted
from oobleck.control.messages import Evaluating, EvaluationDone
from tests.control.bench import Bench
from tests.control.model import Shape

NODES = ("n0", "n1", "n2")


def training() -> Bench:
    bench = Bench(Shape(num_nodes=3, num_pipelines=3))
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
    assert bench.journal(RecoveryStarted)[0].cause is Cause.HANG


def test_an_evaluation_is_told_once_by_whichever_pipeline_tells_it_first():
    bench = training()
    bench.commit("n0", 3)
    bench.say("n1", done(3))
    bench.say("n0", done(3))
    bench.say("n2", done(6, loss=1.5))
    assert [(entry.step, entry.loss) for entry in bench.journal(Evaluated)] == [(3, 2.0), (6, 1.5)]
    assert bench.journal(Evaluated)[0].describe() == "evaluation after step 3: loss 2.0000 (8 samples)"


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
