"""Checkpoints as the coordinator knows them: those that are complete, and states that can be gone back to."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition, Restore
from oobleck.planner import WorkerId

__all__ = ["Candidate", "KnownCheckpoint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """A complete checkpoint in the run's directory."""

    name: str
    step: int
    saved_at: str
    is_final: bool = False
    """Of a run that had nothing more to train: it stays, whatever limit there is."""


@dataclass(slots=True)
class Candidate:
    """A state that can be gone back to."""

    name: str
    run: str
    step: int
    saved_at: str
    directory: str | None
    position: DataPosition | None = None
    origin: str | None = None
    is_final: bool = False
    is_on_disk: bool = False
    held: dict[WorkerId, frozenset[int]] = field(default_factory=dict)
    """The layers that each worker can read."""
    in_memory: set[str] = field(default_factory=set)
    """The nodes whose memory has some of it."""

    @property
    def restore(self) -> Restore:
        return Restore(name=self.name, directory=self.directory)

    def covers(self, num_layers: int) -> bool:
        return len(frozenset().union(*self.held.values())) == num_layers
