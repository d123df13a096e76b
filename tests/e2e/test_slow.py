"""A slow node: its pipeline gets fewer microbatches, and the losses stay what they were."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from oobleck.cli.inputs.job_file import load_job

from .elastic import TOLERANCE
from .harness import TAG, Runner, oobleck, worker_pids
from .reference import each_reference_loss

STEPS = 5000
"""More than are run: the test stops once it has seen enough."""
RUNNING_S, STOPPED_S = 0.01, 0.04
"""A worker that is let run a fifth of the time takes up to five times as long."""


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Stop and continue a process over and over."""
    done = threading.Event()

    def pulse() -> None:
        with suppress(ProcessLookupError):
            while not done.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                os.kill(pid, signal.SIGCONT)
                time.sleep(RUNNING_S)

    pulsing = threading.Thread(target=pulse)
    pulsing.start()
    try:
        yield
    finally:
        done.set()
        pulsing.join()


def test_a_slow_node_is_planned_for(runner: Runner) -> None:
    path = runner.job_file()
    with runner.up("--job", str(path), "--steps", str(STEPS)) as up:
        up.wait_for_step(3)
        with slowed(worker_pids(runner)["node1"]):
            up.wait_for("for the pace of node1")
            up.wait_for_steps(5)
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    changed = next(entry for entry in runner.journal() if entry["@type"] == "PaceChanged")
    assert changed["node"] == "node1"
    assert changed["factor"] > 1.25
    adopted = [entry for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
    shares = {
        node: pipeline["num_microbatches"] for pipeline in adopted[1]["plan"]["pipelines"] for node in pipeline["nodes"]
    }
    assert shares.get("node1", 0) < max(shares.values()), shares
    assert "node1" in {node for recovery in outcome.summary["recoveries"] for node in recovery["nodes"]}
    assert outcome.summary["steps_lost"] == 0
    job = load_job(path.read_text(), source=str(path))
    references = each_reference_loss(replace(job, max_steps=STEPS), runner.directory / "cache")
    gaps = [abs(one - other) for one, other in zip(outcome.losses, references, strict=False)]
    assert len(gaps) == outcome.summary["steps_committed"]
    assert max(gaps) < TOLERANCE, gaps
    assert runner.left_over() == []
