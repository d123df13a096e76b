"""Devices that share out the state of a stage: what they compute and save is what one process does, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from .elastic import ENDLESS, Reference, assert_all_is_right, each_loss, stopped
from .harness import GPT2, Runner
from .test_losses import KILL_STEP
from .test_tensor_parallel import SHARED, assert_evaluated

OPTIMIZER = ("--set", "sharding=optimizer", "--set", "sharding_devices=2")
"""Of the 300 rows of its tied embedding a device of two has 150, and of three 100; its norms have 32."""


@pytest.fixture(name="path", scope="module")
def _path(runner: Runner) -> Path:
    path = runner.job_file(GPT2)
    text = path.read_text(encoding="utf-8").replace("data: {", "data: {validation_split: 0.1, ")
    text = text.replace("max_steps: 24", f"max_steps: {ENDLESS}")
    path.write_text(text + SHARED, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(runner: Runner, path: Path) -> tuple[Reference, list[float]]:
    """Losses of one process, and its evaluations up to the last loss that was asked for."""
    evaluations: list[float] = []
    return each_loss(path, runner.directory / "cache", evaluations=evaluations), evaluations


def test_sharded_stages_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[Reference, list[float]]
) -> None:
    """A pipeline of one stage and one of two, of two devices each, with dropout, a tied head, evaluations and clipping.

    A node of the two is killed: the node that is left with it starts anew from the layers of the other pipeline.
    """
    options = ("--job", str(path), *OPTIMIZER, "--set", "checkpoint.compare_steps=2")
    with runner.up(*options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for("no step lost")
        up.wait_for_steps(8)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, reference[0])
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["node2"]]
    assert_evaluated(runner, reference[1])
    devices = [
        len(stage["devices"]) for pipeline in outcome.summary["plan"]["pipelines"] for stage in pipeline["stages"]
    ]
    assert set(devices) == {2}
    assert not [entry for entry in runner.journal() if entry["@type"] == "ReplicasDiffer"]
