"""Entries about what outlives a run: saved states, and the data in shards."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.protocol import DataPosition, StepRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    t_s: float
    name: str
    step: int
    saved_at: str
    size_bytes: int
    pause_s: float
    """How long training waited."""
    duration_s: float
    """From memory to disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A save was given up: there is no checkpoint of this step."""

    t_s: float
    step: int
    """0 where it is not known which."""
    reason: str
    newest_step: int | None
    """Of the newest checkpoint on disk; None where there is none."""
    is_our_doing: bool = False
    """Nothing is wrong with memory or disk: a node was lost, and the next save follows at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsKnown:
    """The shards that the job's data is in, in the order in which they are numbered."""

    t_s: float
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaced:
    """Steps take records from this position on; what was assigned to later steps before is taken back."""

    t_s: float
    generation: int
    """Whose plan is the first to follow it."""
    assignment_version: int
    step: int
    """The last step that is committed by then."""
    position: DataPosition


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsDealt:
    """Which records a step takes; they are done once the step is."""

    t_s: float
    records: StepRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardQuarantined:
    """A shard cannot be read: nothing more is taken of it."""

    t_s: float
    shard: str
    """Its name."""
    position: int
    """Where reading failed."""
    problem: str
