"""What a worker reports. Its agent passes all of it on to the master, but `WorkerFailed` with the worker's exit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.plan import WorkerId

from .checkpoint_messages import CheckpointsFound, ReplicaDigests, RestoreFailed, StateNotSaved, StateSaved
from .ends import Raised
from .plan_orders import PlanId, PlanNeeded
from .records import CommitRecord, FromWorker, SectionRecord, WorkerAddress
from .shard_messages import RecordsFailed, ScanAnswer

Things = tuple[tuple[str, str], ...]
"""What workers compare: names, each with a digest or a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(FromWorker):
    """A worker has its data and its model's structure, and waits for a plan."""

    needs_orders: ClassVar[bool] = False
    pid: int
    data_digest: str
    """Equal on all nodes, else they would train on different text."""
    num_samples: int
    layer_names: tuple[str, ...]
    parameters: int
    torch_version: str
    address: WorkerAddress | None = None
    saves: bool = False
    alike: Things = ()
    """What else must be equal on all workers."""
    device_name: str = ""
    device_memory_bytes: int | None = None
    """How much of a GPU's memory a plan may use; None for a CPU."""
    gpu_id: str = ""
    """Globally unique; empty for a CPU."""
    shards: tuple[str, ...] = ()
    """The names of its data's shards; empty where samples have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEntered(FromWorker):
    """A worker is about to take its first samples of an epoch."""

    epoch: int
    alike: Things
    """What must be equal on all workers in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(FromWorker):
    """The measured profile of the model, as the JSON of a profile file."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    profile_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimed(FromWorker):
    """The times that one of two workers has measured on the link to the other."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    seconds: tuple[tuple[int, float], ...] = ()
    """(bytes of a message, the fewest seconds that it took)."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(FromWorker):
    """A worker has applied a step."""

    # The first and the last stage of each pipeline report it, so that the record survives f failures.
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating(FromWorker):
    """A worker evaluates, so that no step is due for a while; sent about every second."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(FromWorker):
    """A step's model is evaluated; sent by the first and the last stage of each pipeline."""

    step: int
    loss: float | None
    """None where the script itself evaluates the weights that were gathered."""
    num_samples: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(FromWorker):
    """The answer to a fence: this worker commits nothing of an older generation any more."""

    generation: int
    applied: int
    last_record: CommitRecord | None
    reduced: int | None
    """The step whose fully reduced gradients this worker holds and has not applied."""
    adopted: int
    """The newest generation whose plan it has adopted, transfers included; 0 for none."""
    layers: tuple[int, ...]
    """The layers that it holds whole, at version `applied`."""
    microbatches_done: int
    """Microbatches of the step in flight whose backward pass this worker has done."""
    broken: bool
    """Whether its part of the step in flight failed half-way, so that its pipeline cannot finish it."""
    partial: SectionRecord | None = None
    """The newest section of the step in flight that it has committed under its adopted plan."""
    has_open_groups: bool = False
    """Whether groups that sum its gradients are not formed yet, or sums are posted and not complete."""
    section_reduced: int | None = None
    """The number of the next section, if this worker holds its fully reduced gradients, not committed."""
    knows: PlanId | None = None
    """The newest plan that it was ordered, adopted or not: the next order may be a change of it."""
    waits_for: tuple[WorkerId, ...] = ()
    """The workers whose part it waits for; none while it computes. This and the next fields only on request."""
    has_come_on: bool = False
    """Whether it was slow, not stuck: it has made progress since it was asked."""
    unreachable: tuple[WorkerId, ...] = ()
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(FromWorker):
    """What a worker does; sent on request."""

    inquiry: int
    microbatches_done: int
    """As in `Status`, like the next two."""
    waits_for: tuple[WorkerId, ...]
    has_come_on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse(FromWorker):
    """How much processor time a worker's process and its children used, as its agent reports."""

    # A worker that computes may be unable to answer: a call into a compiler or a kernel holds the interpreter.

    inquiry: int
    used_s: float
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(FromWorker):
    """A worker has adopted a plan, and computes again (or waits as a spare)."""

    generation: int
    transfer_s: float
    """Seconds spent on receiving and sending layers."""
    received_bytes: int
    resumed_s: float
    """When it began to compute under the new plan, by its machine's monotonic clock."""
    busy_s: tuple[tuple[float, float], ...]
    """When it last computed for steps that were committed: (from, to) by the same clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace(FromWorker):
    """How long a worker computed since its last report, without waiting."""

    compute_s: float
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersMoving(FromWorker):
    """A worker still receives layers; sent now and then during long exchanges."""

    generation: int
    received_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailed(FromWorker):
    """A collective or a transfer failed under this worker: a suspicion, to be checked."""

    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(FromWorker):
    """A worker has applied the last step, or the one after which it was to stop."""

    applied: int
    computed_s: float = 0.0
    """Seconds that it computed in the latest steps."""
    waited_s: float = 0.0
    """Seconds that it waited in these steps, for its neighbours in the pipeline and for sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The exception that ends a worker. The agent reports it with the exit."""

    end: Raised


WorkerReport = (
    WorkerReady
    | Profiled
    | LinkTimed
    | StepCommitted
    | EpochEntered
    | Evaluating
    | EvaluationDone
    | Status
    | Activity
    | ProcessorUse
    | Resumed
    | Pace
    | LayersMoving
    | PeerFailed
    | PlanNeeded
    | Finished
    | StateSaved
    | StateNotSaved
    | CheckpointsFound
    | RestoreFailed
    | ReplicaDigests
    | ScanAnswer
    | RecordsFailed
)
"""What a worker sends to the master, through its agent."""

WorkerMessage = WorkerReport | WorkerFailed
"""What a worker sends to its agent."""
