"""A run takes the profile that `oobleck profile` has measured."""

from __future__ import annotations

import pytest

from .harness import TAG, Runner, oobleck


@pytest.mark.slow
def test_a_run_finds_what_the_command_has_measured(runner: Runner) -> None:
    directory = runner.base_dir / TAG / "profile"
    settings = ("--set", "data.sequence_length=24", "--set", "max_steps=3", "--set", "dtype=float32")
    job = str(runner.job_file())
    done = oobleck("profile", job, *settings, "--workers", "2", "--base-dir", str(runner.base_dir))
    assert done.returncode == 0, done.stderr
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("*.json")}
    outcome = runner.run("--job", job, *settings, nodes=("--local", "2"))
    assert outcome.exit_code == 0, outcome.output
    assert {path.name: path.stat().st_mtime_ns for path in directory.glob("*.json")} == before
