"""Checkpoints on disk: complete or not, whole or not, and what is told of those that are not."""

from __future__ import annotations

import json
import queue
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oobleck.control.protocol import StateNotSaved, StateSaved
from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.storage import (
    CheckpointDirectory,
    FlashMemory,
    Layout,
    Manifest,
    TensorSpec,
    checkpoint_name,
    find_slots,
    read_layer_file,
)
from oobleck.training.checkpoint.state import FlashSaver, StateReader

from .saving_processes import RUN, save_step, state_after

NUM_LAYERS = 3


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints")


def save(directory: CheckpointDirectory, step: int) -> Manifest:
    return save_step(directory, directory.path.parent / "memory", step, NUM_LAYERS)


def test_what_was_saved_is_found_and_read_back(directory: CheckpointDirectory) -> None:
    manifests = [save(directory, step) for step in (10, 20)]
    assert [found.manifest for found in directory.find()] == manifests[::-1]
    reader = StateReader(Path("/nonexistent"), "device0", directory)
    for manifest in manifests:
        assert list(directory.faults(manifest)) == []
        for layer, tensors in state_after(manifest.step, NUM_LAYERS).items():
            loaded = reader.load(manifest.name, layer)
            assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())


def test_the_library_reads_our_files_and_we_read_its_own(directory: CheckpointDirectory, tmp_path: Path) -> None:
    manifest = save(directory, 5)
    ours = load_file(directory.path / manifest.name / manifest.shards[1].file)
    expected = state_after(5, NUM_LAYERS)[1]
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], tensor) for key, tensor in expected.items())

    save_file(expected, tmp_path / "theirs.safetensors", metadata={"by": "them"})
    theirs = read_layer_file(tmp_path / "theirs.safetensors")
    assert theirs.metadata == {"by": "them"}
    assert bytes(theirs.tensors["bias"][1]) == bytes(expected["bias"].view(torch.uint8).numpy())


def test_a_slot_that_has_a_newer_state_by_now_is_not_written_under_the_older_name(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    reports: queue.SimpleQueue[StateSaved | StateNotSaved] = queue.SimpleQueue()
    saver = FlashSaver(tmp_path / "memory", "device0", metadata={"config": "{}"}, report=reports.put)
    names = {step: checkpoint_name(RUN, step=step, generation=1) for step in (10, 20, 30)}

    def save_in_memory(step: int) -> None:
        saver.save(state_after(step, NUM_LAYERS), name=names[step], step=step, generation=1)
        assert isinstance(reports.get(timeout=60.0), StateSaved)

    save_in_memory(10)
    (found,) = find_slots(tmp_path / "memory", "device0")
    save_in_memory(20)
    save_in_memory(30)  # where the state of step 10 was
    with pytest.raises(CorruptCheckpoint, match="step-00000010"):
        directory.persist(names[10], found)
    assert directory.names() == ()
    directory.persist(names[30], found)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "it should have"),
        (lambda path: path.write_bytes(b""), "0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "changed: its SHA-256"),
    ],
    ids=["missing", "truncated", "empty", "changed"],
)
def test_a_harmed_file_is_named_and_not_loaded(directory: CheckpointDirectory, harm, told: str) -> None:
    manifest = save(directory, 5)
    path = directory.path / manifest.name / "layer-0001.safetensors"
    harm(path)
    (fault,) = directory.faults(manifest)
    assert fault.file == path
    assert told in str(fault)
    reader = StateReader(Path("/nonexistent"), "device0", directory)
    with pytest.raises(CorruptCheckpoint, match=r"layer-0001.safetensors: "):
        reader.load(manifest.name, 1)
    reader.load(manifest.name, 0)


def test_memory_serves_where_the_disk_was_harmed(directory: CheckpointDirectory, tmp_path: Path) -> None:
    manifest = save(directory, 5)
    (directory.path / manifest.name / "layer-0001.safetensors").unlink()
    assert directory.layers_here(manifest) == (0, 2)
    reader = StateReader(tmp_path / "memory", "device0", directory)
    assert torch.equal(reader.load(manifest.name, 1)["weight"], state_after(5, NUM_LAYERS)[1]["weight"])


