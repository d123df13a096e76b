"""What a run does about the memory that others have left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.runtime.agent_dir import AgentDir
from oobleck.runtime.checkpoint_store import remove_stale_memory

DAY_S = 86_400.0
NOW_S = 1_800_000_000.0


def left_behind(root: Path, run: str, age_s: float) -> Path:
    """A run's memory that was last used so long ago."""
    file = root / run / "node0" / "device0.1"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"state")
    for path in (file, file.parent, file.parent.parent):
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return root / run


def test_memory_of_runs_that_ended_long_ago_is_given_back(tmp_path: Path) -> None:
    old, recent = left_behind(tmp_path, "old", DAY_S + 1), left_behind(tmp_path, "recent", DAY_S - 1)
    own = left_behind(tmp_path, "own", 9 * DAY_S)
    remove_stale_memory(own, now_s=NOW_S)
    assert (old.exists(), recent.exists(), own.exists()) == (False, True, True)


def test_memory_of_a_run_whose_agent_lives_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    living = left_behind(tmp_path / "memory", "living", 9 * DAY_S)
    directory = AgentDir("living", "node0")
    directory.create()
    command = [sys.executable, "-c", "input('up')", "oobleck"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.read(2) == b"up"
        directory.pid_file("agent").write_text(f"{agent.pid}\n")
        remove_stale_memory(tmp_path / "memory" / "own", now_s=NOW_S)
        assert living.exists()
        agent.communicate(b"\n")
    remove_stale_memory(tmp_path / "memory" / "own", now_s=NOW_S)
    assert not living.exists()


def test_nothing_to_give_back_is_no_error(tmp_path: Path) -> None:
    remove_stale_memory(tmp_path / "not" / "there", now_s=NOW_S)
