"""Entries about what outlives a run: saved states, and the data in shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.control.protocol import DataPosition, StepRecords
from oobleck.planner import WorkerId

from .entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Entry):
    """A checkpoint is complete on disk."""

    name: str
    step: int
    saved_at: str
    size_bytes: int
    pause_s: float
    duration_s: float
    """From memory to disk."""

    @property
    def sentence(self) -> str:
        what = f"checkpoint of step {self.step}: {self.size_bytes / 2**20:.1f} MiB"
        return f"{what}; training waited {self.pause_s:.3f} s, the disk took {self.duration_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Entry):
    """A save was given up: there is no checkpoint of this step."""

    step: int
    """0 where it is not known which."""
    reason: str
    newest_step: int | None
    """Of the newest checkpoint on disk; None where there is none."""
    is_our_doing: bool = False
    """Nothing is wrong with memory or disk: a node was lost, and the next save follows at once."""

    @property
    def level(self) -> str:
        return "warning" if self.is_our_doing else "error"

    @property
    def sentence(self) -> str:
        what = f"step {self.step} is not saved" if self.step else "a save has failed"
        newest = f"the newest checkpoint is that of step {self.newest_step}"
        return f"{what}: {self.reason}; {'there is none' if self.newest_step is None else newest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsKnown(Entry):
    """The shards that the job's data is in, in the order in which they are numbered."""

    names: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return f"the data is in {len(self.names)} shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaced(Entry):
    """Steps take records from this position on; what was assigned to later steps before is taken back."""

    generation: int
    """Whose plan is the first to follow it."""
    assignment_version: int
    step: int
    """The last step that is committed by then."""
    position: DataPosition

    @property
    def sentence(self) -> str:
        return f"the data continues at record {self.position.records}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsDealt(Entry):
    """Which records a step takes; they are done once the step is."""

    records: StepRecords

    @property
    def sentence(self) -> str:
        return f"step {self.records.step} takes {self.records.num_records} records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardQuarantined(Entry):
    """A shard cannot be read: nothing more is taken of it."""

    level: ClassVar[str] = "error"
    shard: str
    position: int
    """Where reading failed."""
    problem: str

    @property
    def sentence(self) -> str:
        return f"{self.shard} is quarantined, so the data is incomplete: {self.problem}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return f"{self.shard}: {self.problem}"


DataEntry = ShardsKnown | DataPlaced | RecordsDealt | ShardQuarantined
StateEntry = CheckpointSaved | SaveFailed | DataEntry
