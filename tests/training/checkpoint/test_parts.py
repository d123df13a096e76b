"""What devices that share stages save is the whole model's state, each piece once, and serves any other sharing."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oobleck.control.protocol import StateNotSaved, StateSaved
from oobleck.errors import CorruptCheckpoint
from oobleck.storage import MANIFEST_VERSION, CheckpointDirectory, Manifest, Shard, checkpoint_name, find_slots
from oobleck.training.checkpoint.conversion import export_model
from oobleck.training.checkpoint.parts import cut_state, join_parts, model_metadata, part_metadata, part_to_save
from oobleck.training.checkpoint.state import FlashSaver, StateReader
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import Share, share_of
from tests.training.zoo import structure_of

FAMILIES = ("llama", "llama-tied", "qwen3", "gpt_neox", "olmo2")
DEGREE = 2
NAME = checkpoint_name("0123abcd", step=5, generation=1)


def shares(structure: ModelStructure, degree: int = DEGREE) -> list[Share]:
    return [share_of(structure, rank=rank, degree=degree) for rank in range(degree)]


def state_of(structure: ModelStructure, layer: int) -> dict[str, torch.Tensor]:
    """A whole layer's: no two numbers are alike."""
    torch.manual_seed(layer)
    state: dict[str, torch.Tensor] = {}
    for name in structure.layer_parameters(layer):
        state[name] = torch.rand(structure.shapes[name])
        state[f"optimizer.exp_avg.{name}"] = torch.rand(structure.shapes[name])
        state[f"optimizer.mu_product.{name}"] = torch.rand(())
    return {**state, "training.loss_scale": torch.rand(3)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_hold_everything_once_and_are_the_whole_again(family: str) -> None:
    structure = structure_of(family)
    ranks = shares(structure)
    for layer in range(structure.num_layers):
        whole = state_of(structure, layer)
        parts = [part_to_save(share, cut_state(share, whole)) for share in ranks]
        assert_same(join_parts([(part_metadata(share), part) for share, part in zip(ranks, parts, strict=True)]), whole)
        for name, tensor in whole.items():
            if tensor.ndim and not name.startswith("training."):
                assert sum(part[name].numel() for part in parts) == tensor.numel(), name


def test_a_device_of_its_own_saves_what_it_has() -> None:
    structure = structure_of("gpt2")
    (share,) = shares(structure, 1)
    whole = state_of(structure, 1)
    assert part_metadata(share) == {}
    assert all(part is whole[name] for name, part in part_to_save(share, whole).items())


def saved(tmp_path: Path, structure: ModelStructure) -> CheckpointDirectory:
    """Two devices save all layers, to memory and to disk."""
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    shards: list[Shard] = []
    for share in shares(structure):
        reports: queue.SimpleQueue[StateSaved | StateNotSaved] = queue.SimpleQueue()
        metadata = {**model_metadata(structure), **part_metadata(share)}
        stem = f"device{share.rank}"
        saver = FlashSaver(tmp_path / "memory", stem, metadata=metadata, report=reports.put)
        layers = {
            layer: part_to_save(share, cut_state(share, state_of(structure, layer)))
            for layer in range(structure.num_layers)
        }
        saver.save(layers, name=NAME, step=5, generation=1)
        assert isinstance(reports.get(timeout=30), StateSaved)
        (slot,) = find_slots(tmp_path / "memory", stem)
        shards += directory.persist(NAME, slot)
    directory.commit(
        Manifest(
            version=MANIFEST_VERSION,
            name=NAME,
            tag="parts",
            run="0123abcd",
            saved_at="2026-01-01T00:00:00+00:00",
            step=5,
            generation=1,
            loss=None,
            seed=0,
            global_batch_size=1,
            samples_seen=5,
            data_digest="",
            layer_names=structure.layer_names,
            num_parts=DEGREE,
            shards=tuple(shards),
        )
    )
    return directory


def test_what_devices_saved_is_read_whole_from_memory_and_from_disk(tmp_path: Path) -> None:
    structure = structure_of("llama")
    directory = saved(tmp_path, structure)
    in_memory = StateReader(tmp_path / "memory", "device*", CheckpointDirectory(tmp_path / "nothing"))
    on_disk = StateReader(tmp_path / "nothing", "device*", directory)
    everything = tuple(range(structure.num_layers))
    assert [layers for _, layers in in_memory.in_memory()] == [everything]
    assert [directory.layers_here(entry.manifest) for entry in directory.find() if entry.manifest] == [everything]
    for layer in everything:
        for reader in (in_memory, on_disk):
            assert_same(dict(reader.load(NAME, layer)), state_of(structure, layer))


def test_a_layer_of_which_a_part_is_missing_is_not_there(tmp_path: Path) -> None:
    structure = structure_of("llama")
    directory = saved(tmp_path, structure)
    (tmp_path / "memory" / "device1.1").unlink()
    (directory.path / NAME / "layer-0002.1.safetensors").unlink()
    reader = StateReader(tmp_path / "memory", "device*", directory)
    assert [layers for _, layers in reader.in_memory()] == [()]
    (entry,) = directory.find()
    assert entry.manifest is not None
    assert 2 not in directory.layers_here(entry.manifest)
    assert 1 in directory.layers_here(entry.manifest)
    assert [fault.file.name for fault in directory.faults(entry.manifest)] == ["layer-0002.1.safetensors"]
    with pytest.raises(CorruptCheckpoint, match=r"layer-0002.1.safetensors: missing; .*1 of 2 parts"):
        reader.load(NAME, 2)


def test_a_model_saved_in_parts_is_exported_whole(tmp_path: Path) -> None:
    structure = structure_of("llama-tied")
    directory = saved(tmp_path, structure)
    export_model(directory.path / NAME, tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for layer in range(structure.num_layers):
        for name in structure.layer_parameters(layer):
            assert torch.equal(exported[name], state_of(structure, structure.layers_with(name)[-1])[name]), name
