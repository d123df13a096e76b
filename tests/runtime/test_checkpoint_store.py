"""What a run does about the memory that others have left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.checkpoint import FlashMemory, Layout, Manifest, SavedState, TensorSpec, checkpoint_name
from oobleck.runtime.agent_dir import AgentDir
from oobleck.runtime.checkpoint_store import NodeCheckpoints, remove_stale_memory
from oobleck.wire import encode_json

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


def state_in(memory: Path, saved_at: str) -> str:
    """A worker leaves a state in memory; returns its name."""
    memory.mkdir(parents=True, exist_ok=True)
    name = checkpoint_name("0000000a", step=5, generation=1)
    layout = Layout.of({0: [TensorSpec(name="weight", dtype="F32", shape=(4,))]}, metadata={})
    file = FlashMemory.create(memory / "device0.1", layout)
    slot = file.next_slot()
    slot.begin()
    slot.seal(encode_json(SavedState(name=name, step=5, generation=1, saved_at=saved_at)))
    file.close()
    return name


def test_memory_is_given_back_only_when_the_disk_has_what_it_has(tmp_path: Path) -> None:
    """Whoever left it there: an agent that ends may never have heard of the state."""
    directory = AgentDir(f"test-{os.getpid()}", "node0")
    checkpoints = NodeCheckpoints(directory, default_directory=tmp_path / "checkpoints")
    try:
        name = state_in(directory.memory, "2026-01-02T00:00:00")
        checkpoints.discard_memory()
        assert directory.memory.exists()
        shards = checkpoints._persist_all(name)
        manifest = Manifest(
            version=1, name=name, tag="t", run="0000000a", saved_at="2026-01-02T00:00:00", step=5, generation=1,
            loss=None, seed=0, global_batch_size=1, samples_seen=5, data_digest="", layer_names=("a",), shards=shards,
        )  # fmt: skip
        checkpoints._commit(manifest, ())
        checkpoints.discard_memory()
        assert not directory.memory.exists()
    finally:
        shutil.rmtree(directory.memory.parent, ignore_errors=True)


def test_what_no_disk_has_is_kept_for_a_week(tmp_path: Path) -> None:
    only = left_behind(tmp_path, "only", 6 * DAY_S)
    marker = only / "node0" / "only-copy"
    marker.touch()
    for path in (marker, marker.parent, only):
        os.utime(path, (NOW_S - 6 * DAY_S, NOW_S - 6 * DAY_S))
    remove_stale_memory(tmp_path / "own", now_s=NOW_S)
    assert only.exists()
    remove_stale_memory(tmp_path / "own", now_s=NOW_S + 2 * DAY_S)
    assert not only.exists()


def test_nothing_to_give_back_is_no_error(tmp_path: Path) -> None:
    remove_stale_memory(tmp_path / "not" / "there", now_s=NOW_S)
