"""Reads the weights of a whole checkpoint, for exports, and for scripts that continue after training."""

from __future__ import annotations

from pathlib import Path

import torch

from oobleck.errors import CorruptCheckpoint
from oobleck.storage import CheckpointDirectory

from .parts import Tensors, join_parts, read_part, shards_of

_SHARED = (
    "where the nodes save to disks of their own, bring their files here and start the same command again, or set "
    "checkpoint.directory to a directory that all share"
)
_NOT_WEIGHTS = ("optimizer.", "training.")


def newest_checkpoint(directory: Path) -> tuple[str, int]:
    """Return the name and the step of the newest checkpoint in a directory. Raises CorruptCheckpoint."""
    for entry in CheckpointDirectory(directory).find():
        if entry.manifest is not None:
            return entry.name, entry.manifest.step
    raise CorruptCheckpoint(f"{directory}: there is no checkpoint; {_SHARED}")


def newest_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint in a directory. Raises CorruptCheckpoint."""
    name, _ = newest_checkpoint(directory)
    return weights_of(directory, name)


def weights_of(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in a directory. Raises CorruptCheckpoint."""
    try:
        return read_weights(directory / name)[1]
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{error}; {_SHARED}") from error


def read_weights(checkpoint: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the metadata and the weights of a checkpoint's model. Verifies every file. Raises CorruptCheckpoint."""
    directory = CheckpointDirectory(checkpoint.parent)
    manifest = directory.manifest(checkpoint.name)
    faults = list(directory.faults(manifest))
    if faults:
        raise CorruptCheckpoint("; ".join(map(str, faults)))
    weights: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for layer in range(len(manifest.layer_names)):
        parts = [read_part(checkpoint / shard.file) for shard in shards_of(manifest, layer)]
        metadata = dict(parts[0][0])
        weights |= join_parts([(text, _without_states(tensors)) for text, tensors in parts])
    return metadata, weights


def _without_states(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_NOT_WEIGHTS)}
