"""Writes checkpoints that no run has saved, for runs to begin from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from oobleck import storage
from oobleck.training.model import ModelStructure

from .parts import model_metadata
from .state import write_layer

IMPORTED = "imported"
"""The tag of checkpoints that were imported, which belong to no run yet."""


def write_checkpoint(
    target: Path,
    structure: ModelStructure,
    state: Mapping[str, torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
    *,
    step: int,
) -> Path:
    """Write a checkpoint of `state` and the optimizer's `states`, by tensor id; return its path. Raises OSError."""

    def tensors_of(layer: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for each in structure.layer_parameters(layer):
            tensors[each] = state[each].detach().cpu()
            for key, value in states.get(id(state[each]), {}).items():
                tensors[f"optimizer.{key}.{each}"] = value
        return tensors

    return write_layers(target, structure, map(tensors_of, range(structure.num_layers)), step=step)


def write_layers(
    target: Path, structure: ModelStructure, layers: Iterable[Mapping[str, torch.Tensor]], *, step: int = 0
) -> Path:
    """Write a checkpoint that no run has saved, layer by layer, and return its path. Raises OSError."""
    name = storage.checkpoint_name(IMPORTED, step=step, generation=0)
    directory = storage.CheckpointDirectory(target)
    (target / name).mkdir(parents=True, exist_ok=True)
    metadata = model_metadata(structure)
    shards = [write_layer(directory, name, layer, tensors, metadata=metadata) for layer, tensors in enumerate(layers)]
    directory.commit(
        storage.Manifest(
            version=storage.MANIFEST_VERSION,
            name=name,
            tag=IMPORTED,
            run=IMPORTED,
            saved_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            step=step,
            generation=0,
            loss=None,
            seed=0,
            global_batch_size=1,
            samples_seen=0,
            data_digest="",
            layer_names=structure.layer_names,
            shards=tuple(shards),
        )
    )
    return target / name
