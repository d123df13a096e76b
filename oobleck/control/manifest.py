"""What a checkpoint is: a value that its manifest file holds, that messages carry, and that decisions are made on.

A checkpoint's name is unique: step, run and generation. Nothing is ever written twice under one name, because in one
generation a step is committed once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from oobleck.errors import ConfigError

from .data_position import DataPosition

__all__ = ["MANIFEST_VERSION", "Manifest", "SavedState", "Shard", "checkpoint_name", "run_digest"]

MANIFEST_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a memory slot says of itself."""

    name: str
    """The checkpoint that it is a part of."""
    step: int
    """The newest step that it has applied."""
    generation: int
    """In which that step was committed."""
    saved_at: str
    """UTC, ISO 8601, by the machine's own clock."""
    position: DataPosition | None = None
    """Where in its shards the run is after that step; None where samples have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The file of one layer, or of a part of it."""

    layer: int
    part: int = 0
    """Which one, where devices shared each stage."""
    file: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if "/" in self.file or self.file in ("", ".", ".."):
            raise ConfigError(f"shard file {self.file!r}: must be a name in the checkpoint's own directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint: the model's state after a step, and what says how to go on from there.

    The position in the data is a function of (seed, step, global batch size), so these are all that is kept of it;
    where the data is in shards, it is `position`.
    """

    version: int
    name: str
    tag: str
    run: str
    """See `run_digest`."""
    saved_at: str
    """UTC, ISO 8601: when the last share was in memory."""
    step: int
    generation: int
    loss: float | None
    """Of that step; None where it was not heard of."""
    seed: int
    global_batch_size: int
    samples_seen: int
    data_digest: str
    layer_names: tuple[str, ...]
    num_parts: int = 1
    """Of each layer: how many devices shared a stage."""
    shards: tuple[Shard, ...]
    position: DataPosition | None = None
    """Where in its shards the run is; None where samples have numbers."""

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def run_digest(tag: str, started_at: str) -> str:
    """What tells a run from others of its tag: eight hexadecimal digits."""
    return hashlib.sha256(f"{tag}:{started_at}".encode()).hexdigest()[:8]


def checkpoint_name(run: str, *, step: int, generation: int) -> str:
    """The name of the checkpoint after a step that was committed in a generation of a run."""
    return f"step-{step:08d}.{run}.{generation}"
