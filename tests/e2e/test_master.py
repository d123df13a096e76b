"""The master is killed: training goes on without one, and another takes over."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.wiring.past import advance_image
from oobleck.runtime.files import RunDirectory

from .elastic import ENDLESS, PACED, TOLERANCE, Reference, assert_all_is_right, stopped
from .harness import TAG, Runner, incidents, oobleck, started_at, worker_pids
from .reference import reference_losses

STEPS = 60
AWAY_S = 3.0
"""How long there is no master, at least."""
FOUR = ("--local", "4", PACED)


def options(runner: Runner) -> tuple[str, ...]:
    return ("--job", str(runner.job_file()), "--steps", str(STEPS))


def references(runner: Runner) -> list[float]:
    path = runner.job_file()
    job = replace(load_job(path.read_text(), source=str(path)), max_steps=STEPS)
    return reference_losses(job, runner.directory / "cache")


def entries(runner: Runner, kind: str) -> list[dict]:
    return [entry for entry in runner.journal() if entry["@type"] == kind]


@pytest.mark.timeout(500)  # commands that start one after the other take their time on a busy machine
def test_training_goes_on_without_a_master_until_the_same_job_takes_over(
    runner: Runner, endless_reference: Reference
) -> None:
    """Neither another job nor one of fewer nodes takes over."""
    endless = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "control.orphan_timeout_s=250")
    with runner.up(*endless, nodes=FOUR) as first:
        first.wait_for_step(8)
        workers = worker_pids(runner)
        births = {node: started_at(pid) for node, pid in workers.items()}
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        gone_s = time.monotonic()
        asked = oobleck("status", "--base-dir", str(runner.base_dir))
        assert "run e2e has no master" in asked.stderr
        assert "its nodes (node0, node1, node2, node3) continue for up to" in asked.stderr
        assert f"oobleck up --local 4 {PACED} --base-dir {runner.base_dir}" in asked.stderr
        assert_refused(runner, "optimizer.learning_rate", *endless, "--set", "optimizer.learning_rate=0.1")
        fewer = "--local: the run e2e continues without its master"
        assert_refused(runner, fewer, *endless, nodes=("--local", "3", PACED))
        directory = RunDirectory(base_dir=runner.base_dir, tag=TAG)
        assert "--local 4" in directory.command, "`oobleck resume` gives it again"
        run = ("run", "--local", "4", "--base-dir", str(runner.base_dir), "--tag", TAG, "--no-python", "true")
        ranks = oobleck(*run)
        assert (ranks.returncode, "continues without its master" in ranks.stderr) == (2, True), ranks.stderr
        time.sleep(max(0.0, gone_s + AWAY_S - time.monotonic()))
        away_s = time.monotonic() - gone_s
        with runner.up(*endless, nodes=FOUR) as second:
            second.wait_for_steps(6)
            outcome = stopped(runner, second)
    assert_all_is_right(outcome, endless_reference)
    assert len(entries(runner, "MasterResumed")) == 1
    assert [incident["root"]["failure"] for incident in incidents(runner)] == ["master_lost"]
    assert f"/{ENDLESS}: loss" in outcome.output
    assert "/0: loss" not in outcome.output, "the second master says how many steps there are to be"
    assert outcome.recoveries == []
    assert worker_pids(runner) == workers
    assert None not in births.values()
    durations = [entry["record"]["duration_s"] for entry in entries(runner, "StepDone")]
    assert max(durations) < away_s, "somebody waited for a master"
    assert runner.left_over() == []
    page = Path(__file__).parents[2].joinpath("docs", "jobs.md").read_text(encoding="utf-8")
    names = {re.sub(r"agent-\w+", "agent-<node>", path.name) for path in (runner.base_dir / "e2e").iterdir()}
    names = {name for name in names if not re.search(r"\.\d+\.jsonl", name)}  # set aside by earlier runs
    assert [name for name in sorted(names) if f"`<tag>/{name}" not in page] == [], "each file is documented"


def assert_refused(runner: Runner, words: str, *options: str, nodes: Sequence[str] = FOUR) -> None:
    with runner.up(*options, nodes=nodes) as other:
        refused = other.finish()
    assert refused.exit_code == 2, refused.output
    assert words in refused.output


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
