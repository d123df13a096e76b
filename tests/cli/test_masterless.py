"""`oobleck status` and the like where a run's master has died: its directory says what is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.wire import encode_json
from tests.control.journals import run_with_a_loss


@pytest.fixture
def dead_process() -> ProcessId:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = ProcessId.of(process.pid)
        assert known is not None
        process.kill()
    return known


def left_behind(base_dir: Path, tag: str, master: ProcessId, *, num_entries: int | None = None) -> RunDirectory:
    """A run's directory as a master leaves it that dies before its end."""
    run = RunDirectory(base_dir=base_dir, tag=tag)
    run.create()
    entries = [entry for entry in run_with_a_loss() if type(entry).__name__ != "JobEnded"][:num_entries]
    run.journal.write_bytes(b"".join(map(encode_json, entries)))
    run.path.joinpath("lock").write_text(f"{master}\n")
    return run


@pytest.mark.parametrize("command", [["status"], ["stop"], ["kill", "node0"], ["add", "node9"], ["drain", "node0"]])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_that_has_lost_its_master_is_described_with_the_command_that_takes_it_over(
    command: list[str], is_named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], dead_process: ProcessId
) -> None:
    run = left_behind(tmp_path, "mine", dead_process)
    run.note_command(["oobleck", "up", "hosts.txt", "--resume", "never", "--job", "my job.yaml"], ())
    assert main([*command, *(["--tag", "mine"] if is_named else []), "--base-dir", str(tmp_path)]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert f"run mine has no master: process {dead_process.pid} has died" in errors
    assert "at step 120 of 120" in errors
    assert "its nodes (node0, node1, node2) continue for up to 10 minutes without one" in errors, "node3 is lost"
    assert (
        f"`oobleck resume mine` takes it over: cd {os.getcwd()} && oobleck up hosts.txt --job 'my job.yaml'" in errors
    )


def test_a_run_whose_nodes_have_given_up_by_now_continues_from_its_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dead_process: ProcessId
) -> None:
    run = left_behind(tmp_path, "mine", dead_process)
    long_ago_s = time.time() - 3600
    os.utime(run.journal, (long_ago_s, long_ago_s))
    assert main(["status", "mine", "--base-dir", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "end by themselves after 10 minutes without a master" in errors
    assert "continues from its newest state" in errors
    assert main(["status", "--base-dir", str(tmp_path)]) == 2
    assert "no run is active" in capsys.readouterr().err, "unless it is named, it is no news"


def test_a_run_that_has_ended_is_not_said_to_have_lost_its_master(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dead_process: ProcessId
) -> None:
    run = left_behind(tmp_path, "mine", dead_process)
    run.journal.write_bytes(b"".join(map(encode_json, run_with_a_loss())))
    assert main(["status", "--base-dir", str(tmp_path)]) == 2
    assert "no run is active" in capsys.readouterr().err


def test_a_master_of_another_machine_is_not_said_to_be_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_behind(tmp_path, "mine", ProcessId(pid=17, started_ticks=1, boot="elsewhere"))
    assert main(["status", "--base-dir", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "process 17 was on another machine, or on this one before its last restart" in errors
    assert "has died" not in errors


@pytest.mark.parametrize(
    ("words", "arguments", "expected"),
    [
        (["oobleck", "up", "hosts", "train.py", "--steps", "9"], [], "oobleck up hosts train.py --steps 9"),
        (
            ["oobleck", "up", "hosts", "train.py", "mine", "--steps", "9", "--", "--hub-token", "s3cret"],
            ["mine", "--hub-token", "s3cret"],
            "oobleck up hosts train.py … --steps 9 -- …",
        ),
        (["oobleck", "run", "--env", "KEY=s3cret", "train.py"], [], "oobleck run --env KEY=… train.py"),
        (
            ["oobleck", "run", "--env=KEY=s3cret", "-m", "my.train", "s3cret"],
            ["s3cret"],
            "oobleck run --env=KEY=… -m my.train …",
        ),
        (["oobleck", "run", "--no-python", "./go", "s3cret"], ["s3cret"], "oobleck run --no-python ./go …"),
        (["oobleck", "run", "--env", "HOME", "train.py"], [], "oobleck run --env HOME train.py"),
        (["oobleck", "up", "--env", "KEY=a=b", "--local", "2"], [], "oobleck up --env KEY=… --local 2"),
        (
            ["oobleck", "up", "--set", "env.KEY=s3cret", "--set=env={K: s}"],
            [],
            "oobleck up --set env.KEY=… --set=env=…",
        ),
    ],
)
def test_the_command_is_noted_without_what_may_be_a_secret(
    words: list[str], arguments: list[str], expected: str, tmp_path: Path
) -> None:
    run = RunDirectory(base_dir=tmp_path, tag="mine")
    run.create()
    assert run.command == ""
    run.note_command(words, arguments)
    assert run.command == f"cd {os.getcwd()} && {expected}"
