"""The master is killed: training goes on without one, and another takes over."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.wiring.past import advance_image

from .elastic import TOLERANCE
from .harness import Runner, incidents, oobleck, started_at, worker_pids
from .reference import reference_losses

STEPS = 60
AWAY_S = 3.0
"""How long there is no master."""


def options(runner: Runner) -> tuple[str, ...]:
    return ("--job", str(runner.job_file()), "--steps", str(STEPS))


def references(runner: Runner) -> list[float]:
    path = runner.job_file()
    job = replace(load_job(path.read_text(), source=str(path)), max_steps=STEPS)
    return reference_losses(job, runner.directory / "cache")


def entries(runner: Runner, kind: str) -> list[dict]:
    return [entry for entry in runner.journal() if entry["@type"] == kind]


def test_training_goes_on_without_a_master_and_another_takes_over(runner: Runner) -> None:
    with runner.up(*options(runner)) as first:
        first.wait_for_step(8)
        workers = worker_pids(runner)
        births = {node: started_at(pid) for node, pid in workers.items()}
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        asked = oobleck("status", "--base-dir", str(runner.base_dir))
        assert "run e2e has no master" in asked.stderr
        assert "its nodes (node0, node1, node2, node3) continue for up to" in asked.stderr
        assert f"oobleck up --local 4 --base-dir {runner.base_dir}" in asked.stderr
        time.sleep(AWAY_S)
        with runner.up(*options(runner)) as second:
            outcome = second.finish()
    assert outcome.exit_code == 0, outcome.output
    assert len(entries(runner, "MasterResumed")) == 1
    assert [incident["root"]["failure"] for incident in incidents(runner)] == ["master_lost"]
    assert f"] step {STEPS}/{STEPS}: loss" in outcome.output
    assert "/0: loss" not in outcome.output, "the second master says how many steps there are to be"
    assert outcome.summary["steps_committed"] == STEPS
    assert outcome.summary["steps_lost"] == outcome.summary["samples_repeated"] == 0
    assert outcome.recoveries == []
    assert worker_pids(runner) == workers
    assert None not in births.values()
    gaps = [abs(one - other) for one, other in zip(outcome.losses, references(runner), strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    durations = [entry["record"]["duration_s"] for entry in entries(runner, "StepDone")]
    assert max(durations) < AWAY_S, "somebody waited for a master"
    assert runner.left_over() == []
    page = Path(__file__).parents[2].joinpath("docs", "jobs.md").read_text(encoding="utf-8")
    names = {re.sub(r"agent\d+", "agent<index>", path.name) for path in (runner.base_dir / "e2e").iterdir()}
    names = {name for name in names if not re.search(r"\.\d+\.jsonl", name)}  # set aside by earlier runs
    assert [name for name in sorted(names) if f"`<tag>/{name}" not in page] == [], "each file is documented"


@pytest.mark.slow
def test_a_node_that_dies_with_the_master_is_met_by_the_next_one(runner: Runner) -> None:
    """By one that has read an image of the journal, and little more."""
    with runner.up(*options(runner)) as first:
        first.wait_for_step(8)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        runner.signal("node3")
        path = runner.base_dir / "e2e" / "journal.jsonl"
        advance_image(path)  # as is done every few megabytes
        assert runner.base_dir.joinpath("e2e", ".journal.jsonl.image").exists()
        with runner.up(*options(runner)) as second:
            outcome = second.finish()
    assert outcome.exit_code == 0, outcome.output
    assert [lost["node"] for lost in entries(runner, "NodeLost")] == ["node3"]
    assert outcome.summary["steps_committed"] == STEPS
    gaps = [abs(one - other) for one, other in zip(outcome.losses, references(runner), strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    assert runner.left_over() == []


def test_another_job_does_not_take_over(runner: Runner) -> None:
    with runner.up(*options(runner)) as first:
        first.wait_for_step(4)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        with runner.up(*options(runner), "--set", "optimizer.learning_rate=0.1") as other:
            refused = other.finish()
        assert refused.exit_code == 2, refused.output
        assert "optimizer.learning_rate" in refused.output
        with runner.up(*options(runner), nodes=("--local", "3")) as fewer:
            refused = fewer.finish()
        assert refused.exit_code == 2, refused.output
        assert "--local: the run e2e continues without its master" in refused.output
        with runner.up(*options(runner), "--resume", "never", "--set", "seed=3") as fresh:
            fresh.wait_for_step(2)
            assert entries(runner, "MasterResumed") == []
            oobleck("stop", "e2e", "--base-dir", str(runner.base_dir))
            fresh.finish()
    assert runner.left_over() == []
