"""The part of a layer that each device of a shared stage saves, and the whole layer from all parts.

Files record the dimension along which to join each parameter, so devices that share stages differently, or not at all,
can read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from oobleck import storage
from oobleck.training.model import ModelStructure, Share
from oobleck.training.tensor_bytes import as_tensor

Tensors = Mapping[str, torch.Tensor]
"""A layer's tensors, keyed by their names in files: NAME, optimizer.KIND.NAME or training.WHAT."""

_JOINED_ALONG = "joined_along"
OPTIMIZER = "optimizer."
"""Begins the names of the optimizer's tensors."""
_TRAINING = "training."


def model_metadata(structure: ModelStructure) -> dict[str, str]:
    """Return the metadata about the model in every layer's file."""
    adapters = {} if structure.adapters is None else {"adapters": structure.adapters.as_json()}
    tied = json.dumps(dict(sorted(structure.anatomy.tied.items())))
    buffers = json.dumps({name: str(dtype).removeprefix("torch.") for name, dtype in structure.buffers.items()})
    config = structure.config.to_json_string(use_diff=False)
    kind = {"class": structure.whole_class} if structure.whole_loss is not None else {"task": structure.task}
    return {"config": config, **kind, "tied": tied, "buffers": buffers, **adapters}


def part_metadata(share: Share) -> dict[str, str]:
    """Return a part's own metadata, empty where devices do not share stages."""
    if share.degree == 1:
        return {}
    along = {name: dimension for name, dimension in share.cut_dimensions.items() if dimension}
    return {"part": str(share.rank), "num_parts": str(share.degree), _JOINED_ALONG: json.dumps(along)}


def part_to_save(share: Share, state: Tensors) -> dict[str, torch.Tensor]:
    """Return the part of a layer's state that this device saves, as views."""
    part = dict(state)
    for name, tensor in state.items():
        is_cut = _parameter_of(name) in share.cut_dimensions
        # Devices share the rows of replicated tensors, so that nothing is saved twice.
        if share.degree > 1 and not is_cut and not _is_everywhere(name, tensor):
            part[name] = torch.tensor_split(tensor, share.degree)[share.rank]
    return part


def shards_of(manifest: storage.Manifest, layer: int) -> list[storage.Shard]:
    """Return the files of a layer's parts, in order."""
    return sorted((shard for shard in manifest.shards if shard.layer == layer), key=lambda shard: shard.part)


def read_part(path: Path) -> tuple[Mapping[str, str], Tensors]:
    """Return the metadata and the tensors of a layer file, as views of it. Raises CorruptCheckpoint."""
    file = storage.read_layer_file(path)
    return file.metadata, {name: as_tensor(spec, data) for name, (spec, data) in file.tensors.items()}


def join_parts(parts: Sequence[tuple[Mapping[str, str], Tensors]]) -> Tensors:
    """Join a layer from its parts in order, each with its file's metadata. Returns a single part itself.

    Raises ValueError or KeyError unless they are the parts of one layer.
    """
    if len(parts) == 1:
        return parts[0][1]
    metadata, first = parts[0]
    along: Mapping[str, int] = json.loads(metadata[_JOINED_ALONG])
    return {
        name: tensor
        if _is_everywhere(name, tensor)
        else torch.cat([tensors[name] for _, tensors in parts], along.get(_parameter_of(name), 0))
        for name, tensor in first.items()
    }


def cut_state(share: Share, state: Tensors) -> Tensors:
    """Return this device's share of a whole layer's state."""
    if share.degree == 1:
        return state
    return {
        name: tensor if _is_everywhere(name, tensor) else share.part_of(_parameter_of(name), tensor)
        for name, tensor in state.items()
    }


def without_states(tensors: Tensors) -> Tensors:
    """Return the weights among a layer's tensors."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith((OPTIMIZER, _TRAINING))}


def _is_everywhere(name: str, tensor: torch.Tensor) -> bool:
    """Return whether every part has all of it: it is a number, or not the state of a parameter."""
    return tensor.ndim == 0 or name.startswith(_TRAINING)


def _parameter_of(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith(OPTIMIZER) else name
