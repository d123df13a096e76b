"""Checkpoints in an S3 store that throttles, keeps half of what it is sent, and refuses expired credentials."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import trio

from oobleck.cli.main import main
from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.host.places import place_of
from oobleck.job import CheckpointSpec
from oobleck.runtime.agent.checkpoint_store import NodeCheckpoints
from oobleck.runtime.files.agent_dir import ONLY_COPY, AgentDir
from oobleck.storage import CheckpointDirectory, Manifest, read_layer_file, remote
from oobleck.training.checkpoint.state import StateReader
from tests.s3_server import Store, serve_s3

from .saving_processes import save_step, state_after

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve_s3("bucket") as store:
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.answered.clear()
    return server


@pytest.fixture
def directory(store: Store, request: pytest.FixtureRequest) -> CheckpointDirectory:
    return CheckpointDirectory(place_of(f"s3://bucket/{abs(hash(request.node.name))}", "checkpoint.directory"))


def assert_whole(directory: CheckpointDirectory, manifest: Manifest) -> None:
    assert list(directory.faults(manifest)) == []
    assert directory.layers_here(manifest) == tuple(range(NUM_LAYERS))
    reader = StateReader(Path("/nonexistent"), "device0", directory)
    for layer, tensors in state_after(manifest.step, NUM_LAYERS).items():
        loaded = reader.load(manifest.name, layer)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


def test_what_was_saved_is_found_read_back_and_removed(directory: CheckpointDirectory, tmp_path: Path) -> None:
    assert (directory.names(), directory.find()) == ((), ())
    manifests = [save_step(directory, tmp_path, step, NUM_LAYERS) for step in (10, 20)]
    assert [found.manifest for found in directory.find()] == manifests[::-1]
    assert_whole(directory, manifests[0])
    directory.remove([manifests[0].name])
    assert directory.names() == (manifests[1].name,)
    (directory.path / manifests[1].name / "manifest.json").unlink()
    assert directory.is_unfinished(manifests[1].name)
    assert directory.find()[0].manifest is None
    directory.remove_unfinished(directory.names())
    assert directory.names() == ()


@pytest.mark.parametrize("error", ["SlowDown", "ExpiredToken"])
def test_refused_requests_cost_tries_and_no_checkpoint(
    directory: CheckpointDirectory, store: Store, tmp_path: Path, error: str
) -> None:
    store.refuses = {error: 3}
    manifest = save_step(directory, tmp_path, 10, NUM_LAYERS)
    assert store.answered == [error] * 3
    store.refuses = {error: 2}
    assert_whole(directory, manifest)
    assert store.answered == [error] * 5


def test_a_manifest_that_cannot_be_had_is_not_taken_for_a_damaged_one(
    directory: CheckpointDirectory, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run would go back to an older checkpoint because a store was busy."""
    manifest = save_step(directory, tmp_path, 10, NUM_LAYERS)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    store.refuses = {"SlowDown": 1000}
    try:
        with remote.patience(), pytest.raises(remote.StoreError, match=r"manifest\.json: "):
            directory.manifest(manifest.name)
    finally:
        store.refuses = {}
    assert directory.find()[0].manifest == manifest


def test_a_layer_that_cannot_be_had_is_not_taken_for_a_damaged_one(
    directory: CheckpointDirectory, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = save_step(directory, tmp_path, 10, NUM_LAYERS)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    path = directory.path / manifest.name / "layer-0001.safetensors"
    store.refuses = {"SlowDown": 1000}
    try:
        with remote.patience(), pytest.raises(remote.StoreError, match=r"layer-0001\.safetensors: .*SlowDown"):
            read_layer_file(path)
    finally:
        store.refuses = {}
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match=r"layer-0001\.safetensors: missing"):
        read_layer_file(path)


@pytest.mark.slow
async def test_an_agent_that_leaves_keeps_its_memory_if_the_store_does_not_answer(
    directory: CheckpointDirectory, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits for it in a thread: a cancelled wait ends at once."""
    node = AgentDir(f"test-{os.getpid()}", "node0")
    checkpoints = NodeCheckpoints(node, default_directory=tmp_path)
    checkpoints.open(CheckpointSpec(directory=str(directory.path)), run="run")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    store.refuses = {"SlowDown": 1000}
    try:
        with remote.patience(1.0), trio.move_on_after(0.1) as waiting:
            await checkpoints.discard_memory()
        assert waiting.cancelled_caught
        with remote.patience(1.5):  # by then, the first has ended as well
            await checkpoints.discard_memory()
        assert (node.memory / ONLY_COPY).exists()
        store.refuses = {}
        await checkpoints.discard_memory()
        assert not node.memory.exists()
    finally:
        store.refuses = {}
        shutil.rmtree(node.memory.parent, ignore_errors=True)


@pytest.mark.slow
def test_commands_name_a_store_that_refuses_and_hide_its_password(
    directory: CheckpointDirectory,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_step(CheckpointDirectory(tmp_path / "base" / "mine" / "checkpoints"), tmp_path, 10, NUM_LAYERS)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    base = ("--base-dir", str(tmp_path / "base"))
    for url in (str(directory.path), "s3://me:hunter2@bucket/x"):
        for words in (["list", url], ["inspect", url], ["export", "mine", url, *base]):
            store.refuses = {"SlowDown": 1000}
            with remote.patience():
                assert main(["checkpoint", *words]) == 78
            said = capsys.readouterr().err
            assert "s3://" in said
            assert ("hunter2" in said, said.count("\n")) == (False, 1)
    store.refuses = {}


def test_half_a_write_is_written_again(directory: CheckpointDirectory, store: Store, tmp_path: Path) -> None:
    store.cuts = 2
    manifest = save_step(directory, tmp_path, 10, NUM_LAYERS)
    assert store.answered == ["cut"] * 2
    assert_whole(directory, manifest)


def test_a_file_that_was_cut_later_is_named_and_not_loaded(directory: CheckpointDirectory, tmp_path: Path) -> None:
    manifest = save_step(directory, tmp_path, 10, NUM_LAYERS)
    path = directory.path / manifest.name / manifest.shards[1].file
    path.write_bytes(path.read_bytes()[:-8])
    assert directory.layers_here(manifest) == (0, 2)
    with pytest.raises(CorruptCheckpoint, match="it should have"):
        StateReader(Path("/nonexistent"), "device0", directory).load(manifest.name, 1)


def test_what_no_node_can_reach_is_refused_with_the_package_that_is_missing() -> None:
    with pytest.raises(
        ConfigError, match=r"checkpoint.directory: gs://bucket/x: .*pip install universal_pathlib gcsfs"
    ):
        place_of("gs://me:secret@bucket/x", "checkpoint.directory")
    with pytest.raises(ConfigError, match="--resume: nosuch://a/b is no URL that fsspec knows"):
        place_of("nosuch://a/b", "--resume")
    with pytest.raises(ConfigError, match="memory of one process"):
        place_of("memory://a/b", "--resume")
    assert place_of("file:///a%20b/c", "--resume") == Path("/a b/c")


_BESIDE_SSH = """if True:
    import sys
    import trio_asyncio
    from oobleck.host.places import place_of
    place = place_of("s3://bucket/beside-ssh", "here")
    place.write_text("x")
    assert place.read_text() == "x"
"""


def test_a_store_answers_beside_ssh_too(store: Store) -> None:
    """A master that reaches nodes by SSH has trio-asyncio, which replaces asyncio's event loops."""
    environment = {**os.environ, **store.environment}
    subprocess.run([sys.executable, "-c", _BESIDE_SSH], env=environment, check=True, timeout=60)
