"""Everything is killed, state is lost, files are harmed: the run goes on from a checkpoint, as if nothing had been."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from oobleck.cli.inputs.job_file import load_job
from oobleck.errors import ExitCode
from oobleck.storage import CheckpointDirectory
from tests.disks import fill, small_disk

from .elastic import PACED, TOLERANCE
from .harness import TAG, Outcome, Runner, incidents, kill_everything, send_signal
from .reference import reference_losses

ENDS_BADLY = (ExitCode.NOT_SAVED, ExitCode.RESUMABLE, ExitCode.CONFIG)
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


def steps_of(directory: CheckpointDirectory) -> list[int]:
    """The steps of the complete checkpoints, newest first; each is whole."""
    manifests = [found.manifest for found in directory.find() if found.manifest is not None]
    for manifest in manifests:
        assert list(directory.faults(manifest)) == []
    return [manifest.step for manifest in manifests]


def assert_went_on(outcome: Outcome, reference: list[float], first_step: int, *, exit_code: int = 0) -> None:
    """All steps from this one on were committed, with the losses of a run in which nothing happened."""
    assert outcome.exit_code == exit_code, outcome.output
    assert len(outcome.losses) == STEPS - first_step + 1, outcome.output
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference[first_step - 1 :], strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    assert outcome.summary["samples_missing"] == outcome.summary["samples_repeated"] == 0


def first_step_of(runner: Runner) -> int:
    """The first step that the newest run has committed."""
    return next(entry["record"]["step"] for entry in runner.journal() if entry["@type"] == "StepDone")


@pytest.mark.slow
def test_after_a_power_cut_the_same_command_goes_on(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    """And on another number of nodes: what is restored does not depend on the plan."""
    with runner.up(*options(runner, directory, "--resume", "never"), nodes=("--local", "4", PACED)) as up:
        up.wait_for_checkpoint(10)
        up.wait_for_steps(2)
        kill_everything(runner, up)
    saved = steps_of(directory)
    assert saved[0] >= 10
    shutil.rmtree(runner.memory)
    outcome = runner.run(*options(runner, directory), nodes=("--local", "5", PACED))
    first_step = first_step_of(runner)
    assert first_step == saved[0] + 1, outcome.output
    assert re.search(r"warning: the run before this one has committed step \d+, and none of its agents", outcome.output)
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
        up.wait_for_checkpoint(10)
        kill_everything(runner, up)
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
        whole = 0
        for step in range(15, STEPS, 5):  # a busy disk leaves some out
            up.wait_for_checkpoint(step)
            if (whole := len(steps_of(directory))) >= 3:
                break
        kill_everything(runner, up)
    assert whole >= 3, "the disk is too slow for this test"
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


@pytest.mark.slow  # after others in test_all_workers.py
def test_a_layer_without_a_living_copy_costs_the_steps_since_the_checkpoint(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    """Both holders of the first layers die at once: f + 1 nodes."""
    with runner.up(*options(runner, directory, "--resume", "never", "--set", "control.rejoin_after_s=0")) as up:
        up.wait_for_checkpoint(10)
        plan = next(entry["plan"] for entry in runner.journal() if entry["@type"] == "PlanAdopted")
        victims = [pipeline["nodes"][0] for pipeline in plan["pipelines"]]
        pids = [pid for node in victims for pid in runner.pids(node)]  # beforehand: to find them takes a while
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
        outcome = up.finish()
    assert outcome.exit_code == 0, outcome.output
    gaps = [abs(one - other) for one, other in zip(outcome.losses, reference, strict=True)]
    assert max(gaps) < TOLERANCE, gaps
    assert outcome.summary["samples_missing"] == 0
    assert "checkpoint" in [recovery["action"] for recovery in outcome.recoveries]


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
    assert_went_on(outcome, reference, 1, exit_code=ExitCode.NOT_SAVED)
    assert any(entry["@type"] == "SaveFailed" for entry in runner.journal())
    assert "Not a directory" in outcome.output


@pytest.mark.slow  # tests/control/checkpoints/test_broken_saves.py
def test_a_last_save_that_fails_is_no_success_and_the_next_run_makes_it_good(
    runner: Runner, tmp_path: Path, reference: list[float]
) -> None:
    """And once it is good, the same line says so and touches nothing."""
    with small_disk(tmp_path / "disk", "64m") as disk:
        filler = fill(disk)
        directory = CheckpointDirectory(disk / "checkpoints")
        line = options(runner, directory, every=1000)
        full = runner.run(*line, "--resume", "never")
        assert_went_on(full, reference, 1, exit_code=ExitCode.NOT_SAVED)
        assert f"step {STEPS} is NOT SAVED" in full.output
        assert "not_saved" in {incident["root"]["failure"] for incident in incidents(runner)}
        assert full.summary["saves_failed"] >= 1
        assert directory.names() == (), "what a failed save has left takes no room"
        filler.unlink()
        good = runner.run(*line)
        assert good.exit_code == 0, good.output
        assert good.losses == [], "nothing is trained twice"
        assert steps_of(directory) == [STEPS]
        assert not runner.memory.exists()
        journal = (runner.base_dir / TAG / "journal.jsonl").read_bytes()
        before = files_in(directory.path)
        again = runner.run(*line, "--keep", "1")
        assert again.exit_code == 0, again.output
        assert "all 40 steps" in again.output
        assert files_in(directory.path) == before
        assert (runner.base_dir / TAG / "journal.jsonl").read_bytes() == journal


def files_in(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    return {
        str(file.relative_to(path)): (file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(path.rglob("*"))
    }


@pytest.mark.slow
def test_a_full_disk_stops_saving_but_not_training_until_there_is_room(
    runner: Runner, tmp_path: Path, reference: list[float]
) -> None:
    with small_disk(tmp_path / "disk", "64m") as disk:
        filler = fill(disk)
        directory = CheckpointDirectory(disk / "checkpoints")
        with runner.up(*options(runner, directory, "--resume", "never", every=2)) as up:
            assert "No space left on device" in up.wait_for("is not saved")
            up.wait_for_steps(3)
            filler.unlink()
            outcome = up.finish()
        assert_went_on(outcome, reference, 1)
        assert steps_of(directory)[0] == STEPS


@pytest.mark.slow
def test_what_a_finished_run_has_made_outlives_all_that_comes_after(
    runner: Runner, directory: CheckpointDirectory, reference: list[float]
) -> None:
    short = ("--steps", "6", "--keep", "1")
    first = runner.run(*options(runner, directory, "--resume", "never"), *short)
    assert first.exit_code == 0, first.output
    (made,) = directory.names()
    before = files_in(directory.path / made)
    from_scratch = runner.run(*options(runner, directory, "--resume", "never", every=2), *short)
    assert len(from_scratch.losses) == 6
    assert "checkpoints of other runs" in from_scratch.output
    further = runner.run(*options(runner, directory, every=2), "--steps", "12", "--keep", "1")
    assert further.summary["begun_after"] == 6
    assert len(further.losses) == 6
    other = runner.run(*options(runner, directory), *short, "--set", "model.n_embd=16")
    assert other.exit_code == ExitCode.CONFIG
    assert "another model" in other.output
    assert files_in(directory.path / made) == before
    assert sorted(steps_of(directory)) == [6, 6, 12]
    nowhere = runner.run(*options(runner, directory, "--resume", "/nonexistent"), *short)
    assert nowhere.exit_code == 78
    assert "no checkpoint" in nowhere.output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_wherever_a_disk_is_full_success_means_a_whole_checkpoint_and_a_whole_journal(
    tmp_path: Path, seed: int
) -> None:
    """All that a run writes is on a disk that is full for a while, beginning and ending anywhere."""
    random = Random(seed)
    own = Runner(tmp_path)
    own.base_dir.mkdir()
    with small_disk(own.base_dir, "48m") as disk:
        checkpoint = CheckpointDirectory(own.base_dir / TAG / "checkpoints")
        line = ("--job", str(own.job_file()), "--steps", str(STEPS), "--set", "checkpoint={enabled: true}")
        codes = []
        for _ in range(3):
            with own.up(*line, "--save-every", str(random.choice((1, 3, 1000)))) as up:
                if random.random() < 0.7:
                    with suppress(AssertionError):  # there may be nothing left to train
                        up.wait_for("] step ")
                time.sleep(random.random())
                filler = fill(disk)
                time.sleep(random.random())
                if codes or random.random() < 0.5:
                    filler.unlink()
                outcome = up.finish()
            filler.unlink(missing_ok=True)
            codes.append(outcome.exit_code)
            assert outcome.exit_code in (0, 1, *ENDS_BADLY), outcome.output
            if outcome.exit_code == 0:
                assert steps_of(checkpoint)[0] == STEPS, outcome.output
                assert_journal_is_whole(own)
        assert codes[-1] == 0, outcome.output
    own.close()


def assert_journal_is_whole(runner: Runner) -> None:
    """It tells every step after those that a run before has left, and its end."""
    entries = runner.journal()
    assert entries[-1]["@type"] in ("JobEnded", "JournalGap")
    begun = next(entry["restored_step"] for entry in entries if entry["@type"] == "PlanAdopted") or 0
    steps = [entry["record"]["step"] for entry in entries if entry["@type"] == "StepDone"]
    assert steps == list(range(begun + 1, STEPS + 1))
