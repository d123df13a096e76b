"""What the master says, to agents and through them to workers, and what an agent says to a worker that it starts.

Generations are strictly increasing; a receiver drops an order of an old generation. Steps count from 1:
`applied == k` means that k optimizer steps were applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.job import JobSpec
from oobleck.plan import ExecutionPlan, LayerTransfer, ScheduleKind, WorkerId

from . import checkpoint_messages
from .agent_messages import Heartbeat
from .bases import ForWorker
from .plan_orders import OrderedPlan, PlanOrder
from .rank_messages import RanksOrder
from .records import NOTHING, CommitRecord, PartialStep, SectionRecord, Segment, WorkerAddress
from .relay_messages import RelayOrder
from .shard_messages import RecordsOver, ScanRequest, StepRecords

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The first frame on a connection, from the master.

    The master speaks first because an SSH server may lose what a socket's owner says before its client has said
    anything (asyncssh's forwarder does).
    """

    protocol: int
    tag: str


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
    """Identifies this run among others of its tag: see `manifest.run_digest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Have a worker on a device: start one, unless it is there already."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End a worker that is stuck; its exit is reported as any other."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """End the workers, then yourself."""

    reason: str
    is_dismissal: bool = False
    """The node is drained: the run continues without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(ForWorker):
    """Measure the model's layers on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLink(ForWorker):
    """Time messages to a peer, which is asked for the same; the one that leads answers with a `LinkTimed`."""

    peer: WorkerAddress
    leads: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(ForWorker):
    """From now on commit nothing of an older generation; answer with a status.

    Workers of pipelines with a lost node stop what they do; the others finish their microbatches, and
    no worker waits for a reduction any more.
    """

    generation: int
    lost: tuple[str, ...]
    """Nodes lost since the newest plan."""
    probe_addresses: tuple[WorkerAddress, ...] = ()
    """When given, it is not known why no step is committed: say what you wait for, and which of these do not answer."""
    patience_s: float = 0.0
    """With them, how long a worker that computes may take to come on before it says that it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskActivity(ForWorker):
    """Say what you do: no step was committed for long. Nothing is interrupted by it.

    The worker answers with an `Activity`, and its agent reports the `ProcessorUse` of its process beside that.
    """

    inquiry: int
    """The answers have its number."""
    patience_s: float
    """How long the worker may take to come on before it says that it does not, and its process is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanUpdate:
    """Resolve what is in flight; then adopt the plan and train on.

    No message: a worker is sent a `PlanOrder`, and has the update from that and the plan that it knows. Of the
    coordinator's, which is for all, it has its own segments and transfers.

    Resolving takes two moves, either of which may be nothing to do: `catch_up` or `catch_up_section`, then `finish`.
    """

    generation: int
    catch_up: CommitRecord | None = None
    """A step that some survivor has applied: the others apply it too, from its reduced gradients."""
    catch_up_section: SectionRecord | None = None
    """A section that some survivor has committed: the others commit it too, from its reduced gradients."""
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
    """The job's first plan: layers take their initial values."""
    saves: bool = False
    """The state with which the plan begins is saved: nothing is left to train, and a save of it was broken off."""
    restore: checkpoint_messages.Restore | None = None
    """Layers take the values of a checkpoint, whatever workers hold: the boundary is its step."""
    transfers: tuple[LayerTransfer, ...] = ()
    """In one order for all: all that send or receive follow it."""
    moving: tuple[int, ...] = ()
    """The layers that change hands anywhere, sorted."""
    regrouped: tuple[WorkerId, ...] = ()
    """Workers whose groups are all formed again; those of the others that sum gradients are kept where they fit."""
    assignment_version: int = 0
    """Of the records that steps take once the plan is in force: see `StepRecords`."""

    @property
    def ordered(self) -> OrderedPlan:
        return OrderedPlan(
            generation=self.generation,
            plan=self.plan,
            pipeline_generations=self.pipeline_generations,
            schedules=self.schedules,
            boundary=self.boundary,
            partial=self.partial,
            num_sections=self.num_sections,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStep(ForWorker):
    """Commit the step in flight, then train no further. The commit itself makes all workers agree on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpWorker:
    """The first frame a worker receives: everything it needs before its first plan."""

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
    storage: checkpoint_messages.StoragePaths | None = None
    """None where nothing can be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseShare:
    """Said by an agent to its workers: others share the machine that were not known of before, or fewer do."""

    torch_threads: int
    device_memory_bytes: int


WorkerCommand = (
    ProfileRequest
    | TimeLink
    | AskActivity
    | Fence
    | PlanOrder
    | FinishStep
    | checkpoint_messages.SaveState
    | checkpoint_messages.FindCheckpoints
    | ScanRequest
    | StepRecords
    | RecordsOver
)
"""What the master says to one worker, through its agent."""

MasterMessage = (
    Greeting
    | Configure
    | Heartbeat
    | StartWorker
    | KillWorker
    | StopAgent
    | checkpoint_messages.CommitCheckpoint
    | checkpoint_messages.PersistState
    | checkpoint_messages.RemoveOld
    | checkpoint_messages.RemoveUnfinished
    | RelayOrder
    | RanksOrder
    | WorkerCommand
)
"""What the master says to an agent, what is for its workers included."""

WorkerBound = SetUpWorker | UseShare | WorkerCommand
"""What an agent says to a worker."""
