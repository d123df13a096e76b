"""A slow node: it gets less to do, in microbatches or in layers, and the losses stay what they were."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import pytest

from oobleck.control.journal import JournalEntry, PlanAdopted, ProfileKnown, StepDone
from oobleck.planner import ExecutionPlan, Profile, profile_from_json, with_speed
from oobleck.runtime.journals import read_journal
from oobleck.schedule.forecast import forecast

from .elastic import ENDLESS, TOLERANCE, Reference, each_loss
from .harness import GPT2, TAG, Outcome, Runner, oobleck, worker_pids

PERIOD_S = 0.05
FACTOR, NUM_LAYERS = 2.0, 12
WAITING = ("global_batch_size=32", "torch_threads=1", "checkpoint.enabled=false")


@contextmanager
def slowed(pid: int, factor: float) -> Iterator[None]:
    """Stop and continue a process over and over, so that it takes up to `factor` times as long."""
    done = threading.Event()

    def pulse() -> None:
        with suppress(ProcessLookupError):
            while not done.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(PERIOD_S * (1 - 1 / factor))
                os.kill(pid, signal.SIGCONT)
                time.sleep(PERIOD_S / factor)

    pulsing = threading.Thread(target=pulse)
    pulsing.start()
    try:
        yield
    finally:
        done.set()
        pulsing.join()


def run_with_a_slow_node(
    runner: Runner, path: Path, reference: Reference, factor: float, *options: str
) -> list[ExecutionPlan]:
    """Train until node1 has been slow for some time and planned for; returns the plans."""
    with runner.up("--job", str(path), "--steps", str(ENDLESS), *options) as up:
        up.wait_for_step(3)
        with slowed(worker_pids(runner)["node1"], factor):
            up.wait_for("for the pace of node1")
            up.wait_for_steps(5)
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    changed = next(entry for entry in runner.journal() if entry["@type"] == "PaceChanged")
    assert changed["node"] == "node1"
    assert changed["factor"] > 1.25
    assert "node1" in {node for recovery in outcome.summary["recoveries"] for node in recovery["nodes"]}
    assert_as_in_one_process(outcome, reference)
    assert runner.left_over() == []
    journal = read_journal(runner.base_dir / TAG / "journal.jsonl")
    return [entry.plan for entry in journal if isinstance(entry, PlanAdopted)]


def assert_as_in_one_process(outcome: Outcome, reference: Reference) -> None:
    assert outcome.summary["steps_lost"] == 0
    assert len(outcome.losses) == outcome.summary["steps_committed"]
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference(len(outcome.losses)), strict=True)]
    assert max(gaps) < TOLERANCE, gaps


def work_of(plan: ExecutionPlan, node: str) -> int:
    """Layers times microbatches of a node with one device."""
    return sum(
        len(stage.layers) * pipeline.num_microbatches
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if stage.worker_ids[0].node == node
    )


@pytest.mark.slow  # tests/control/speed has the paces, tests/planner the plans
def test_a_slow_node_is_planned_for(runner: Runner, endless_reference: Reference) -> None:
    before, after, *_ = run_with_a_slow_node(runner, runner.job_file(), endless_reference, 5.0)
    assert work_of(after, "node1") < work_of(before, "node1")


@pytest.mark.slow
def test_a_slow_nodes_stage_is_cut_again_where_there_is_no_other_pipeline(runner: Runner) -> None:
    path = runner.job_file(GPT2.replace("n_layer: 4", "n_layer: 14"))
    reference = each_loss(path, runner.directory / "cache")
    before, after, *_ = run_with_a_slow_node(runner, path, reference, 2.0, "--pipelines", "1", "-f", "0")
    assert [len(plan.pipelines[0].nodes) for plan in (before, after)] == [4, 4], "nobody is left out"
    assert 0 < work_of(after, "node1") < work_of(before, "node1")


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("place", range(4))
def test_a_slow_nodes_new_plan_takes_what_is_predicted_wherever_it_was(runner: Runner, place: int) -> None:
    """Slowed by two in each place of a pipeline of four; layers wait instead of computing.

    Steps with the node in its old place, and those under the new plan, take what the timelines say, to within a tenth.
    """
    slow = runner.directory / f"slow{place}"
    slow.mkdir()
    settings = [word for key in WAITING for word in ("--set", key)]
    arguments = ("--", str(NUM_LAYERS), str(slow))
    options = ("--tag", TAG, "--steps", str(ENDLESS), "--pipelines", "1", "-f", "0", *settings, *arguments)
    nodes = ("--local", "4", str(Path(__file__).with_name("waiting_job.py")))
    with runner.up(*options, nodes=nodes) as up:
        up.wait_for_step(3)
        (first, *_) = plans_of(runner)
        victim = first.plan.pipelines[0].nodes[place]
        (slow / victim).write_text(str(FACTOR))
        up.wait_for(f"for the pace of {victim}")
        up.wait_for_steps(6)
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    journal = list(read_journal(runner.base_dir / TAG / "journal.jsonl"))
    first, *_, last = [entry for entry in journal if isinstance(entry, PlanAdopted)]
    (known, *_) = [entry for entry in journal if isinstance(entry, ProfileKnown)]
    slowed_s = exact_s(profile_from_json(known.profile_json), first.plan, victim)
    # The first step after a change is partly of what was before.
    before_s, after_s = (median(seconds[1:]) for seconds in (slow_steps(journal, 1, slowed_s), steps_s(journal, last)))
    print(
        f"place {place}: before {before_s:.2f} s ({slowed_s:.2f}), after {after_s:.2f} s ({last.predicted_step_s:.2f})"
    )
    assert after_s == pytest.approx(last.predicted_step_s, rel=0.1)
    assert before_s / after_s == pytest.approx(slowed_s / last.predicted_step_s, rel=0.1)
    assert slowed_s / last.predicted_step_s > 1.2, "a new plan is worth it"


def plans_of(runner: Runner) -> list[PlanAdopted]:
    journal = read_journal(runner.base_dir / TAG / "journal.jsonl")
    return [entry for entry in journal if isinstance(entry, PlanAdopted)]


def exact_s(profile: Profile, plan: ExecutionPlan, victim: str) -> float:
    """The event-exact seconds of a step in which one node is slow."""
    slow = with_speed(profile, 1 / FACTOR)
    return forecast(profile, plan, profile_of=lambda node: slow if node == victim else profile).step_s


def steps_s(journal: Sequence[JournalEntry], adopted: PlanAdopted) -> list[float]:
    steps = [entry.record for entry in journal if isinstance(entry, StepDone)]
    return [record.duration_s for record in steps if record.generation == adopted.generation]


def slow_steps(journal: Sequence[JournalEntry], generation: int, slowed_s: float) -> list[float]:
    """The seconds of the steps under the first plan from when the node is slow."""
    steps = [entry.record for entry in journal if isinstance(entry, StepDone)]
    usual_s = min(record.duration_s for record in steps)
    limit_s = (usual_s + slowed_s) / 2
    return [each.duration_s for each in steps if each.generation == generation and each.duration_s > limit_s]
