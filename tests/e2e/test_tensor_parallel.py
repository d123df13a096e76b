"""Devices that share stages: what they compute, save and evaluate is what one process does, whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from oobleck.storage import CheckpointDirectory

from .elastic import ENDLESS, LLAMA_TOLERANCE, Reference, assert_all_is_right, assert_losses, each_loss, stopped
from .harness import LLAMA, Runner, kill_everything, worker_pids
from .test_checkpoints import first_step_of, steps_of
from .test_interleaved import shapes
from .test_losses import KILL_STEP

SHARED = """\
eval_steps: 4
max_eval_samples: 40
"""
HEADS = (("num_attention_heads: 2", "num_attention_heads: 4"), ("heads: 1", "heads: 2"))


def evaluated_job(runner: Runner, head: str) -> Path:
    """Write a job without end that is evaluated on the way, whose model is given."""
    path = runner.job_file(head)
    text = path.read_text(encoding="utf-8").replace("data: {", "data: {validation_split: 0.1, ")
    text = text.replace("max_steps: 24", f"max_steps: {ENDLESS}")
    path.write_text(text + SHARED, encoding="utf-8")
    return path


def evaluated_reference(runner: Runner, path: Path) -> tuple[Reference, list[float]]:
    """Losses of one process, and its evaluations up to the last loss that was asked for."""
    evaluations: list[float] = []
    return each_loss(path, runner.directory / "cache", evaluations=evaluations), evaluations


@pytest.fixture(name="path", scope="module")
def _path(runner: Runner) -> Path:
    head = LLAMA
    for before, after in HEADS:
        head = head.replace(before, after)
    return evaluated_job(runner, head)


@pytest.fixture(scope="module")
def reference(runner: Runner, path: Path) -> tuple[Reference, list[float]]:
    return evaluated_reference(runner, path)


def _evaluated(runner: Runner) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in runner.journal() if entry["@type"] == "Evaluated"}


def assert_evaluated(runner: Runner, reference: list[float]) -> None:
    compared = {step: loss for step, loss in _evaluated(runner).items() if step // 4 <= len(reference)}
    assert compared
    assert max(abs(loss - reference[step // 4 - 1]) for step, loss in compared.items()) < LLAMA_TOLERANCE


@pytest.mark.slow  # test_sharding.py has devices that share a stage
def test_stages_that_devices_share_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[Reference, list[float]]
) -> None:
    """Two pipelines of two stages of two devices; a node is killed in an evaluation, and its peers go on.

    Runs here have no last step of their own: one that is over before it is killed shows nothing.
    """
    with runner.up("--job", str(path), "--tp", "2", "--kill", f"node2@{KILL_STEP}") as up:
        up.wait_for_step(18)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, reference[0], tolerance=LLAMA_TOLERANCE)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["node2"]]
    assert_evaluated(runner, reference[1])
    assert {4, *range(12, 17, 4)} <= _evaluated(runner).keys()
    devices = [
        len(stage["devices"]) for pipeline in outcome.summary["plan"]["pipelines"] for stage in pipeline["stages"]
    ]
    assert set(devices) == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [("recompute=selective",), ("recompute=auto", "device_memory_bytes=1100000")], ids=["selective", "auto"]
)
def test_stages_that_devices_share_and_recompute_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[Reference, list[float]], options: tuple[str, ...]
) -> None:
    """Devices of a stage repeat their exchanges together; with `auto` a node that has all layers must recompute."""
    given = tuple(word for key in options for word in ("--set", key))
    with runner.up("--job", str(path), "--tp", "2", *given, "--kill", f"node2@{KILL_STEP}") as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(6)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, reference[0], tolerance=LLAMA_TOLERANCE)
    if "recompute=auto" in options:
        (*_, last) = [entry["plan"]["pipelines"] for entry in runner.journal() if entry["@type"] == "PlanAdopted"]
        stages = [stage for pipeline in last for stage in pipeline["template"]["stages"]]
        assert any(stage["num_recomputed"] + stage["num_selective"] for stage in stages)


@pytest.mark.slow
def test_interleaved_stages_that_devices_share_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[Reference, list[float]]
) -> None:
    """Two pipelines of two stages with two chunks each, on two devices; of the one that loses a node, a stage is left.

    Evaluations go through all chunks, before the loss and after it.
    """
    options = ("--tp", "2", "--set", "schedule=interleaved", "--kill", f"node2@{KILL_STEP}")
    with runner.up("--job", str(path), *options) as up:
        up.wait_for_step(26)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, reference[0], tolerance=LLAMA_TOLERANCE)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["node2"]]
    assert_evaluated(runner, reference[1])
    assert {4, *range(12, 25, 4)} <= _evaluated(runner).keys()
    assert shapes(runner) == [[(2, 2), (2, 2)], [(1, 1), (2, 2)]]
    devices = [
        len(stage["devices"]) for pipeline in outcome.summary["plan"]["pipelines"] for stage in pipeline["stages"]
    ]
    assert set(devices) == {2}


@pytest.mark.slow
def test_what_devices_that_share_stages_saved_is_gone_on_from_by_others(
    runner: Runner, path: Path, tmp_path: Path, reference: tuple[Reference, list[float]]
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
        up.wait_for_checkpoint(5)
        kill_everything(runner, up)
    take_in(runner.journal())
    with runner.up(*options, "--tp", "2", nodes=("--local", "2")) as up:
        up.wait_for_step(6)
        os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
        up.wait_for("the node's workers are started again")
        up.wait_for_checkpoint(30)
        kill_everything(runner, up)
    take_in(runner.journal())
    assert first_step_of(runner) >= 6, "the second run has gone on"
    assert not [entry for entry in runner.journal() if entry["@type"] == "NodeLost"]
    recoveries = [entry for entry in runner.journal() if entry["@type"] == "RecoveryDone"]
    assert [entry["action"] for entry in recoveries] == ["reinstantiate", "restart_worker"], recoveries
    newest, *_ = steps_of(directory)
    shutil.rmtree(runner.memory)
    with runner.up(*options, nodes=("--local", "2")) as up:
        up.wait_for_step(newest + 6)
        outcome = stopped(runner, up)
    assert outcome.exit_code == 0, outcome.output
    assert first_step_of(runner) == newest + 1, outcome.output
    take_in(runner.journal())
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert_losses([loss for _, loss in sorted(losses.items())], reference[0], tolerance=LLAMA_TOLERANCE)
    assert_evaluated(runner, reference[1])
