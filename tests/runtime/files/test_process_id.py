"""Telling processes apart by number and start: on real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.runtime.files.process_id import ProcessId


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_process_is_known_again_from_what_was_written(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    process = ProcessId.of(child.pid)
    assert process is not None
    (tmp_path / "note").write_text(f"{process}\n")
    assert ProcessId.read(tmp_path / "note") == process
    assert process.lives


@pytest.mark.parametrize("text", ["", "12", "12 34", "-1 0 boot", "one 2 boot", "12 34 boot more", "1\x00 2 b"])
def test_a_note_that_is_not_whole_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "note").write_text(text)
    assert ProcessId.read(tmp_path / "note") is None
    assert ProcessId.read(tmp_path / "none") is None


def test_another_process_with_the_number_is_never_signalled(child: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(child.pid)
    assert process is not None
    for other in (replace(process, started_ticks=process.started_ticks - 1), replace(process, boot="another")):
        assert not other.lives
        assert not other.send(signal.SIGKILL)
    assert child.poll() is None
    assert process.send(signal.SIGKILL)
    assert child.wait(5) == -signal.SIGKILL


def test_one_that_has_ended_does_not_live_though_nobody_has_waited_for_it(child: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(child.pid)
    assert process is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.lives
    assert not process.send(signal.SIGTERM)
    child.wait()
    assert ProcessId.of(child.pid) is None
    assert not process.send(signal.SIGTERM)
