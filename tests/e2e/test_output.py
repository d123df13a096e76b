"""A run whose output goes nowhere any more trains on, and says so where it can still be read."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .harness import TAG, Runner, oobleck

TERMINAL_GONE = "the terminal is gone"
STEPS = 24
"""Of the job: the run is whole when all of them are committed."""


@contextmanager
def started(runner: Runner, *options: str, output: int, error: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "oobleck", "up", "--local", "2", "--base-dir", str(runner.base_dir)]
    command += ["--job", str(runner.job_file()), *options]
    _forget_other_runs(runner)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=error, env=runner.environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _forget_other_runs(runner: Runner) -> None:
    """Have the journal tell of the run alone that is started next."""
    (runner.base_dir / TAG / "journal.jsonl").unlink(missing_ok=True)


def notices(runner: Runner) -> list[str]:
    return [entry["text"] for entry in runner.journal() if entry["@type"] == "Notice" and entry["level"] == "warning"]


def steps(runner: Runner) -> int:
    return sum(entry["@type"] == "StepDone" for entry in runner.journal())


def await_end(runner: Runner, process: subprocess.Popen[bytes], *, timeout_s: float = 240.0) -> None:
    """Wait until the journal tells of the end."""
    deadline_s = time.monotonic() + timeout_s
    while not any(entry["@type"] == "JobEnded" for entry in runner.journal()):
        assert process.poll() in (None, 0)
        assert time.monotonic() < deadline_s, runner.journal()[-3:]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_goes_on_when_its_reader_goes_away(runner: Runner, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    summary = tmp_path / "summary.json"
    with started(runner, "--plain", "--summary", str(summary), output=writing, error=writing) as process:
        os.close(writing)
        assert b"oobleck up" in os.read(reading, 4096)
        os.close(reading)
        assert process.wait(240) == 0
    assert steps(runner) == STEPS
    (notice,) = notices(runner)
    assert "(Broken pipe)" in notice
    assert summary.exists()
    assert runner.left_over() == []


@pytest.mark.slow  # tests/ui/test_live.py has a terminal that is stopped
def test_a_run_neither_waits_for_a_reader_that_does_not_read_nor_ends_when_it_goes_away(
    runner: Runner, tmp_path: Path
) -> None:
    reading, writing = full_pipe()
    summary = tmp_path / "summary.json"
    options = ("--plain", "--steps", "100000", "--summary", str(summary))
    with started(runner, *options, output=writing, error=writing) as process:
        os.close(writing)
        _until(lambda: steps(runner) >= STEPS)
        os.close(reading)
        _until(lambda: any("(Broken pipe)" in notice for notice in notices(runner)))
        seen = steps(runner)
        _until(lambda: steps(runner) >= seen + 5)
        assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
        assert process.wait(60) == 0
    assert len([notice for notice in notices(runner) if "(Broken pipe)" in notice]) == 1
    assert summary.exists()
    assert runner.left_over() == []


def full_pipe() -> tuple[int, int]:
    """A pipe, in which there is room for nothing more: the ends to read from and to write to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"x" * 4096)
        except BlockingIOError:
            return reading, writing


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_reader_that_never_reads(runner: Runner) -> None:
    reading, writing = full_pipe()
    with started(runner, "--plain", output=writing, error=writing) as process:
        os.close(writing)
        await_end(runner, process)
        os.close(reading)  # its last words wait for a reader until now
        assert process.wait(30) == 0
    assert steps(runner) == STEPS
    assert runner.left_over() == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--plain",)])
def test_a_run_goes_on_when_its_terminal_is_gone(runner: Runner, options: tuple[str, ...]) -> None:
    _forget_other_runs(runner)
    ours, theirs = pty.openpty()
    leader = (
        "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # under nohup, tests are started with it ignored
        "os.execv(sys.executable, [sys.executable, '-m', 'oobleck', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", leader, "up", "--local", "2", "--base-dir", str(runner.base_dir)]
    with subprocess.Popen(
        [*command, "--job", str(runner.job_file()), "--steps", "100000", *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=runner.environment | {"TERM": "xterm-256color"},
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            os.read(ours, 100)
            _until(lambda: steps(runner) >= 3)
            os.close(ours)
            _until(lambda: any(TERMINAL_GONE in notice for notice in notices(runner)))
            seen = steps(runner)
            _until(lambda: steps(runner) >= seen + 5)
            assert oobleck("stop", TAG, "--base-dir", str(runner.base_dir)).returncode == 0
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert runner.left_over() == []


def _until(condition, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.slow
def test_a_detached_run_outlives_its_command_and_is_followed_and_removed(runner: Runner) -> None:
    with started(runner, "--detach", output=subprocess.PIPE, error=subprocess.PIPE) as process:
        said, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert f"`oobleck attach {TAG}` shows it".encode() in said
    base = ("--base-dir", str(runner.base_dir))
    followed = oobleck("attach", TAG, *base)
    assert followed.returncode == 0, followed.stderr
    assert f"step {STEPS}/{STEPS}" in followed.stdout
    await_end(runner, process)
    assert "all 24 steps are committed" in (runner.base_dir / TAG / "output.log").read_text()
    deadline_s = time.monotonic() + 60
    while (removed := oobleck("rm", TAG, *base)).returncode == 2 and time.monotonic() < deadline_s:
        time.sleep(0.5)  # the master still closes what it has open
    assert removed.returncode == 0, removed.stderr
    assert not (runner.base_dir / TAG).exists()
