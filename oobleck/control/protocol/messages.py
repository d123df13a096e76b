"""The protocol: one frozen dataclass for each line that master, agent and worker say to each other.

A worker speaks to the master through its agent, which relays what it does not handle itself. `device` is
the worker's device on its node. Generations are strictly increasing; whoever receives an order or an answer
of an old generation drops it. Steps count from 1: `applied == k` means that k optimizer steps were applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, LayerTransfer, WorkerId
from oobleck.schedule import ScheduleKind

from .checkpoint_messages import (
    CheckpointCommitted,
    CheckpointsFound,
    CommitCheckpoint,
    FindCheckpoints,
    FoundState,
    LayersPersisted,
    PersistState,
    RemoveUnfinished,
    ReplicaDigests,
    Restore,
    RestoreFailed,
    SaveState,
    StateNotSaved,
    StateSaved,
    StoragePaths,
)
from .shard_messages import (
    RecordRun,
    RecordsFailed,
    RecordsOver,
    ScanAnswer,
    ScanRange,
    ScanRequest,
    ScanResult,
    StepRecords,
)

__all__ = [
    "NOTHING",
    "PROTOCOL_VERSION",
    "UNSEEN_WORDS",
    "AgentMessage",
    "AgentStopped",
    "CheckpointCommitted",
    "CheckpointsFound",
    "CommitCheckpoint",
    "CommitRecord",
    "Configure",
    "Evaluating",
    "EvaluationDone",
    "Fence",
    "FindCheckpoints",
    "FinishStep",
    "Finished",
    "ForkServerEnded",
    "FoundState",
    "Greeting",
    "Heartbeat",
    "Hello",
    "KillWorker",
    "LayersMoving",
    "LayersPersisted",
    "Leaving",
    "MasterMessage",
    "Pace",
    "PartialStep",
    "PeerFailed",
    "PersistState",
    "PlanUpdate",
    "ProbeAddress",
    "ProfileRequest",
    "Profiled",
    "RecordRun",
    "RecordsFailed",
    "RecordsOver",
    "RemoveUnfinished",
    "ReplicaDigests",
    "Restore",
    "RestoreFailed",
    "Resumed",
    "SaveState",
    "ScanAnswer",
    "ScanRange",
    "ScanRequest",
    "ScanResult",
    "SectionRecord",
    "Segment",
    "SetUpWorker",
    "StartWorker",
    "StateNotSaved",
    "StateSaved",
    "Status",
    "StepCommitted",
    "StepRecords",
    "StopAgent",
    "StoragePaths",
    "StoreKeys",
    "StorePut",
    "WorkerBound",
    "WorkerExited",
    "WorkerFailed",
    "WorkerMessage",
    "WorkerReady",
    "WorkerStarted",
]

PROTOCOL_VERSION = 1

UNSEEN_WORDS = "nobody saw how: its fork server had ended before it"
"""The reason of a worker's end where there is none to be known."""


