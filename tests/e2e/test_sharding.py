"""Devices that share out the state of a stage: what they compute and save is what one process does, whoever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from oobleck.storage import CheckpointDirectory

from .elastic import (
    ENDLESS,
    LLAMA_TOLERANCE,
    Reference,
    assert_all_is_right,
    assert_losses,
    each_loss,
    run_without_a_kill,
    stopped,
)
from .harness import GPT2, LLAMA, TAG, Runner, kill_everything, worker_pids
from .test_checkpoints import first_step_of, steps_of
from .test_losses import KILL_STEP
from .test_tensor_parallel import assert_evaluated, evaluated_job, evaluated_reference

PHASED = str(Path(__file__).with_name("phased_job.py"))


def by(sharding: str, devices: int = 2) -> tuple[str, ...]:
    return ("--set", f"sharding={sharding}", "--set", f"sharding_devices={devices}")


OPTIMIZER, ALL = by("optimizer"), by("all")
LEVELS = ["optimizer", "gradients", "all"]


@pytest.fixture(name="path", scope="module")
def _path(runner: Runner) -> Path:
    # A file of its own: other tests here write one of this model as well.
    path = runner.directory / "evaluated.yaml"
    # 19 microbatches: not each device has as many.
    text = evaluated_job(runner, GPT2).read_text(encoding="utf-8").replace("samples: 40", "samples: 38")
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(runner: Runner, path: Path) -> tuple[Reference, list[float]]:
    return evaluated_reference(runner, path)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", LEVELS)
def test_sharded_stages_compute_what_one_process_computes(
    runner: Runner, path: Path, reference: tuple[Reference, list[float]], sharding: str
) -> None:
    """A pipeline of one stage and one of two, of two devices each, with dropout, a tied head, evaluations and clipping.

    A node of the two is killed: the node that is left with it continues with the layers of the other pipeline.
    """
    options = ("--job", str(path), *by(sharding), "--set", "checkpoint.compare_steps=2")
    with runner.up(*options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for_loss("node2")
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_bytes", "sharding"), [(10**9, "optimizer"), (54 * 10**6, "gradients"), (46 * 10**6, "all")]
)
def test_what_devices_share_out_is_chosen_once_and_stays(runner: Runner, memory_bytes: int, sharding: str) -> None:
    """Where memory is short, a node holds the model only with another choice.

    A node is killed, then the master, and a worker under the next one. The losses are those of one process.
    """
    path = runner.job_file(GPT2.replace("n_embd: 32, n_layer: 4", "n_embd: 128, n_layer: 6"))
    path.write_text(path.read_text(encoding="utf-8").replace("max_steps: 24", f"max_steps: {ENDLESS}"), "utf-8")
    options = ("--job", str(path), *by("auto"), "--set", f"device_memory_bytes={memory_bytes}")
    with runner.up(*options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(3)
        up.process.kill()
        up.process.wait()
        with runner.up(*options, nodes=("--local", "3")) as successor:
            successor.wait_for_steps(3)
            os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
            successor.wait_for("the node's workers are started again")
            successor.wait_for_steps(3)
            outcome = stopped(runner, successor)
    (chosen,) = [entry for entry in runner.journal() if entry["@type"] == "ShardingChosen"]
    assert (chosen["sharding"], len(chosen["step_s"])) == (sharding, 3)
    assert outcome.exit_code == 0, outcome.output
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0)
    assert_losses(outcome.losses, each_loss(path, runner.directory / "alone"))


@pytest.mark.slow
def test_a_stage_may_have_three_devices(runner: Runner) -> None:
    path = runner.job_file()
    text = path.read_text(encoding="utf-8").replace("max_steps: 24", f"max_steps: {ENDLESS}")
    path.write_text(text.replace("global_batch_size: 16", "global_batch_size: 24"), encoding="utf-8")
    options = ("--job", str(path), *by("gradients", devices=3))
    with runner.up(*options, "--kill", f"node1@{KILL_STEP}", nodes=("--local", "2")) as up:
        up.wait_for_loss("node1")
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, each_loss(path, runner.directory / "cache"))


@pytest.mark.slow
def test_what_devices_saved_in_shares_is_gone_on_from_without_shares_and_the_other_way_round(
    runner: Runner, path: Path, tmp_path: Path, reference: tuple[Reference, list[float]]
) -> None:
    """Everything is killed twice. In the first run one of the workers of a stage is killed before, and comes back."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    options = ("--job", str(path), "--set", f"checkpoint={{enabled: true, save_steps: 5, directory: {directory.path}}}")
    losses: dict[int, float] = {}
    begins = 1
    for number, sharing in enumerate((OPTIMIZER, (), ALL)):
        with runner.up(*options, *sharing, nodes=("--local", "2")) as up:
            if not number:
                up.wait_for_step(4)
                os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
                up.wait_for("the node's workers are started again")
            up.wait_for_checkpoint(begins + 9)
            kill_everything(runner, up)
        assert first_step_of(runner) == begins
        losses |= {
            entry["record"]["step"]: entry["record"]["loss"]
            for entry in runner.journal()
            if entry["@type"] == "StepDone"
        }
        newest, *_ = steps_of(directory)
        begins = newest + 1
        runner.boot()
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert_losses([loss for _, loss in sorted(losses.items())], reference[0])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "all"])
def test_interleaved_sharded_stages_of_frozen_layers_and_adapters_lose_no_step(runner: Runner, sharding: str) -> None:
    """With adapters most weights are frozen: the losses are those of the same run without sharding."""
    path = runner.job_file(LLAMA)
    adapted = path.read_text(encoding="utf-8").replace(
        "num_key_value_heads: 1}", "num_key_value_heads: 1, lora: {r: 4}}"
    )
    path.write_text(adapted.replace("max_steps: 24", f"max_steps: {ENDLESS}"), encoding="utf-8")
    options = ("--job", str(path), "--set", "schedule=interleaved")
    with runner.up(*options, *by(sharding), "--kill", f"node2@{KILL_STEP}") as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert [recovery["nodes"] for recovery in outcome.recoveries] == [["node2"]]
    alone = run_without_a_kill(runner, *options, steps=len(outcome.losses))
    assert_losses(outcome.losses, lambda count: alone.losses[:count], tolerance=LLAMA_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward", "sums", "apply"])
@pytest.mark.parametrize("sharding", ["optimizer", "gradients", "all"])
def test_a_worker_that_ends_in_any_phase_of_a_step_and_a_node_soon_after_cost_no_step(
    runner: Runner, tmp_path: Path, sharding: str, phase: str
) -> None:
    nodes, script = ("--local", "3", PHASED), ("--", str(tmp_path), phase)
    options = ("--tag", TAG, "--set", "dtype=float64", "--set", "num_pipelines=3", "--steps", str(ENDLESS))
    with runner.up(*options, *by(sharding), *script, nodes=nodes) as up:
        up.wait_for_step(4)
        (tmp_path / "now").touch()
        up.wait_for("the node's workers are started again")
        runner.signal("node2", "*", signal.SIGKILL)
        up.wait_for_loss("node2")
        up.wait_for_steps(6)
        outcome = stopped(runner, up)
    assert outcome.exit_code == 0, outcome.output
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0)
    with runner.up(*options, "--resume", "never", *script, nodes=nodes) as up:
        up.wait_for_step(len(outcome.losses))
        alone = stopped(runner, up)
    assert_losses(outcome.losses, lambda count: alone.losses[:count])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", LEVELS)
