"""What a worker says. Its agent relays all of it to the master but its last word, which comes with its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.plan import WorkerId

from .bases import FromWorker
from .checkpoint_messages import CheckpointsFound, ReplicaDigests, RestoreFailed, StateNotSaved, StateSaved
from .ends import Raised
from .plan_orders import PlanId, PlanNeeded
from .records import CommitRecord, SectionRecord, WorkerAddress
from .shard_messages import RecordsFailed, ScanAnswer

Things = tuple[tuple[str, str], ...]
"""What workers compare, a handful: what it is called, and a digest of it or a few words that say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady(FromWorker):
    """A worker has its data and its model's structure, and waits for a plan."""

    needs_orders: ClassVar[bool] = False
    pid: int
    data_digest: str
    """Equal on all nodes, or they would train on different text."""
    num_samples: int
    layer_names: tuple[str, ...]
    parameters: int
    """Number of the model's parameters, tied ones counted once."""
    torch_version: str
    address: WorkerAddress | None = None
    saves: bool = False
    """Whether it has a place to save its state in, and to restore it from."""
    alike: Things = ()
    """What else it must have as all others do."""
    device_name: str = ""
    """What the worker computes on, as its maker calls it."""
    device_memory_bytes: int | None = None
    """What a plan may use of a GPU's memory; None for a CPU."""
    shards: tuple[str, ...] = ()
    """The shards that its data is in, by name; empty where samples have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEntered(FromWorker):
    """A worker is about to take the first samples that it takes of an epoch."""

    epoch: int
    alike: Things
    """What it must have as all others do in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled(FromWorker):
    """The measured profile of the model, as the JSON of a profile file."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    profile_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimed(FromWorker):
    """What one of two workers has timed on the link to the other."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    seconds: tuple[tuple[int, float], ...] = ()
    """(bytes of a message, the least seconds that it took)."""
    error: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(FromWorker):
    """A worker has applied a step.

    The first and the last stage of each pipeline say so: the record survives f failures, and one of a lone pipeline
    while it is not heard.
    """

    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating(FromWorker):
    """A worker evaluates, so no step is to be expected for a while; said every second or so."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(FromWorker):
    """The model of a step is evaluated; said by the first and the last stage of each pipeline."""

    step: int
    loss: float
    num_samples: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(FromWorker):
    """The answer to a fence: nothing of an older generation will be committed by this worker any more."""

    generation: int
    applied: int
    last_record: CommitRecord | None
    reduced: int | None
    """The step whose fully reduced gradients this worker holds and has not applied."""
    adopted: int
    """The newest generation whose plan it has adopted, transfers included; 0 for none."""
    layers: tuple[int, ...]
    """The layers it holds whole, at version `applied`."""
    microbatches_done: int
    """Microbatches of the step in flight that this worker has taken backward."""
    broken: bool
    """Its part of the step in flight failed half-way, so its pipeline cannot finish it."""
    partial: SectionRecord | None = None
    """The newest section of the step in flight that it has committed under the plan that it has adopted."""
    has_open_groups: bool = False
    """Groups in which it sums gradients are not formed yet, or its part in sums is posted and not all are here."""
    section_reduced: int | None = None
    """The number of the section after, if this worker holds its fully reduced gradients and has not committed them."""
    knows: PlanId | None = None
    """The newest plan that it was ordered, whether or not it has adopted it: the next order may be a change of it."""
    waits_for: tuple[WorkerId, ...] = ()
    """The workers whose part it waits for; none while it computes. This and what follows only on request."""
    has_come_on: bool = False
    """It was slow, not stuck: since it was asked, it has computed, or had what it waited for."""
    unreachable: tuple[WorkerId, ...] = ()
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity(FromWorker):
    """What a worker does, on request."""

    inquiry: int
    microbatches_done: int
    """Of the step in flight, those that it has taken backward."""
    waits_for: tuple[WorkerId, ...]
    """The workers whose part it waits for; none while it computes."""
    has_come_on: bool
    """Since it was asked, it has computed what it was at, or had what it waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse(FromWorker):
    """How much processor time a worker's process used, its children included; its agent says so.

    So a worker is known to compute that cannot answer: a call into a compiler or a kernel may hold the interpreter.
    """

    inquiry: int
    used_s: float
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(FromWorker):
    """A worker has adopted a plan, and computes again (or waits as a spare)."""

    generation: int
    transfer_s: float
    """What it spent receiving and sending layers."""
    received_bytes: int
    resumed_s: float
    """When it began to compute under the new plan, by its machine's monotonic clock."""
    busy_s: tuple[tuple[float, float], ...]
    """When it computed for steps that were committed, most recently: (from, to) by the same clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace(FromWorker):
    """How long a worker computed since it said so last; waiting is left out."""

    compute_s: float
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersMoving(FromWorker):
    """A worker still receives layers that a plan gives it; said now and then, by exchanges that take long."""

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
    """A worker has applied the last step, or the one it was to stop after."""

    applied: int
    computed_s: float = 0.0
    """What it computed in the latest steps, in seconds."""
    waited_s: float = 0.0
    """What it waited meanwhile: for its neighbours in the pipeline, the bubble as it really was, and for sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker's last word: the exception that ends it. The agent reports it with the exit."""

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
"""What a worker says to the master, through its agent."""

WorkerMessage = WorkerReport | WorkerFailed
"""What a worker says to its agent."""
