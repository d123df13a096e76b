"""Checkpoints as the coordinator knows them: those that are complete, and states that can be gone back to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from oobleck.control.protocol import DataPosition, Restore, generation_of, run_of
from oobleck.planner import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCheckpoint:
    """A complete checkpoint in the run's directory."""

    name: str
    step: int
    saved_at: str
    is_final: bool = False
    """Of a run that had nothing more to train: it stays, whatever limit there is."""


def in_order(known: Collection[KnownCheckpoint], *, run: str) -> list[KnownCheckpoint]:
    """Sort checkpoints from old to new, each once: those that a run continues from as they come, then its own."""
    others = {each.name: each for each in known if run_of(each.name) != run}
    own = {each.name: each for each in known if run_of(each.name) == run}
    return [*others.values(), *sorted(own.values(), key=lambda each: (generation_of(each.name), each.step))]


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
