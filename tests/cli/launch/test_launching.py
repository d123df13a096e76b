"""What `launch` refuses before anything is started, with the words of `oobleck up`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import oobleck
from oobleck.cli.main import main
from oobleck.control.journal import RunState
from oobleck.errors import ConfigError, ExitCode, RunFailed, UsageError, exit_code_of

Refused = tuple[object, dict[str, Any], list[str]]
"""A job, its options, and a command line that says the same."""


@pytest.mark.parametrize(
    "refused",
    [
        ("job.yaml", {"local": 0}, ["--local", "0", "--job", "job.yaml"]),
        ("job.yaml", {"hosts": "missing.txt"}, ["missing.txt", "--job", "job.yaml"]),
        ("wrong.yaml", {"local": 2}, ["--local", "2", "--job", "wrong.yaml"]),
        pytest.param(
            ("fails.py", {"local": 2, "arguments": ["--x"]}, ["--local", "2", "fails.py", "--", "--x"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_used_is_said_as_on_the_command_line(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "job.yaml").write_text("max_steps: 5\n")
    (tmp_path / "wrong.yaml").write_text("max_steps: 5\nmax_step: 6\n")
    (tmp_path / "fails.py").write_text("import sys\n\nraise ValueError(sys.argv[1])\n")
    monkeypatch.chdir(tmp_path)
    job, options, words = refused
    with pytest.raises((ConfigError, UsageError)) as raised:
        oobleck.launch(job, base_dir="base", **options)  # type: ignore[arg-type]
    capfd.readouterr()
    assert main(["up", "--base-dir", "base", *words]) == exit_code_of(raised.value)
    assert capfd.readouterr().err == f"oobleck: {raised.value}\n"


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        ({"max_step": 3}, ConfigError, r"the job given to launch\(\): unknown key 'max_step'.*max_steps\?"),
        ({"max_steps": {1, 2}}, ConfigError, "a setting is not a plain value"),
        (oobleck.Job(max_steps=0), ConfigError, "the job given to launch.*max_steps"),
        ("train.sh", UsageError, r"train.sh: a job is a script \(.py\) or a job file \(.yaml\)"),
        (7, UsageError, "launch.. takes a path, a job file's keys, an oobleck.Job or a function .*, not 7"),
        (oobleck.Job(model=lambda: []), ConfigError, "model: .*workers cannot find it"),  # noqa: PIE807
    ],
)
def test_a_job_that_is_none_is_refused_without_a_process(job: Any, kind: type[Exception], text: str, tmp_path: Path):
    with pytest.raises(kind, match=text):
        oobleck.launch(job, local=2, base_dir=tmp_path)


def test_arguments_are_for_scripts(tmp_path: Path):
    with pytest.raises(UsageError, match="arguments: only a script takes them, and job"):
        oobleck.launch("job.yaml", arguments=["--x"], local=2, base_dir=tmp_path)


def test_the_same_job_is_the_same_file(tmp_path: Path):
    from oobleck.cli.launch.words import job_words

    first, again, other = (job_words({"max_steps": steps}, (), tmp_path) for steps in (3, 3, 4))
    assert first == again != other


def test_a_run_that_waits_for_nodes_can_be_seen_and_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    run = oobleck.launch({"tag": "waits"}, dial_in="127.0.0.1:0", nodes=2, base_dir=tmp_path)
    with run:
        said = ""
        while "waiting for 2 nodes: oobleck node " not in said:
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert (run.tag, run.is_active, run.status().state) == ("waits", True, RunState.STARTING)
        assert repr(run) == "<oobleck run waits: starting, step 0 of 0>"
        with pytest.raises(TimeoutError, match="run waits is still active"):
            run.wait(timeout_s=0.01)
    assert not run.is_active
    assert list(run) == []
    with pytest.raises(RunFailed, match="before it had begun") as raised:
        run.wait()
    assert raised.value.exit_code == ExitCode.INTERRUPTED
