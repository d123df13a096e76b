"""What the master sends to agents, and through them to workers, and what an agent sends to a worker that it starts.

Generations are strictly increasing; a receiver drops an order of an old generation. Steps count from 1:
`applied == k` means that k optimizer steps were applied.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.job import JobSpec, Sharding
from oobleck.plan import LayerTransfer, WorkerId

from . import checkpoint_messages, records
from .agent_messages import Heartbeat
from .plan_orders import OrderedPlan, PlanOrder
from .rank_messages import RanksOrder
from .relay_messages import RelayOrder
from .shard_messages import ScanRequest, StepRecords, StepsOver

PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The master's first frame on a connection."""

    # The master speaks first, because asyncssh's forwarder loses what a socket's owner sends before its client does.
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
    device_memory_bytes: int
    num_sharing: int = 1
    """How many workers compute on the same device: more than one where nodes share it."""
    run: str
    """See `manifest.run_digest`."""
    reports_use: bool = False
    """Whether the agent reports what the node's processes use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a worker on a device, unless it has one."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End a stuck worker; its exit is reported like any other."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAgent:
    """End the workers, then the agent."""

    reason: str
    is_dismissal: bool = False
    """Whether the node is drained, and the run continues without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest(records.ForWorker):
    """Measure the model's layers on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLink(records.ForWorker):
    """Time messages to a peer, which does the same; the worker that leads answers with a `LinkTimed`."""

    peer: records.WorkerAddress
    leads: bool
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(records.ForWorker):
    """Commit nothing of an older generation from now on, and answer with a status.

    Workers of pipelines with a lost node stop; the others finish their microbatches, and wait for no reduction.
    """

    generation: int
    lost: tuple[str, ...]
    """Nodes lost since the newest plan."""
    probe_addresses: tuple[records.WorkerAddress, ...] = ()
    """Not empty if nothing explains why no step commits: report what you wait for, and which of these do not answer."""
    patience_s: float = 0.0
    """With them: how long a worker that computes may take to make progress before it reports that it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskActivity(records.ForWorker):
    """No step was committed for long: report what you do, without an interruption.

    The worker answers with an `Activity`, and its agent also with the `ProcessorUse` of its process.
    """

    inquiry: int
    """The answers repeat this number."""
    patience_s: float
    """How long the worker may take to make progress, while its process is watched."""


@dataclass(frozen=True, kw_only=True)
class PlanUpdate(OrderedPlan):
    """Resolve what is in flight, then adopt the plan and continue training.

    Not a message: a worker receives a `PlanOrder`, and makes the update from that and the plan that it knows. The
    coordinator's update is for all workers; a worker's has only its own segments and transfers.

    Resolving has two parts, which may be empty: `catch_up` or `catch_up_section`, then `finish`.
    """

    partial: records.PartialStep = records.NOTHING
    num_sections: int = 1
    catch_up: records.CommitRecord | None = None
    """A step that some survivor has applied: the others apply it too, from its reduced gradients."""
    catch_up_section: records.SectionRecord | None = None
    """A section that some survivor has committed: the others commit it too, from its reduced gradients."""
    finish: int | None = None
    """The step to finish under the old plan: whole pipelines complete it and the segments, and all survivors reduce,
    commit and apply it. None: discard what is in flight and not committed, to run it again."""
    segments: tuple[records.Segment, ...] = ()
    """All extra segments of the step to finish so far."""
    lost: tuple[str, ...] = ()
    """Nodes of the old plan that take no part any more."""
    initial: bool = False
    """Whether it is the job's first plan: layers take their initial values."""
    saves: bool = False
    """Whether to save the plan's first state: nothing is left to train, and a save of it was broken off."""
    restore: checkpoint_messages.Restore | None = None
    """The checkpoint whose values layers take, whatever workers hold: the boundary is its step."""
    transfers: tuple[LayerTransfer, ...] = ()
    """In an order that all senders and receivers follow."""
    moving: tuple[int, ...] = ()
    """The layers that change hands anywhere, sorted."""
    regrouped: tuple[WorkerId, ...] = ()
    """Workers that form all their groups again; the others keep groups that sum gradients where these fit."""
    assignment_version: int = 0
    """See `StepRecords`."""
    sharding: Sharding | None = None
    """What the devices of a stage share out, the same in all plans of a run; None where the job says it."""

    @property
    def ordered(self) -> OrderedPlan:
        """The plan alone."""
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
class FinishStep(records.ForWorker):
    """Train no further after the step in flight. Its commit makes all workers agree on that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAllowed(records.ForWorker):
    """The script has heard of the steps before: those up to `through` may begin, under a generation's plan."""

    generation: int
    through: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUpWorker:
    """A worker's first frame: everything that it needs before its first plan."""

    job: JobSpec
    worker_id: WorkerId
    address: str
    """As in `Configure`: process groups listen there."""
    torch_threads: int
    cache_dir: str
    device_memory_bytes: int
    local_device: int = 0
    """The device's number on its machine."""
    gpu_id: str = ""
    """The GPU of the worker before it with this number; empty if there was none."""
    num_sharing: int = 1
    """As in `Configure`."""
    storage: checkpoint_messages.StoragePaths | None = None
    """None where nothing can be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseShare:
    """The worker's share of the machine has changed, because more or fewer others use it."""

    torch_threads: int
    device_memory_bytes: int


WorkerCommand = (
    ProfileRequest
    | TimeLink
    | AskActivity
    | Fence
    | PlanOrder
    | FinishStep
    | StepsAllowed
    | checkpoint_messages.SaveState
    | checkpoint_messages.FindCheckpoints
    | ScanRequest
    | StepRecords
    | StepsOver
)
"""What the master sends to one worker, through its agent."""

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
"""What the master sends to an agent, messages for its workers included."""

WorkerBound = SetUpWorker | UseShare | WorkerCommand
"""What an agent sends to a worker."""
