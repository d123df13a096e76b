"""The part of the protocol that is about checkpoints: saving, finding and restoring them.

master ── SaveState ──> workers        the next commit carries the wish, so that all save after the same step
workers ── StateSaved ──> master       on its way the agent hears of it, and writes the layers to disk
agents ── LayersPersisted ──> master   when all layers are there, those who wrote them get the manifest:
master ── CommitCheckpoint ──> agents ── CheckpointCommitted ──> master
master ── RemoveOld ──> agents         once it is complete, all others hear which checkpoints are too old

master ── PersistState ──> agents      a state that a run before has left in memory alone: its layers are written too
master ── RemoveUnfinished ──> agents  a save was given up: what is on disk of it takes room that the next one needs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .bases import ForWorker, FromWorker
from .data_position import DataPosition
from .manifest import Manifest, SavedState, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigests(FromWorker):
    """What a worker holds after a step, for comparison with the other copies."""

    step: int
    generation: int
    layers: tuple[int, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePaths:
    """Where a worker's state lies on its node."""

    memory: str
    """A directory in a memory file system; files are named for the device."""
    checkpoints: str
    run: str
    """See `manifest.run_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState(ForWorker):
    """Save the state after the first step that is not before `step`. All receive it; late ones ignore it."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(FromWorker):
    """A worker's share of a save is whole in memory."""

    outlives_worker: ClassVar[bool] = True
    state: SavedState
    layers: tuple[int, ...]
    size_bytes: int
    pause_s: float
    copy_s: float = 0.0
    """How long the copy took, most of it beside training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNotSaved(FromWorker):
    """A part of a save has failed, in memory or on disk."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    name: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersPersisted(FromWorker):
    """An agent has written a worker's share of a save to disk."""

    outlives_worker: ClassVar[bool] = True
    name: str
    shards: tuple[Shard, ...]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """All layers are on disk: give the checkpoint its manifest, then remove what is too old."""

    manifest: Manifest
    remove: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveOld:
    """Checkpoints that are too old, since a newer one is complete: remove what is on disk of them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistState:
    """Write all that the node's memory has of a state, which processes before have left there."""

    name: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveUnfinished:
    """Saves that were given up: remove what is on disk of them, unless they have a manifest."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The checkpoint is complete on this agent's disk."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoints(ForWorker):
    """Look for what can be restored, in memory and on disk."""

    request: int
    directory: str | None
    """Look here as well: a checkpoint, or a directory of checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundState:
    """A state that a worker can restore some layers of."""

    name: str
    run: str
    step: int
    saved_at: str
    layers: tuple[int, ...]
    in_memory: bool
    directory: str | None = None
    """Where it lies, when that is not the run's own."""
    position: DataPosition | None = None
    """Where in its shards the run is then; None where samples have numbers."""
    origin: str | None = None
    """The checkpoint that its run began from, where a manifest says so."""
    is_final: bool = False
    """Its run had nothing more to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsFound(FromWorker):
    """The answer to FindCheckpoints."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    request: int
    found: tuple[FoundState, ...]
    problems: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Names of saves on disk that were never finished: they have no manifest."""
    misfits: tuple[str, ...] = ()
    """Complete checkpoints of this tag that are of another model, each with what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The checkpoint that a plan update goes back to."""

    name: str
    directory: str | None
    """Where it lies, when that is not the run's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(FromWorker):
    """A layer of a checkpoint cannot be read, or is not what was saved."""

    generation: int
    name: str
    problem: str
