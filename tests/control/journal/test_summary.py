from __future__ import annotations

import json
import math
import tracemalloc

import pytest

from oobleck.control.journal import Evaluated, JobEnded
from oobleck.control.journal.summary import EvaluationSummary, RunAccount, StepTime, summarize
from tests.control.journals import adopted, committed, job_started, plan, recovered, run_with_a_loss

NODES = ("node0", "node1", "node2", "node3")
TWO = plan(("node0", "node1"), ("node2", "node3"))

SCHEMA = {
    "steps_committed", "samples_committed", "steps_lost", "samples_repeated", "samples_missing", "losses",
    "tokens_per_s", "step_time_s", "goodput", "downtime_s", "elapsed_s", "generations", "recoveries", "seed", "plan",
    "node_hours",
}  # fmt: skip


def test_a_run_with_a_loss_in_numbers():
    summary = summarize(run_with_a_loss())
    assert (summary.steps_committed, summary.samples_committed) == (120, 1920)
    assert (summary.steps_lost, summary.samples_repeated, summary.samples_missing) == (0, 0, 0)
    assert len(summary.losses) == 120
    assert summary.losses[-1] == 8.0 / (1 + 120 / 50)
    assert summary.generations == 2
    assert summary.exit_code == 0
    assert summary.step_time_s == StepTime(median=0.5, p95=0.5)
    # 120 steps of 2048 tokens in 60 s and the 0.4 s that the loss cost
    assert summary.tokens_per_s == pytest.approx(120 * 2048 / 60.4)


def test_goodput_and_downtime_sum_to_the_elapsed_time():
    summary = summarize(run_with_a_loss())
    useful_s = summary.goodput * summary.elapsed_s
    assert useful_s + sum(summary.downtime_s.values()) == pytest.approx(summary.elapsed_s)
    assert set(summary.downtime_s) == {
        "starting", "redone", "reconfiguring", "degraded", "idle", "checkpoint", "stopping"
    }  # fmt: skip


def test_a_recovery_tells_when_it_was_noticed_and_what_it_cost():
    (recovery,) = summarize(run_with_a_loss(lost_at=40)).recoveries
    assert recovery.t_s == pytest.approx(5.0 + 41 * 0.5 - 0.3)
    assert (recovery.cause, recovery.action, recovery.nodes) == ("connection_lost", "reinstantiate", ("node3",))
    assert (recovery.bytes_moved, recovery.microbatches_redone, recovery.stall_s) == (28_000_000, 4, 0.05)


def test_a_gap_in_the_steps_is_missing_samples():
    entries = [job_started(NODES, global_batch_size=16), committed(1.0, 1), committed(2.0, 2), committed(5.0, 5)]
    assert summarize(entries).samples_missing == 32
    assert summarize(entries).steps_committed == 3


def test_a_run_whose_first_steps_never_appear_misses_them():
    assert summarize([job_started(NODES, global_batch_size=16), committed(1.0, 3)]).samples_missing == 32


def test_what_the_records_say_is_summed():
    entries = [
        job_started(NODES),
        committed(1.0, 1, samples_repeated=2),
        committed(2.0, 2, samples_missing=3, num_samples=13),
        committed(3.0, 3, samples_repeated=1),
    ]
    summary = summarize(entries)
    assert (summary.samples_repeated, summary.samples_missing, summary.samples_committed) == (3, 3, 45)


def test_a_step_run_again_is_lost_once_and_counted_once():
    entries = [job_started(NODES), *(committed(float(i), step) for i, step in enumerate((1, 2, 3, 2, 3, 4), start=1))]
    summary = summarize(entries)
    assert (summary.steps_committed, summary.steps_lost, summary.samples_missing) == (4, 2, 0)
    assert summary.downtime_s["redone"] == 2.0


def test_steps_lost_and_not_yet_run_again_are_counted():
    entries = [job_started(NODES), committed(1.0, 1), recovered(2.0, 2, "node3", steps_lost=4)]
    assert summarize(entries).steps_lost == 4


def test_the_newest_commit_of_a_step_gives_its_loss():
    entries = [job_started(NODES), committed(1.0, 1, loss=5.0), committed(2.0, 1, loss=4.0)]
    assert summarize(entries).losses == (4.0,)


def test_evaluations_are_told_once_for_each_step_and_forgotten_with_the_steps_that_are_run_again():
    def evaluated(step: int, loss: float) -> Evaluated:
        return Evaluated(t_s=float(step), step=step, loss=loss, num_samples=8, duration_s=0.1)

    entries = [job_started(NODES), evaluated(10, 5.0), evaluated(20, 4.0), evaluated(20, 4.5), evaluated(30, 4.0)]
    assert [each.loss for each in summarize(entries).evaluations] == [5.0, 4.5, 4.0]
    entries.append(adopted(40.0, 2, TWO, restored_step=20))
    told = summarize(entries).evaluations
    assert told == (EvaluationSummary(step=10, loss=5.0), EvaluationSummary(step=20, loss=4.5))


def test_the_95th_percentile_is_a_time_that_a_step_took():
    entries = [job_started(NODES), *(committed(float(i), i, duration_s=i / 10) for i in range(1, 21))]
    assert summarize(entries).step_time_s == StepTime(median=1.05, p95=1.9)


def test_json_has_the_schema_and_the_plan():
    entries = [job_started(NODES, seed=7), adopted(1.0, 1, TWO), committed(2.0, 1)]
    written = json.loads(summarize(entries).to_json())
    assert set(written) >= SCHEMA
    assert written["seed"] == 7
    assert written["plan"]["pipelines"][1]["stages"][0] == {
        "node": "node2", "devices": [0], "first_layer": 0, "stop_layer": 4
    }  # fmt: skip
    assert written["step_time_s"] == {"median": 0.5, "p95": 0.5}


def test_json_stays_json_when_the_loss_is_no_number():
    entries = [job_started(NODES), committed(1.0, 1, loss=math.nan), committed(2.0, 2, loss=math.inf)]
    assert json.loads(summarize(entries).to_json())["losses"] == [None, None]


@pytest.mark.parametrize("length", range(15))
def test_a_journal_cut_off_anywhere_can_be_summed_up(length):
    entries = list(run_with_a_loss())[:length]
    summary = summarize(entries)
    assert summary.exit_code is None
    assert summary.goodput * summary.elapsed_s + sum(summary.downtime_s.values()) == pytest.approx(summary.elapsed_s)
    json.loads(summary.to_json())


def test_a_run_that_fails_before_its_first_step():
    summary = summarize([job_started(NODES), JobEnded(t_s=2.0, exit_code=1, reason="no node answers")])
    assert (summary.exit_code, summary.reason, summary.steps_committed) == (1, "no node answers", 0)
    assert summary.tokens_per_s is None
    assert summary.step_time_s is None
    assert summary.downtime_s["starting"] == 2.0


def test_of_a_step_no_more_than_its_numbers_is_kept():
    account, num_steps = RunAccount(), 4000
    account.apply(job_started(("node0",), max_steps=num_steps))
    account.apply(adopted(0.5, 1, plan(("node0",))))
    tracemalloc.start()
    try:
        for step in range(1, num_steps + 1):
            account.apply(committed(float(step), step))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 160 * num_steps  # an entry alone has more than 400
    assert account.summary().steps_committed == num_steps
