"""Reads the weights of a whole checkpoint, for exports, and for scripts that continue after training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from oobleck.errors import CorruptCheckpoint
from oobleck.storage import CheckpointDirectory, Manifest

from .parts import OPTIMIZER, Tensors, join_parts, read_part, shards_of, without_states

_SHARED = (
    "where the nodes save to disks of their own, bring their files here and start the same command again, or set "
    "checkpoint.directory to a directory that all share"
)


def newest_checkpoint(directory: Path) -> tuple[str, int]:
    """Return the name and the step of the newest checkpoint in a directory. Raises CorruptCheckpoint."""
    for entry in CheckpointDirectory(directory).find():
        if entry.manifest is not None:
            return entry.name, entry.manifest.step
    raise CorruptCheckpoint(f"{directory}: there is no checkpoint; {_SHARED}")


def newest_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint in a directory. Raises CorruptCheckpoint."""
    name, _ = newest_checkpoint(directory)
    try:
        return read_weights(directory / name)[1]
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{error}; {_SHARED}") from error


def attach(checkpoint: Path, file: str, content: bytes) -> None:
    """Put a file of a script's into a checkpoint. Raises OSError."""
    CheckpointDirectory(checkpoint.parent).attach(checkpoint.name, file, content)


def attached(checkpoint: Path, file: str) -> bytes:
    """Return what a script has put into a checkpoint. Raises OSError."""
    return CheckpointDirectory(checkpoint.parent).attached(checkpoint.name, file)


def gathered_in(checkpoints: Path, step: int) -> Path:
    """Return the directory of the weights that workers gather at a step, by the directory of a run's checkpoints."""
    return checkpoints.with_name(f"{checkpoints.name}-gathered") / f"step-{step}"


def gathered_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in all layers' files of a directory, which may be a checkpoint. Raises CorruptCheckpoint."""
    parts: dict[str, list[tuple[Mapping[str, str], Tensors]]] = {}
    for path in sorted(directory.glob("layer-*.safetensors")):
        metadata, tensors = read_part(path)
        parts.setdefault(metadata["layer"], []).append((metadata, without_states(tensors)))
    if not parts:
        raise CorruptCheckpoint(f"{directory}: it has no weights; {_SHARED}")
    weights: dict[str, torch.Tensor] = {}
    for layer in parts.values():
        weights |= join_parts(sorted(layer, key=lambda part: int(part[0].get("part", 0))))
    return weights


def read_weights(checkpoint: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the metadata and the weights of a checkpoint's model. Verifies every file. Raises CorruptCheckpoint."""
    weights: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    for parts in _layers_of(checkpoint, _whole(checkpoint)):
        metadata = dict(parts[0][0])
        weights |= join_parts([(text, without_states(tensors)) for text, tensors in parts])
    return metadata, weights


def read_state(
    checkpoint: Path,
) -> tuple[Manifest, dict[str, str], dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return a checkpoint's manifest, metadata, weights, and the optimizer's tensors by parameter and kind.

    Verifies every file. Raises CorruptCheckpoint.
    """
    manifest = _whole(checkpoint)
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    metadata: dict[str, str] = {}
    for parts in _layers_of(checkpoint, manifest):
        metadata = dict(parts[0][0])
        layer = join_parts(parts)
        weights |= without_states(layer)
        for name, tensor in layer.items():
            if name.startswith(OPTIMIZER):
                kind, parameter = name.removeprefix(OPTIMIZER).split(".", 1)
                states.setdefault(parameter, {})[kind] = tensor
    return manifest, metadata, weights, states


def _whole(checkpoint: Path) -> Manifest:
    directory = CheckpointDirectory(checkpoint.parent)
    manifest = directory.manifest(checkpoint.name)
    faults = list(directory.faults(manifest))
    if faults:
        raise CorruptCheckpoint("; ".join(map(str, faults)))
    return manifest


def _layers_of(checkpoint: Path, manifest: Manifest) -> Iterator[list[tuple[Mapping[str, str], Tensors]]]:
    """Yield the parts of each layer."""
    for layer in range(len(manifest.layer_names)):
        yield [read_part(checkpoint / shard.file) for shard in shards_of(manifest, layer)]
