"""Devices that share stages: what they compute, save and evaluate is what one process does, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from oobleck.checkpoint import CheckpointDirectory
from oobleck.cli.job_file import load_job
from oobleck.job import JobSpec

from .harness import LLAMA, Runner, worker_pids
from .reference import each_reference_loss
from .test_checkpoints import first_step_of, kill_everything, steps_of
from .test_losses import KILL_STEP, TOLERANCE, assert_nothing_lost, largest_gap

SHARED = """\
eval_steps: 4
max_eval_samples: 40
"""
HEADS = (("num_attention_heads: 2", "num_attention_heads: 4"), ("heads: 1", "heads: 2"))


@pytest.fixture(name="path", scope="module")
def _path(runner: Runner) -> Path:
    head = LLAMA
    for before, after in HEADS:
        head = head.replace(before, after)
    path = runner.job_file(head)
    text = path.read_text(encoding="utf-8").replace("data: {", "data: {validation_split: 0.1, ")
    text = text.replace("max_steps: 24", "max_steps: 60")
    path.write_text(text + SHARED, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(runner: Runner, path: Path) -> tuple[list[float], list[float]]:
    """Losses and evaluations of one process."""
    evaluations: list[float] = []
    losses = list(each_reference_loss(_job(path), runner.directory / "cache", evaluations=evaluations))
    return losses, evaluations


def _job(path: Path) -> JobSpec:
    return load_job(path.read_text(), source=str(path))


def _evaluated(runner: Runner) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in runner.journal() if entry["@type"] == "Evaluated"}


def _assert_evaluated(runner: Runner, reference: list[float]) -> None:
    found = _evaluated(runner)
    assert found
    assert max(abs(loss - reference[step // 4 - 1]) for step, loss in found.items()) < TOLERANCE


def test_stages_that_devices_share_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[list[float], list[float]]
) -> None:
    """Two pipelines of two stages of two devices; a node is killed in an evaluation, and its peers go on."""
    outcome = runner.run("--job", str(path), "--tp", "2", "--kill", f"node2@{KILL_STEP}")
    assert_nothing_lost(outcome, len(reference[0]))
    assert largest_gap(outcome.losses, reference[0]) < TOLERANCE
    _assert_evaluated(runner, reference[1])
    assert {4, *range(12, 41, 4)} <= _evaluated(runner).keys()
    devices = [
        len(stage["devices"]) for pipeline in outcome.summary["plan"]["pipelines"] for stage in pipeline["stages"]
    ]
    assert set(devices) == {2}


def test_what_devices_that_share_stages_saved_is_gone_on_from_by_others(
    runner: Runner, path: Path, tmp_path: Path, reference: tuple[list[float], list[float]]
) -> None:
    """Everything is killed twice: once the same devices go on from memory, then others, one a stage, from disk.

    Between, one of the workers that share a stage is killed: both are started again from their peers.
    """
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    checkpoint = f"checkpoint={{enabled: true, save_steps: 5, directory: {directory.path}}}"
    options = ("--job", str(path), "--set", checkpoint)
    losses: dict[int, float] = {}

    def take_in(journal: list[dict[str, Any]]) -> None:
        losses.update(
            (each["record"]["step"], each["record"]["loss"]) for each in journal if each["@type"] == "StepDone"
        )

    with runner.up(*options, "--tp", "2", nodes=("--local", "2")) as up:
        up.wait_for("checkpoint of step 5")
        kill_everything(runner)
    take_in(runner.journal())
    with runner.up(*options, "--tp", "2", nodes=("--local", "2")) as up:
        up.wait_for_step(6)
        os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
        up.wait_for("the node's workers are started again")
        up.wait_for("checkpoint of step 30")
        kill_everything(runner)
    take_in(runner.journal())
    assert first_step_of(runner) >= 6, "the second run has gone on"
    recoveries = [entry["action"] for entry in runner.journal() if entry["@type"] == "RecoveryDone"]
    assert recoveries[-1] == "restart_worker", recoveries
    assert not [entry for entry in runner.journal() if entry["@type"] == "NodeLost"]
    newest, *_ = steps_of(directory)
    shutil.rmtree(runner.memory)
    outcome = runner.run(*options, nodes=("--local", "2"))
    assert outcome.exit_code == 0, outcome.output
    assert first_step_of(runner) == newest + 1, outcome.output
    take_in(runner.journal())
    assert largest_gap([loss for _, loss in sorted(losses.items())], reference[0]) < TOLERANCE
    _assert_evaluated(runner, reference[1])
