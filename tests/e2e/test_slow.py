"""A slow node: it gets less to do, in microbatches or in layers, and the losses stay what they were."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from oobleck.control.journal import PlanAdopted
from oobleck.planner import ExecutionPlan
from oobleck.runtime.journals import read_journal

from .elastic import ENDLESS, TOLERANCE, Reference, each_loss
from .harness import GPT2, TAG, Outcome, Runner, oobleck, worker_pids

PERIOD_S = 0.05


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
