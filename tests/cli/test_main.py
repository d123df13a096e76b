from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oobleck import __version__
from oobleck.cli.main import COMMANDS, CliCommand, main
from oobleck.cli.run.options import LAUNCHER_FLAGS, LAUNCHER_OPTIONS, options_text
from oobleck.errors import (
    ConfigError,
    ExitCode,
    NodeUnreachable,
    OobleckError,
    PeerError,
    PlanningError,
    Unrecoverable,
    UsageError,
    UserError,
    exit_code_of,
)
from oobleck.sim.policies import POLICIES

ROOT = Path(__file__).parents[2]


def fail_with(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in which `boom` is a command that raises; gives (exit status, stdout, stderr)."""

    def run(*arguments: str, raises: BaseException | None = None) -> tuple[int, str, str]:
        if raises is not None:
            monkeypatch.setitem(sys.modules, "boom", SimpleNamespace(boom=fail_with(raises)))
        command = CliCommand(name="boom", target="boom:boom", help="Go wrong.")
        code = main(list(arguments), commands=(*COMMANDS, command))
        return code, *capsys.readouterr()

    return run


def test_help_names_every_command_with_examples_and_exit_codes(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    for command in COMMANDS:
        assert f"  {command.name} " in out
    for words in ("oobleck up --local 4 ", "0         done", "75        stopped, and can be resumed", "130, 143"):
        assert words in out


def test_no_arguments_are_answered_with_the_help(run):
    code, out, err = run()
    assert code == ExitCode.USAGE
    assert "Commands:" in out + err


@pytest.mark.parametrize("name", ["status", "kill", "stop", "version"])
def test_the_help_of_a_command_says_what_it_takes(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert f"Usage: oobleck {name} " in out
    assert "--json" in out


def test_a_commands_examples_stay_one_below_the_other(run):
    _, out, _ = run("stop", "-h")
    assert "    oobleck stop                  finish" in out
    assert "    oobleck stop gpt2-demo --now  end at once" in out


def test_version(run):
    assert run("--version") == (0, f"oobleck {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["staus"], ["--nonsense"], ["kill"], ["stop", "--nonsense"], ["stop", "a", "b"]])
def test_wrong_usage_is_2_and_says_so(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (ExitCode.USAGE, "")
    assert "Usage: oobleck" in err


def test_a_mistyped_command_is_told_the_nearest(run):
    assert "status" in run("staus")[2]


ERRORS = [
    (UsageError("no node9"), 2),
    (ConfigError("job.yaml: bad"), 78),
    (PlanningError("does not fit"), 78),
    (PeerError("broken"), 1),
    (NodeUnreachable("node1", "no route"), 1),
    (Unrecoverable((3,)), 1),
    (UserError("bad"), 1),
    (OobleckError("odd"), 1),
]


@pytest.mark.parametrize(("error", "status"), ERRORS)
def test_an_error_of_ours_is_one_message_and_its_status(run, error, status):
    assert run("boom", raises=error) == (status, "", f"oobleck: {error}\n")
    assert exit_code_of(error) == status


def test_errors_of_concurrent_tasks_are_told_each_once(run):
    errors = [ConfigError("a"), ExceptionGroup("inner", [ConfigError("a"), NodeUnreachable("n", "gone")])]
    code, _, err = run("boom", raises=ExceptionGroup("outer", errors))
    assert (code, err) == (78, "oobleck: a\noobleck: n: gone\n")


def test_a_bug_keeps_its_traceback(run):
    with pytest.raises(ZeroDivisionError):
        run("boom", raises=ZeroDivisionError())
    with pytest.raises(ExceptionGroup):
        run("boom", raises=ExceptionGroup("outer", [UsageError("x"), ZeroDivisionError()]))


def test_an_interrupt_is_130(run):
    assert run("boom", raises=KeyboardInterrupt())[0] == 130
    assert run("boom", raises=BaseExceptionGroup("tasks", [KeyboardInterrupt(), UsageError("x")]))[0] == 130


@pytest.mark.parametrize(("end", "status"), [(SystemExit(75), 75), (SystemExit(None), 0), (SystemExit("text"), 1)])
def test_a_commands_own_exit_status_is_kept(run, end, status):
    assert run("boom", raises=end)[0] == status


def test_the_console_script_exits_with_the_status():
    command = [sys.executable, "-m", "oobleck", "stop", "--base-dir", "/nonexistent/here"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nonexistent/here" in done.stderr
    assert done.stderr.count("\n") == 1


def completed(words: str, **environment: str) -> list[str]:
    """What a shell completes the last of these words to, by its protocol."""
    asked = {"_OOBLECK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    command = [sys.executable, "-m", "oobleck"]
    done = subprocess.run(command, cwd=ROOT, env=asked | environment, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("oobleck st", ["status", "stop"]),
        ("oobleck stop --n", ["--now"]),
        ("oobleck up --resume ", ["auto", "newest", "never"]),
        ("oobleck up --scaling de", ["deadline="]),
        ("oobleck up --dtype float", ["float16", "float32", "float64"]),
        ("oobleck up --set optimizer.learning", ["optimizer.learning_rate="]),
        ("oobleck sim --policy restart,va", ["restart,varuna"]),
        ("oobleck sim --mode ", ["sweep", "cluster"]),
        ("oobleck plan --precision b", ["bfloat16"]),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: str, expected: list[str], tmp_path: Path):
    assert sorted(completed(words, OOBLECK_BASE_DIR=str(tmp_path))) == sorted(expected)


@pytest.mark.parametrize(
    "words", ["status", "stop --tag", "events", "report", "logs --tag", "checkpoint verify", "up --tag", "rm", "attach"]
)
def test_a_shell_completes_the_tags_of_runs(words: str, tmp_path: Path):
    for tag in ("llama-1", "llama-2", "other"):
        (tmp_path / tag).mkdir()
        (tmp_path / tag / "lock").touch()
    assert completed(f"oobleck {words} ll", OOBLECK_BASE_DIR=str(tmp_path)) == ["llama-1", "llama-2"]


def test_all_policies_can_be_completed():
    offered = completed("oobleck sim --policy ")
    assert set(offered) == set(POLICIES)


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        ("up", ["Nodes", "Job", "Plan", "Run", "Code and environment", "Output", "Checkpoints", "Other options"]),
        (
            "run",
            [
                "Options of oobleck run",
                "Nodes",
                "Node check",
                "Code and environment",
                "Failures",
                "Saved states",
                "Run",
            ],
        ),
        ("sim", ["Trace", "Model, devices and plan", "Policies and costs", "Run", "Output", "Other options"]),
        ("status", ["Options"]),
    ],
)
def test_help_lists_options_in_groups(command: str, groups: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([command, "--help"]) == 0
    titles = [line[:-1] for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"[A-Z][a-z, ]+:", line)]
    assert [title for title in titles if title not in ("Arguments", "Examples")] == groups


def test_help_of_run_has_every_option():
    text = options_text()
    for name in (*LAUNCHER_OPTIONS, *LAUNCHER_FLAGS):
        assert f"\n  {name} " in text


def test_errors_of_several_tasks_that_name_files_are_messages(run):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/file")
    status, _, stderr = run("boom", raises=ExceptionGroup("tasks", [full]))
    assert (status, stderr) == (78, "oobleck: /disk/file: No space left on device\n")
    with pytest.raises(ExceptionGroup):
        run("boom", raises=ExceptionGroup("tasks", [OSError(errno.ENOSPC, "of no file")]))
