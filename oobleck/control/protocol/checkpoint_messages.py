"""Messages about checkpoints: saving, finding and restoring them.

master ── SaveState ──> workers        the next commit carries the request, so that all save after the same step
workers ── StateSaved ──> master       the agent sees it on its way, and writes the layers to disk
agents ── LayersPersisted ──> master   once all layers are on disk, the agents that wrote them get the manifest:
master ── CommitCheckpoint ──> agents ── CheckpointCommitted ──> master
master ── RemoveOld ──> agents         once it is complete, all other agents learn which checkpoints are too old

master ── PersistState ──> agents      an earlier run left a state only in memory: write its layers too
master ── RemoveUnfinished ──> agents  a save was given up: free its room on disk for the next one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .data_position import DataPosition
from .manifest import Manifest, SavedState, Shard
from .records import ForWorker, FromWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDigests(FromWorker):
    """Digests of a worker's layers after a step, for comparison with the other copies."""

    step: int
    generation: int
    layers: tuple[int, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoragePaths:
    """Where a node keeps its workers' states."""

    memory: str
    """A directory in a memory file system; files are named after the device."""
    checkpoints: str
    run: str
    """See `manifest.run_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveState(ForWorker):
    """Save the state after the first step from `step` on. All receive it; late workers ignore it."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSaved(FromWorker):
    """A worker's share of a save is complete in memory."""

    outlives_worker: ClassVar[bool] = True
    state: SavedState
    layers: tuple[int, ...]
    size_bytes: int
    pause_s: float
    copy_s: float = 0.0
    """How long the copy took, most of it while training continued."""


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
    """Remove checkpoints that are too old from disk, because a newer one is complete."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistState:
    """Write what the node's memory has of a state that earlier processes left there."""

    name: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveUnfinished:
    """Remove saves that were given up from disk, unless they have a manifest."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The checkpoint is complete on this agent's disk."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoints(ForWorker):
    request: int
    directory: str | None
    """Another place to look: a checkpoint, or a directory of checkpoints."""


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
    """Where it lies, if not in the run's own directory."""
    position: DataPosition | None = None
    """The run's position in its shards; None where samples have numbers."""
    origin: str | None = None
    """The checkpoint that its run began from, if a manifest has it."""
    is_final: bool = False
    """Whether its run had nothing more to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsFound(FromWorker):
    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    request: int
    found: tuple[FoundState, ...]
    problems: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Names of saves on disk without a manifest, which were never finished."""
    misfits: tuple[str, ...] = ()
    """Complete checkpoints of this tag, but of another model, each with what does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The checkpoint that a plan update goes back to."""

    name: str
    directory: str | None
    """Where it lies, if not in the run's own directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFailed(FromWorker):
    """A layer of a checkpoint cannot be read, or differs from what was saved."""

    generation: int
    name: str
    problem: str