def test_without_its_manifest_a_checkpoint_is_not_complete(directory: CheckpointDirectory) -> None:
    manifest = save(directory, 5)
    (directory.path / manifest.name / "manifest.json").unlink()
    (found,) = directory.find()
    assert found.manifest is None
    assert found.problem is not None
    assert "never finished" in found.problem


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 99}', '{"version": 1}', "\0", "[" * 100_000])
def test_a_manifest_that_cannot_be_read_is_named(directory: CheckpointDirectory, text: str) -> None:
    manifest = save(directory, 5)
    path = directory.path / manifest.name / "manifest.json"
    path.write_text(text)
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json: "):
        directory.manifest(manifest.name)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("step", -1, "step is -1"),
        ("step", 11, "are those of step-00000011"),
        ("generation", 7, "are those of"),
        ("num_parts", 0, "num_parts is 0"),
        ("layer_names", [], "no layers"),
        ("saved_at", "yesterday", "which is not a time"),
        ("samples_seen", -5, "samples_seen is -5"),
    ],
)
def test_what_no_run_writes_is_a_damaged_manifest(directory: CheckpointDirectory, key, value, told: str) -> None:
    manifest = save(directory, 10)
    path = directory.path / manifest.name / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    (found,) = directory.find()
    assert (found.manifest, found.is_damaged) == (None, True)
    assert f"{path}: damaged: " in (found.problem or "")
    assert told in (found.problem or "")


@pytest.mark.parametrize(
    ("change", "told"),
    [({"layer": 9}, "there are 3 layers"), ({"size_bytes": 0}, "has 0 bytes"), ({"sha256": "x"}, "SHA-256 'x'")],
)
def test_a_manifest_with_a_file_that_no_run_writes_is_damaged(directory: CheckpointDirectory, change, told) -> None:
    manifest = save(directory, 10)
    path = directory.path / manifest.name / "manifest.json"
    raw = json.loads(path.read_text())
    raw["shards"][0] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(CorruptCheckpoint, match=told):
        directory.manifest(manifest.name)


def test_what_was_given_up_is_removed_and_what_has_a_manifest_stays(directory: CheckpointDirectory) -> None:
    damaged, whole = save(directory, 10), save(directory, 20)
    (directory.path / damaged.name / "manifest.json").write_text("{")
    unfinished = directory.path / "step-00000030.x.1"
    unfinished.mkdir()
    assert not next(found for found in directory.find() if found.name == unfinished.name).is_damaged
    directory.remove_unfinished([damaged.name, whole.name, unfinished.name])
    assert directory.names() == (damaged.name, whole.name)


def test_a_manifest_cannot_point_out_of_its_directory(directory: CheckpointDirectory) -> None:
    manifest = save(directory, 5)
    path = directory.path / manifest.name / "manifest.json"
    path.write_text(path.read_text().replace("layer-0001.safetensors", "../../secret"))
    with pytest.raises((CorruptCheckpoint, ConfigError), match="secret"):
        directory.manifest(manifest.name)


def test_removing_leaves_what_is_not_ours(directory: CheckpointDirectory, tmp_path: Path) -> None:
    first, second = save(directory, 5), save(directory, 6)
    (tmp_path / "precious").mkdir()
    directory.remove([first.name, "step-00000001.gone.1", "../precious", "memory"])
    assert directory.names() == (second.name,)
    assert (tmp_path / "precious").is_dir()


def test_what_was_removed_is_not_completed_by_who_comes_late(directory: CheckpointDirectory) -> None:
    """Its layers are gone: nothing may say that they were there."""
    first, second = save(directory, 5), save(directory, 6)
    directory.remove([first.name])
    with pytest.raises(FileNotFoundError):
        directory.commit(first)
    assert [found.name for found in directory.find()] == [second.name]


def test_what_somebody_was_killed_over_while_removing_it_is_removed_by_the_next(directory: CheckpointDirectory) -> None:
    manifest = save(directory, 5)
    left = directory.path / ".removed-step-00000004.x.1"
    left.mkdir()
    (left / "layer-0000.safetensors").touch()
    directory.remove([])
    assert [path.name for path in directory.path.iterdir()] == [manifest.name]


def test_a_slot_that_changed_in_memory_is_not_written(directory: CheckpointDirectory, tmp_path: Path) -> None:
    layout = Layout.of({0: [TensorSpec(name="w", dtype="F32", shape=(8,))]}, metadata={})
    memory = FlashMemory.create(tmp_path / "m.1", layout)
    slot = memory.next_slot()
    slot.begin()
    slot.seal(b'"step-00000001.x.1"')
    slot.sum()
    slot.data[3] ^= 1
    with pytest.raises(CorruptCheckpoint, match="has changed"):
        directory.persist("step-00000001.x.1", slot)
    assert directory.names() == ()
