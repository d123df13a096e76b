"""What each of the devices that share a stage saves of a layer, and the whole layer from all parts.

A device saves its share of what is cut, and of what all of them hold its part of the rows, so that nothing is saved
twice. Files say along which dimension their parameters are put together; so they can be read on devices that share
stages otherwise, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from oobleck.training.model import ModelStructure, Share

Tensors = Mapping[str, torch.Tensor]
"""A layer's, by the names that files have them under: NAME, optimizer.KIND.NAME or training.WHAT."""

_JOINED_ALONG = "joined_along"
_OPTIMIZER = "optimizer."
_TRAINING = "training."


def model_metadata(structure: ModelStructure) -> dict[str, str]:
    """What every layer's file says of the model."""
    adapters = {} if structure.adapters is None else {"adapters": structure.adapters.as_json()}
    tied = json.dumps(dict(sorted(structure.anatomy.tied.items())))
    buffers = json.dumps({name: str(dtype).removeprefix("torch.") for name, dtype in structure.buffers.items()})
    config = structure.config.to_json_string(use_diff=False)
    return {"config": config, "task": structure.task, "tied": tied, "buffers": buffers, **adapters}


def part_metadata(share: Share) -> dict[str, str]:
    """What a part's file says of itself; nothing where devices have stages for themselves."""
    if share.degree == 1:
        return {}
    along = {name: dimension for name, dimension in share.cut_dimensions.items() if dimension}
    return {"part": str(share.rank), "num_parts": str(share.degree), _JOINED_ALONG: json.dumps(along)}


def part_to_save(share: Share, state: Tensors) -> dict[str, torch.Tensor]:
    """Return what this device saves of its state of a layer: views, nothing is copied."""
    return {name: _part_to_save(share, name, tensor) for name, tensor in state.items()}


def join_parts(parts: Sequence[tuple[Mapping[str, str], Tensors]]) -> Tensors:
    """Put a layer together from its parts in order, each with its file's metadata; a single one is returned as it is.

    Raises ValueError or KeyError for what are no parts of one layer.
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


def _part_to_save(share: Share, name: str, tensor: torch.Tensor) -> torch.Tensor:
    is_share = _parameter_of(name) in share.cut_dimensions
    if share.degree == 1 or is_share or _is_everywhere(name, tensor):
        return tensor
    return torch.tensor_split(tensor, share.degree)[share.rank]


def _is_everywhere(name: str, tensor: torch.Tensor) -> bool:
    """Whether all parts have the same of it: a number, or what is no state of a parameter."""
    return tensor.ndim == 0 or name.startswith(_TRAINING)


def _parameter_of(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith(_OPTIMIZER) else name
