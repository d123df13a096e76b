"""Entries about steps, the checkpoints that are saved after them, and the records of shards that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.control.protocol import CommitRecord, DataPosition, StepRecords
from oobleck.planner import WorkerId

from .entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Entry):
    record: CommitRecord
    tokens: int

    @property
    def sentence(self) -> str:
        return f"step {self.record.step} committed: loss {self.record.loss:.4f}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return f"step {self.record.step} was committed with a loss of {self.record.loss}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone(Entry):
    """Many equal steps, up to the one committed now: a simulation of months has this in place of an entry for each."""

    first_step: int
    record: CommitRecord
    tokens_per_step: int

    @property
    def num_steps(self) -> int:
        return self.record.step - self.first_step + 1

    @property
    def sentence(self) -> str:
        return f"steps {self.first_step} to {self.record.step} committed, {self.record.duration_s:.3f} s each"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunsLong(Entry):
    """A step takes far longer than usual, but its workers make progress, so the run waits."""

    step: int
    running_s: float
    """Since the step before was committed, or the plan was ordered."""
    computing: tuple[WorkerId, ...]
    """The workers that others wait for; none where all exchange data and make progress with that."""
    microbatch: int | None
    """The microbatch that the first of these computes, counted from 0; None where it did not report one."""

    @property
    def sentence(self) -> str:
        ran = f"{self.running_s:.0f} s" if self.running_s < 120 else f"{self.running_s / 60:.0f} min"
        return f"still running step {self.step} after {ran}: {self._doing}"

    @property
    def _doing(self) -> str:
        if not self.computing:
            return "its workers exchange data"
        first, num_others = self.computing[0], len(self.computing) - 1
        what = "computes" if self.microbatch is None else f"computes microbatch {self.microbatch}"
        worker = f"{first.node}'s worker{f' {first.device}' if first.device else ''}"
        return f"{worker} {what}{f', and {num_others} more compute' if num_others else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Entry):
    """A step's model was evaluated on samples that it is not trained on."""

    step: int
    loss: float | None
    """None where the script itself evaluates the weights that were gathered."""
    num_samples: int
    duration_s: float

    @property
    def sentence(self) -> str:
        if self.loss is None:
            return f"the weights after step {self.step} are gathered for the script's evaluation"
        return f"evaluation after step {self.step}: loss {self.loss:.4f} ({self.num_samples} samples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiffer(Entry):
    """Copies of a layer differ after a step: a processor computed it wrongly, or memory corrupted it."""

    level: ClassVar[str] = "error"
    step: int
    layer: int
    odd: tuple[WorkerId, ...]
    """The workers that take the layer from the others."""
    trusted: tuple[WorkerId, ...]
    is_sure: bool
    """Whether the odd copies are known to be wrong: of two copies that differ, either may be."""

    @property
    def sentence(self) -> str:
        odd, trusted = (", ".join(map(str, worker_ids)) for worker_ids in (self.odd, self.trusted))
        text = f"after step {self.step} layer {self.layer} on {odd} differs from that on {trusted}"
        if self.is_sure:
            return f"{text}; {odd} computed it wrongly or corrupted it, and takes it from the others"
        return f"{text}; either may be right: {odd} takes it from the others; check all of these nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Entry):
    """A checkpoint is complete on disk."""

    name: str
    step: int
    saved_at: str
    size_bytes: int
    pause_s: float
    duration_s: float
    """How long it took from memory to disk."""

    @property
    def sentence(self) -> str:
        what = f"checkpoint of step {self.step}: {self.size_bytes / 2**20:.1f} MiB"
        return f"{what}; training waited {self.pause_s:.3f} s, the disk took {self.duration_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Entry):
    """A save was given up: there is no checkpoint of this step."""

    step: int
    """0 where the step is not known."""
    reason: str
    newest_step: int | None
    """The step of the newest checkpoint on disk; None where there is none."""
    is_our_doing: bool = False
    """Memory and disk are in order: a node was lost, and the next save follows at once."""

    @property
    def level(self) -> str:
        return "warning" if self.is_our_doing else "error"

    @property
    def sentence(self) -> str:
        what = f"step {self.step} is not saved" if self.step else "a save has failed"
        newest = f"the newest checkpoint is that of step {self.newest_step}"
        return f"{what}: {self.reason}; {'there is no checkpoint' if self.newest_step is None else newest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsKnown(Entry):
    """The shards of the job's data, in the order of their numbers."""

    names: tuple[str, ...]

    @property
    def sentence(self) -> str:
        return f"the data is in {len(self.names)} shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaced(Entry):
    """Steps take records from this position on; records assigned to later steps before are taken back."""

    generation: int
    """The generation whose plan is the first to follow it."""
    assignment_version: int
    step: int
    """The last step that is committed before."""
    position: DataPosition

    @property
    def sentence(self) -> str:
        return f"the data continues at record {self.position.records}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsDealt(Entry):
    """Which records a step takes; they are read once the step is committed."""

    records: StepRecords

    @property
    def sentence(self) -> str:
        return f"step {self.records.step} takes {self.records.num_records} records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardQuarantined(Entry):
    """A shard cannot be read: no step takes any more of it."""

    level: ClassVar[str] = "error"
    shard: str
    position: int
    problem: str

    @property
    def sentence(self) -> str:
        return f"{self.shard} is quarantined, so the data is incomplete: {self.problem}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return f"{self.shard}: {self.problem}"


DataEntry = ShardsKnown | DataPlaced | RecordsDealt | ShardQuarantined
StepEntry = StepDone | StepRunsLong | StepsDone | Evaluated | ReplicasDiffer | CheckpointSaved | SaveFailed | DataEntry