# --- the first frames ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first frame on a connection, from the master.

    The master speaks first because an SSH server may lose what a socket's owner says before its client has said
    anything (asyncssh's forwarder does).
    """

    protocol: int
    tag: str
    """The job's."""


# --- agent -> master ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The agent's answer to the greeting: who it is, and whether it fits."""

    protocol: int
    oobleck_version: str
    python_version: str
    node: str
    pid: int
    generation: int
    """The newest generation that this agent's workers were ordered to adopt; 0 for none."""
    workers: tuple[int, ...]
    """The devices that have a living worker."""
    num_cores: int
    memory_bytes: int
    """Main memory of the machine."""
    clock_s: float
    """The machine's monotonic clock at the time of sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Said by the agent every interval."""

    sequence: int | None
    """Where it is to be answered: the master says it again, with its number, once all before it is dealt with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """A worker process exists."""

    device: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker has its data and its model's structure, and waits for an order."""

    device: int
    pid: int
    data_digest: str
    """Equal on all nodes, or they would train on different text."""
    num_samples: int
    layer_names: tuple[str, ...]
    parameters: int
    """Number of the model's parameters, tied ones counted once."""
    torch_version: str
    probe_address: ProbeAddress | None = None
    """Where others can try whether they reach it."""
    saves: bool = False
    """Whether it has a place to save its state in, and to restore it from."""
    weights_digest: str = ""
    """Of the weights that the model starts from; equal on all nodes too."""
    device_name: str = ""
    """What the worker computes on, as its maker calls it."""
    shards: tuple[str, ...] = ()
    """The shards that its data is in, by name; empty where samples have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker process is gone; at most one of `exit_code` and `signal` is set."""

    device: int
    pid: int
    exit_code: int | None = None
    signal: int | None = None
    traceback: str | None = None
    """The Python exception that ended it, if one did."""
    user_error: str | None = None
    """What its user must change, when that is why it ended."""

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether nothing speaks for an error of its own."""
        return self.traceback is None and self.user_error is None and self.exit_code is None

    @property
    def reason(self) -> str:
        """The end in plain words."""
        if self.user_error is not None:
            return self.user_error
        if self.signal is not None:
            return f"killed by signal {self.signal}"
        if self.traceback:
            return self.traceback.strip().splitlines()[-1]
        if self.exit_code is None:
            return UNSEEN_WORDS
        return f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The measured profile of the model, as the JSON of a profile file."""

    device: int
    profile_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What is known of a committed step once it is committed: equal on every rank."""

    step: int
    generation: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    samples_repeated: int
    samples_missing: int
    duration_s: float
    loss_scale: float = 1.0
    """What the loss was multiplied with, in float16."""
    is_skipped: bool = False
    """Its gradients overflowed in float16: the step counts, and left the parameters as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRecord:
    """What is known of a section of a step once its gradients are committed: equal on every rank."""

    step: int
    generation: int
    """Of the plan under which it was run."""
    number: int
    """Sections of the step that are committed under that plan, this one included."""
    loss: float
    """The part of the step's loss that all its committed microbatches make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted:
    """A worker has applied a step.

    The first and the last stage of each pipeline say so: the record survives f failures, and one of a lone pipeline
    while nobody hears it.
    """

    device: int
    record: CommitRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating:
    """A worker evaluates, so no step is to be expected for a while; said every second or so."""

    device: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """The model of a step is evaluated; said by the first and the last stage of each pipeline."""

    device: int
    step: int
    loss: float
    num_samples: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The answer to a fence: nothing of an older generation will be committed by this worker any more."""

    device: int
    generation: int
    """The fence's."""
    applied: int
    """Steps applied."""
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
    section_reduced: int | None = None
    """The number of the section after, if this worker holds its fully reduced gradients and has not committed them."""
    waits_for: tuple[WorkerId, ...] = ()
    """The workers whose part it waits for; none while it computes. This and what follows only on request."""
    unreachable: tuple[WorkerId, ...] = ()
    """The workers whose doorbell does not answer."""
    stack: str = ""
    """Where its training thread is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A worker has adopted a plan, and computes again (or waits as a spare)."""

    device: int
    generation: int
    transfer_s: float
    """What it spent receiving and sending layers."""
    received_bytes: int
    resumed_s: float
    """When it began to compute under the new plan, by its machine's monotonic clock."""
    busy_s: tuple[tuple[float, float], ...]
    """When it computed for steps that were committed, most recently: (from, to) by the same clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long a worker computed since it said so last; waiting is left out."""

    device: int
    compute_s: float
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersMoving:
    """A worker still receives layers that a plan gives it; said now and then, by exchanges that take long."""

    device: int
    generation: int
    received_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailed:
    """A collective or a transfer failed under this worker: a suspicion, to be checked."""

    device: int
    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePut:
    """A rendezvous key that a worker puts up; the master passes it on to the nodes that want it: see `StoreKeys`."""

    key: str
    value: bytes
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has applied the last step, or the one it was to stop after."""

    device: int
    applied: int
    computed_s: float = 0.0
    """What it computed in the latest steps, in seconds."""
    waited_s: float = 0.0
    """What it waited meanwhile: for its neighbours in the pipeline, the bubble as it really was, and for sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """A worker's last word: the Python exception that ends it. The agent reports it with the exit."""

    traceback: str
    user_error: str | None = None
    """The message of an exception that says what the user must change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The node was given notice of its termination: it asks to be drained."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStopped:
    """The agent has ended its workers and leaves now."""

    reason: str
    is_failure: bool = False
    """It cannot do what it is for, which nobody has asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerEnded:
    """The process that forks the node's workers has ended. Workers that it has forked live on."""

    reason: str
    """How it ended, and what is done about it."""


# --- master -> agent and worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """The master's answer to the hello."""

    protocol: int
    oobleck_version: str
    job: JobSpec
    node: str
    devices: tuple[int, ...]
    address: str
    """Where the node's peers reach it: an address, a host name, or a network interface there."""
    torch_threads: int
    """Threads that each worker of this node computes with."""
    device_memory_bytes: int
    """What one worker of this node may use of the machine's memory."""
    num_sharing: int = 1
    """How many workers compute on the same device: more than one where nodes share it."""
    run: str
    """Tells this run from others of its tag: see `manifest.run_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Have a worker on a device: start one, unless it is there already."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Measure the model's layers on this device."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAddress:
    """Where a worker can be rung at: it listens there, and says nothing."""

    worker_id: WorkerId
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End a worker that is stuck; its exit is reported as any other."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """From now on commit nothing of an older generation; answer with a status.

    Workers of pipelines with a lost node stop what they do; the others finish their microbatches, and
    nobody waits for a reduction any more.
    """

    device: int
    generation: int
    lost: tuple[str, ...]
    """Nodes lost since the newest plan."""
    probe_addresses: tuple[ProbeAddress, ...] = ()
    """When given, nobody knows why no step is committed: tell what you wait for, and which of these do not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An extra program of a whole pipeline: microbatches of the step in flight that a broken one leaves."""

    segment: int
    """Identifies the segment; increasing."""
    pipeline: int
    """Index in the plan under which the step was begun."""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialStep:
    """What of a step is committed when a plan comes into force in the middle of it."""

    microbatches: tuple[int, ...] = ()
    """Sorted."""
    loss: float = 0.0
    """The part of the step's loss that these make."""
    generation: int = 0
    """Of the plan under which the newest of them were run; 0 where nothing is committed."""
    number: int = 0
    """Sections of the step that were committed under that plan."""


NOTHING = PartialStep()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUpdate:
    """Resolve what is in flight; then adopt the plan and train on.

    Resolving takes two moves, either of which may be nothing to do: `catch_up` or `catch_up_section`, then `finish`.
    """

    device: int
    generation: int
    catch_up: CommitRecord | None = None
    """A step that some survivor has applied: whoever has not applies it too, from its reduced gradients."""
    catch_up_section: SectionRecord | None = None
    """A section that some survivor has committed: whoever has not commits it too, from its reduced gradients."""
    finish: int | None = None
    """The step to finish under the old plan: the whole pipelines complete it and the segments, all survivors
    reduce, commit and apply it. None: what is in flight and not committed is forgotten, to be run again."""
    segments: tuple[Segment, ...] = ()
    """All extra segments of the step to finish so far."""
    lost: tuple[str, ...] = ()
    """Nodes of the old plan that take no part any more."""
    plan: ExecutionPlan
    pipeline_generations: tuple[int, ...]
    """For each pipeline of the plan, the generation in which the group that links its stages is formed."""
    schedules: tuple[ScheduleKind, ...]
    """For each pipeline of the plan, in which order its stages work."""
    boundary: int
    """Steps applied when the plan takes effect."""
    partial: PartialStep = NOTHING
    """What of the step after the boundary is committed then. The sums travel with the layers that change hands."""
    num_sections: int = 1
    """Into how many sections a step is cut under this plan."""
    initial: bool = False
    """The job's first order: layers take their initial values."""
    restore: Restore | None = None
    """Layers take the values of a checkpoint, whatever workers hold: the boundary is its step."""
    transfers: tuple[LayerTransfer, ...] = ()
    """Everybody's, in one order: their messages are numbered by it."""
    assignment_version: int = 0
    """Of the records that steps take once the plan is in force: see `StepRecords`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKeys:
    """Rendezvous keys that workers elsewhere have put up, for all workers of a node.

    Many in one message: where hundreds of workers form a group, each of them wants the keys of all others.
    """

    keys: tuple[tuple[str, bytes], ...]
    """Names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep:
    """Commit the step in flight, then train no further. The commit itself makes all workers agree on it."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """End the workers, then yourself."""

    reason: str


# --- agent -> worker ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpWorker:
    """The first frame a worker receives: everything it needs before its first order."""

    job: JobSpec
    worker_id: WorkerId
    address: str
    """Where this node's peers reach it: process groups listen at this address, host name or network interface."""
    torch_threads: int
    cache_dir: str
    device_memory_bytes: int
    local_device: int = 0
    """What this worker's machine counts its device as."""
    num_sharing: int = 1
    """How many workers compute on that device."""
    storage: StoragePaths | None = None
    """None where nothing can be saved."""


AgentMessage = (
    Hello
    | Heartbeat
    | WorkerStarted
    | WorkerReady
    | WorkerExited
    | Profiled
    | StepCommitted
    | Evaluating
    | EvaluationDone
    | Status
    | Resumed
    | Pace
    | LayersMoving
    | PeerFailed
    | StorePut
    | Finished
    | Leaving
    | AgentStopped
    | ForkServerEnded
    | StateSaved
    | StateNotSaved
    | LayersPersisted
    | CheckpointCommitted
    | CheckpointsFound
    | RestoreFailed
    | ReplicaDigests
    | ScanAnswer
    | RecordsFailed
)
"""What an agent says to the master, its workers' words included."""

MasterMessage = (
    Greeting
    | Configure
    | Heartbeat
    | StartWorker
    | KillWorker
    | ProfileRequest
    | Fence
    | PlanUpdate
    | StoreKeys
    | FinishStep
    | StopAgent
    | SaveState
    | FindCheckpoints
    | CommitCheckpoint
    | PersistState
    | RemoveUnfinished
    | ScanRequest
    | StepRecords
    | RecordsOver
)
"""What the master says to an agent and, through it, to workers."""

WorkerMessage = (
    WorkerReady
    | Profiled
    | StepCommitted
    | Evaluating
    | EvaluationDone
    | Status
    | Resumed
    | Pace
    | LayersMoving
    | PeerFailed
    | StorePut
    | Finished
    | WorkerFailed
    | StateSaved
    | StateNotSaved
    | CheckpointsFound
    | RestoreFailed
    | ReplicaDigests
    | ScanAnswer
    | RecordsFailed
)
"""What a worker says to its agent."""

WorkerBound = (
    SetUpWorker
    | ProfileRequest
    | Fence
    | PlanUpdate
    | StoreKeys
    | FinishStep
    | SaveState
    | FindCheckpoints
    | ScanRequest
    | StepRecords
    | RecordsOver
)
"""What an agent says to a worker."""
