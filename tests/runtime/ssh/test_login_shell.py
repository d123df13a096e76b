"""What a login shell prints before a command is told from what the command prints, in every shell that is there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from oobleck.runtime.ssh.asyncssh_adapter import Preamble, marked

SHELLS = ["sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh"]


@pytest.mark.parametrize("noise", ["", "echo welcome; ", "printf welcome; "], ids=["silent", "line", "part of a line"])
@pytest.mark.parametrize("shell", [name for name in SHELLS if shutil.which(name)])
def test_what_is_printed_before_a_command_is_kept_apart(shell: str, noise: str) -> None:
    command = f"{noise}{marked('exec echo answer')}"
    printed = subprocess.run([shell, "-c", command], stdout=subprocess.PIPE, check=True).stdout
    preamble = Preamble()
    assert preamble.strip(printed) == b"answer\n"
    assert preamble.text == ("welcome" if noise else "")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_mark_is_found_in_whatever_pieces_it_comes(size: int) -> None:
    printed = b"hello " * 50 + b"oobleck-begins-here\n" + b"\x00\x01answer"
    preamble = Preamble()
    pieces = [preamble.strip(printed[at : at + size]) for at in range(0, len(printed), size)]
    assert b"".join(pieces) == b"\x00\x01answer"
    assert preamble.has_ended


def test_a_shell_that_repeats_the_command_does_not_begin_it() -> None:
    preamble = Preamble()
    assert preamble.strip(f"+ {marked('exec python')}\n".encode()) == b""
    assert not preamble.has_ended


def test_little_of_an_endless_greeting_is_kept_and_its_last_line_is_the_cause() -> None:
    preamble = Preamble()
    for _ in range(1000):
        preamble.strip(b"x" * 1000 + b"\n")
    preamble.strip(b"go away\n")
    assert len(preamble.text) <= 4096
    assert preamble.as_cause() == "; its login shell printed 'go away'"
