"""Commands whose answer cannot be written: a message, an exit code, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLAN = ("trace", "generate", "--nodes", "64", "--duration", "7d", "--preset", "spot-p3")
"""A long answer."""


def shell(command: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Run a line of shell, in which "$@" is an `oobleck` command; its exit status, and what came on stderr."""
    done = subprocess.run(
        ["/bin/bash", "-c", command, "bash", sys.executable, "-m", "oobleck", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("version",), PLAN, ("up", "--help")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_told_of(arguments: tuple[str, ...], unbuffered: str) -> None:
    code, errors = shell('"$@" >/dev/full', *arguments, PYTHONUNBUFFERED=unbuffered)
    assert (code, errors) == (1, "oobleck: standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", [("--help",), PLAN])
def test_a_reader_that_has_enough_hears_no_complaint(arguments: tuple[str, ...]) -> None:
    code, errors = shell('"$@" | true; exit ${PIPESTATUS[0]}', *arguments)
    assert (code, errors) == (1, "")


def test_closed_streams_are_an_error_for_a_command_that_has_something_to_say() -> None:
    assert shell('"$@" >&-', "version") == (1, "oobleck: standard output: Bad file descriptor\n")
    assert shell('"$@" <&- >&- 2>&-', "version") == (1, "")
    assert shell('"$@" 2>&- ; exit $?', "version") == (0, "")


def test_messages_that_cannot_be_written_change_no_exit_code() -> None:
    assert shell('"$@" 2>/dev/full', "status", "--base-dir", "/nonexistent") == (2, "")
    assert shell('"$@" 2>/dev/full', "nonsense") == (2, "")


@pytest.mark.parametrize(
    "columns", ["0", "1", *(pytest.param(words, marks=pytest.mark.slow) for words in ("-5", "many", "99999"))]
)
def test_any_width_will_do(columns: str) -> None:
    arguments = ("trace", "info", "/dev/stdin")
    line = '"${@:1:3}" ' + " ".join(PLAN) + f' | COLUMNS={columns} "$@"'
    assert shell(line, *arguments, PYTHONIOENCODING="ascii", LC_ALL="POSIX", TERM="dumb") == (0, "")