def test_experts_that_stay_on_their_devices_compute_what_one_process_computes(
    runner: Runner, tmp_path: Path, sharding: str
) -> None:
    """A node of three is killed, and after it a worker of one of the two that are left."""
    path = runner.job_file(LLAMA.replace("type: llama", "type: mixtral, num_local_experts: 4"))
    path.write_text(path.read_text(encoding="utf-8").replace("max_steps: 24", f"max_steps: {ENDLESS}"), "utf-8")
    options = ("--job", str(path), *by(sharding), "--set", "expert_parallel=true")
    with runner.up(*options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(4)
        os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
        up.wait_for("the node's workers are started again")
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert outcome.exit_code == 0, outcome.output
    assert (outcome.summary["samples_repeated"], outcome.summary["samples_missing"]) == (0, 0)
    assert_losses(outcome.losses, each_loss(path, tmp_path / "alone"), tolerance=LLAMA_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", LEVELS)
def test_devices_that_share_samples_compute_what_one_process_computes(runner: Runner, sharding: str) -> None:
    """With evaluations and clipping, and one head of keys for two devices. A node is killed, and after it a worker."""
    path = evaluated_job(runner, LLAMA)
    losses, evaluations = evaluated_reference(runner, path)
    options = ("--job", str(path), *by(sharding), "--set", "context_parallel=2")
    with runner.up(*options, "--kill", f"node2@{KILL_STEP}", nodes=("--local", "3")) as up:
        up.wait_for_loss("node2")
        up.wait_for_steps(4)
        os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
        up.wait_for("the node's workers are started again")
        up.wait_for_steps(4)
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, losses, tolerance=LLAMA_TOLERANCE)
    assert_evaluated(runner, evaluations)
