"""What a run does about the memory that others have left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleck.job import CheckpointSpec
from oobleck.runtime.agent.checkpoint_store import NodeCheckpoints, remove_stale_memory
from oobleck.runtime.files.agent_dir import AgentDir
from oobleck.runtime.files.process_id import ProcessId
from oobleck.storage import FlashMemory, Layout, Manifest, SavedState, Shard, TensorSpec, checkpoint_name
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


def test_memory_of_a_run_whose_agent_lives_is_kept(tmp_path: Path) -> None:
    """Wherever TMPDIR was when it began: what tells is beside the states."""
    living = left_behind(tmp_path, "living", 9 * DAY_S)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as agent:
        (living / "node0" / "agent.pid").write_text(f"{ProcessId.of(agent.pid)}\n")
        for path in (living, *living.rglob("*")):
            os.utime(path, (NOW_S - 9 * DAY_S, NOW_S - 9 * DAY_S))
        remove_stale_memory(tmp_path / "own", now_s=NOW_S)
        assert living.exists()
        agent.communicate(b"\n")
    remove_stale_memory(tmp_path / "own", now_s=NOW_S)
    assert not living.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_what_another_user_has_put_in_our_place_is_not_emptied(tmp_path: Path) -> None:
    user = 54_321
    elsewhere = Path("/dev/shm") / f"oobleck-{user}"
    stale = left_behind(tmp_path, "stale", 9 * DAY_S)
    for path in (tmp_path, stale, *stale.rglob("*")):
        os.chown(path, user, user)
    elsewhere.symlink_to(tmp_path)
    try:
        said = as_user(user, lambda: NodeCheckpoints(AgentDir("run", "node0"), default_directory=tmp_path))
    finally:
        elsewhere.unlink()
    assert f"{elsewhere} " in said
    assert "a link of user 0" in said
    assert (stale / "node0" / "device0.1").exists()


def as_user(user: int, make: Callable[[], NodeCheckpoints]) -> str:
    """What another user is told who opens the memory."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(user)
            make().open(CheckpointSpec(), run="run")
            os.write(writing, b"nothing")
        except BaseException as error:  # noqa: BLE001  a process of its own: the test hears what it was
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


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


def manifest_of(name: str, shards: tuple[Shard, ...]) -> Manifest:
    return Manifest(
        version=1, name=name, tag="t", run="0000000a", saved_at="2026-01-02T00:00:00", step=5, generation=1,
        loss=None, seed=0, global_batch_size=1, samples_seen=5, data_digest="", layer_names=("a",), shards=shards,
    )  # fmt: skip


async def test_a_save_that_was_given_up_on_a_full_disk_is_completed_by_nobody(tmp_path: Path) -> None:
    """One node finds no room for the manifest, the save is removed, and so there is room for another's manifest."""
    own = [AgentDir(f"test-{os.getpid()}", f"node{number}") for number in range(3)]
    failing, writing, resting = (NodeCheckpoints(each, default_directory=tmp_path / "checkpoints") for each in own)
    try:
        name = state_in(own[1].memory, "2026-01-02T00:00:00")
        manifest = manifest_of(name, await writing.persist_all(name))
        await failing.remove_unfinished((name,))
        with pytest.raises(FileNotFoundError):
            await writing.commit(manifest, ())
        await resting.commit(manifest, ())  # it has nothing to complete
        assert list((tmp_path / "checkpoints").iterdir()) == []
    finally:
        shutil.rmtree(own[1].memory.parent, ignore_errors=True)


async def test_memory_is_given_back_only_when_the_disk_has_what_it_has(tmp_path: Path) -> None:
    """Whoever left it there: an agent that ends may never have heard of the state."""
    directory = AgentDir(f"test-{os.getpid()}", "node0")
    checkpoints = NodeCheckpoints(directory, default_directory=tmp_path / "checkpoints")
    try:
        name = state_in(directory.memory, "2026-01-02T00:00:00")
        await checkpoints.discard_memory()
        assert directory.memory.exists()
        shards = await checkpoints.persist_all(name)
        await checkpoints.commit(manifest_of(name, shards), ())
        await checkpoints.discard_memory()
        assert not directory.memory.exists()
    finally:
        shutil.rmtree(directory.memory.parent, ignore_errors=True)


async def test_memory_that_a_clock_has_dated_later_than_its_copy_on_disk_is_given_back(tmp_path: Path) -> None:
    """The manifest has the time of another node."""
    directory = AgentDir(f"test-{os.getpid()}", "node0")
    checkpoints = NodeCheckpoints(directory, default_directory=tmp_path / "checkpoints")
    try:
        name = state_in(directory.memory, "2026-01-03T00:00:00")
        await checkpoints.commit(manifest_of(name, await checkpoints.persist_all(name)), ())
        await checkpoints.discard_memory()
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
