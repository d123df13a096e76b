"""Everything is killed, state is lost, files are harmed: the run goes on from a checkpoint, as if nothing had been."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from oobleck.checkpoint import CheckpointDirectory
from oobleck.cli.job_file import load_job

from .harness import TAG, Outcome, Runner, oobleck
from .reference import reference_losses

TOLERANCE = 1e-9
STEPS = 40


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def reference(runner: Runner) -> list[float]:
    path = runner.job_file()
    job = replace(load_job(path.read_text(), source=str(path)), max_steps=STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the job says; more would wait for each other on a busy machine
    losses = reference_losses(job, runner.directory / "cache")
    torch.set_num_threads(threads)
    return losses


@pytest.fixture(autouse=True)
def _memory(runner: Runner) -> Iterator[None]:
    """Leaves no memory behind: runs whose end was a kill keep theirs."""
    yield
    shutil.rmtree(runner.memory, ignore_errors=True)


def options(runner: Runner, directory: CheckpointDirectory, *more: str, every: int = 5) -> tuple[str, ...]:
    checkpoint = f"checkpoint={{enabled: true, save_steps: {every}, directory: {directory.path}}}"
    return ("--job", str(runner.job_file()), "--steps", str(STEPS), "--set", checkpoint, *more)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, as small as a test wants a disk to be."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def kill_everything(runner: Runner) -> None:
    """SIGKILL to master, agents and workers, as a power cut would, but for the memory.

    The master comes first, and all are stopped before any is killed: one that sees others die ends by itself, and what
    the nodes keep in memory is given back.
    """
    processes = sorted(runner.processes(), key=_is_no_child)
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.Error):
                act(process)
    deadline_s = time.monotonic() + 20.0
    while runner.processes():
        assert time.monotonic() < deadline_s, runner.processes()
        time.sleep(0.02)


def _is_no_child(process: psutil.Process) -> bool:
    """Whether a process is not the master, which this one started."""
    with suppress(psutil.Error):
        return process.ppid() != os.getpid()
    return True


def steps_of(directory: CheckpointDirectory) -> list[int]:
    """The steps of the complete checkpoints, newest first; each is whole."""
    manifests = [found.manifest for found in directory.find() if found.manifest is not None]
    for manifest in manifests:
        assert list(directory.faults(manifest)) == []
    return [manifest.step for manifest in manifests]


def assert_went_on(outcome: Outcome, reference: list[float], first_step: int) -> None:
    """All steps from this one on were committed, with the losses of a run in which nothing happened."""
    assert outcome.exit_code == 0, outcome.output
    assert len(outcome.losses) == STEPS - first_step + 1, outcome.output
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference[first_step - 1 :], strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    assert outcome.summary["samples_missing"] == outcome.summary["samples_repeated"] == 0


def first_step_of(runner: Runner) -> int:
    """The first step that the newest run has committed."""
    return next(entry["record"]["step"] for entry in runner.journal() if entry["@type"] == "StepDone")


def test_after_a_power_cut_the_same_command_goes_on(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    """And on another number of nodes: what is restored does not depend on the plan."""
    with runner.up(*options(runner, directory, "--resume", "never")) as up:
        up.wait_for("checkpoint of step 10")
        up.wait_for_steps(2)
        kill_everything(runner)
    saved = steps_of(directory)
    assert saved[0] >= 10
    shutil.rmtree(runner.memory)
    outcome = runner.run(*options(runner, directory), nodes=("--local", "5"))
    first_step = first_step_of(runner)
    assert first_step == saved[0] + 1, outcome.output
    assert_went_on(outcome, reference, first_step)
    assert steps_of(directory)[0] == STEPS
    assert len(directory.names()) == 3, "older ones are removed, and what was never finished"
    assert runner.left_over() == []
    assert not runner.memory.exists(), "the memory is given back"


@pytest.mark.slow
def test_what_only_memory_has_is_gone_on_from(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    with runner.up(*options(runner, directory, "--resume", "never")) as up:
        up.wait_for("checkpoint of step 10")
        kill_everything(runner)
    shutil.rmtree(directory.path)
    outcome = runner.run(*options(runner, directory))
    first_step = first_step_of(runner)
    assert first_step >= 11, outcome.output
    assert_went_on(outcome, reference, first_step)


@pytest.mark.slow
def test_harmed_files_are_named_and_the_checkpoint_before_is_taken(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    with runner.up(*options(runner, directory, "--resume", "never")) as up:
        up.wait_for("checkpoint of step 15")
        kill_everything(runner)
    shutil.rmtree(runner.memory)
    newest, before, oldest = [found for found in directory.find() if found.manifest is not None][:3]
    changed = directory.path / newest.name / "layer-0002.safetensors"
    raw = bytearray(changed.read_bytes())
    raw[-5] ^= 4
    changed.write_bytes(raw)
    (directory.path / before.name / "layer-0000.safetensors").unlink()
    outcome = runner.run(*options(runner, directory))
    assert f"{changed}: changed" in outcome.output
    assert oldest.manifest is not None
    assert_went_on(outcome, reference, oldest.manifest.step + 1)


def test_a_layer_without_a_living_copy_costs_the_steps_since_the_checkpoint(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    """Both holders of the first layers die at once: f + 1 nodes."""
    with runner.up(*options(runner, directory, "--resume", "never", "--set", "control.rejoin_after_s=0")) as up:
        up.wait_for("checkpoint of step 10")
        plan = next(entry["plan"] for entry in runner.journal() if entry["@type"] == "PlanAdopted")
        victims = [pipeline["nodes"][0] for pipeline in plan["pipelines"]]
        for node in victims:
            killed = oobleck("kill", node, "--tag", TAG, "--base-dir", str(runner.base_dir))
            assert killed.returncode == 0, killed.stderr
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference, strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    assert outcome.summary["samples_missing"] == 0


@pytest.mark.slow
def test_being_stopped_saves_first(runner: Runner, directory: CheckpointDirectory, reference: list[float]) -> None:
    with runner.up(*options(runner, directory, "--resume", "never", every=1000)) as up:
        up.wait_for_step(5)
        up.process.terminate()
        stopped = up.finish()
    assert stopped.exit_code == 143, stopped.output
    (step,) = steps_of(directory)
    assert step == stopped.summary["steps_committed"]
    outcome = runner.run(*options(runner, directory))
    assert_went_on(outcome, reference, step + 1)


@pytest.mark.slow
def test_a_disk_that_takes_nothing_stops_saving_but_not_training(
    runner: Runner, tmp_path: Path, reference: list[float]
) -> None:
    (tmp_path / "file").write_text("in the way")
    directory = CheckpointDirectory(tmp_path / "file" / "checkpoints")
    outcome = runner.run(*options(runner, directory, "--resume", "never"))
    assert_went_on(outcome, reference, 1)
    assert "is not saved" in outcome.output
    assert "Not a directory" in outcome.output
    assert "training goes on" in outcome.output


@pytest.mark.slow
def test_a_full_disk_stops_saving_but_not_training_until_there_is_room(
    runner: Runner, small_disk: Path, reference: list[float]
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - (64 << 10)))
    directory = CheckpointDirectory(small_disk / "checkpoints")
    with runner.up(*options(runner, directory, "--resume", "never", every=2)) as up:
        assert "No space left on device" in up.wait_for("is not saved")
        up.wait_for_steps(3)
        outcome = up.finish()
    assert_went_on(outcome, reference, 1)
    assert steps_of(directory) == []
    filler.unlink()
    again = runner.run(*options(runner, directory, "--resume", "never", every=2))
    assert_went_on(again, reference, 1)
    assert steps_of(directory)[0] == STEPS


@pytest.mark.slow
def test_a_run_that_was_finished_starts_anew_or_goes_on_where_it_is_told_to(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    short = ("--steps", "6")
    first = runner.run(*options(runner, directory, "--resume", "never"), *short)
    assert first.exit_code == 0, first.output
    again = runner.run(*options(runner, directory), *short)
    assert "starts anew" in again.output
    assert len(again.losses) == 6
    nowhere = runner.run(*options(runner, directory, "--resume", "/nonexistent"), *short)
    assert nowhere.exit_code == 78
    assert "there is no checkpoint that can be used" in nowhere.output
