"""Journal entries: everything that the master sees and decides, in order.

The dashboard renders them, the summary is computed from them, a restarted master recovers from them, and a
test replays them. `t_s` counts seconds since the run started, on the master's clock. Every entry can be said
as one plain sentence (`describe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from oobleck.control.protocol import (
    NOTHING,
    CommitRecord,
    DataPosition,
    PartialStep,
    ProbeAddress,
    Segment,
    StepRecords,
)
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

__all__ = [
    "DIFFERS_WORDS",
    "Action",
    "Cause",
    "CheckpointSaved",
    "DataPlaced",
    "Evaluated",
    "HangExplained",
    "JobEnded",
    "JobStarted",
    "JournalEntry",
    "JournalGap",
    "LayersArriving",
    "MasterResumed",
    "NodeAdded",
    "NodeConnected",
    "NodeLeft",
    "NodeLost",
    "Notice",
    "PlanAdopted",
    "ProfileKnown",
    "RecordsDealt",
    "RecoveryDone",
    "RecoveryStarted",
    "SaveFailed",
    "ScalingDecided",
    "ShardQuarantined",
    "ShardsKnown",
    "StepDone",
    "StepsDone",
    "WorkerDown",
    "WorkerUp",
]

DIFFERS_WORDS = " differs from that on "
"""How a copy that differs is reported, between the two workers."""


class Cause(StrEnum):
    """Why a node or a worker was lost."""

    CONNECTION_LOST = "connection_lost"
    LEASE_EXPIRED = "lease_expired"
    WORKER_EXITED = "worker_exited"
    PEER_FAILED = "peer_failed"
    """A collective failed under a survivor, and nobody was lost."""
    HANG = "hang"
    """No step was committed for many times as long as one takes, and nobody was lost."""
    CUT_OFF = "cut_off"
    """A node reaches the master, and not its peers."""
    SLOW = "slow"
    """Nothing was lost: nodes became slow, or normal again."""
    USER = "user"
    JOINED = "joined"
    """Nothing was lost: a node came, or a worker came back."""
    DRAINED = "drained"
    """Nothing was lost: a node leaves, and gives its state away first."""
    SCALED = "scaled"
    """Nothing was lost: another number of nodes is the better one."""
    RETRIED = "retried"
    """Nothing was lost: nodes that were left out for being slow get another chance."""
    MASTER_LOST = "master_lost"
    """Nothing was lost but the master, in the middle of a recovery: its successor begins that anew."""
    CHECKPOINT_BROKEN = "checkpoint_broken"
    """Nothing was lost but a checkpoint, while it was gone back to: the one before is taken."""
    CORRUPTION = "corruption"
    """Nothing was lost: copies of a layer differed, and are made equal again."""
    DATA_UNREADABLE = "data_unreadable"
    """Nothing was lost: a record of the step in flight could not be read, and the step is begun again."""
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"
    """A node that can be reached, and was found faulty."""

    @property
    def is_planned(self) -> bool:
        """Nobody was lost, and nothing is wrong but the speed of a node."""
        return self in (Cause.JOINED, Cause.DRAINED, Cause.SLOW, Cause.SCALED, Cause.RETRIED)


class Action(StrEnum):
    """How the plan was changed."""

    START = "start"
    REINSTANTIATE = "reinstantiate"
    BORROW = "borrow"
    MERGE = "merge"
    REBUILD = "rebuild"
    ABSORB = "absorb"
    RESTART_WORKER = "restart_worker"
    CHECKPOINT = "checkpoint"
    BEGIN_AGAIN = "begin_again"
    """All state is lost, and nothing is saved: the model's initial values, and step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """The first entry of a run."""

    t_s: float
    version: str
    job: JobSpec
    nodes: tuple[NodeSpec, ...]
    started_at: str
    """UTC, ISO 8601."""

    def describe(self) -> str:
        return f"job {self.job.tag} starts on {len(self.nodes)} nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterResumed:
    """Another master has taken over a run that went on without one."""

    t_s: float
    away_s: float
    """Since the last entry of the master before."""

    def describe(self) -> str:
        return f"a new master takes over; the one before was last heard {self.away_s:.1f} s ago"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKnown:
    """The model's profile, as the JSON of a profile file: what every plan of the run is computed from."""

    t_s: float
    profile_json: str

    def describe(self) -> str:
        return "the model's profile is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    t_s: float
    node: str
    agent_pid: int

    def describe(self) -> str:
        return f"{self.node} connected (agent process {self.agent_pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUp:
    """A worker is ready to train."""

    t_s: float
    node: str
    device: int
    pid: int
    data_digest: str
    """Equal on all nodes, or they would train on different text."""
    probe_address: ProbeAddress | None = None
    saves: bool = False
    """Whether it has a place to save its state in."""
    weights_digest: str = ""
    """Equal on all nodes too."""

    def describe(self) -> str:
        return f"{self.node} device {self.device} is ready (worker process {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDown:
    """A worker ended by itself; its node stays, and starts it again, with the node's other workers."""

    t_s: float
    node: str
    device: int
    pid: int
    reason: str
    also: tuple[int, ...] = ()
    """Devices whose workers are ended for that."""

    def describe(self) -> str:
        if self.also:
            return f"a worker of {self.node} ended ({self.reason}); the node's workers are started again"
        return f"the worker of {self.node} ended ({self.reason}); it is started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node was drained: it holds nothing that is needed any more."""

    t_s: float
    node: str

    def describe(self) -> str:
        return f"{self.node} has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdded:
    """The user gave the job another node."""

    t_s: float
    node: NodeSpec

    def describe(self) -> str:
        return f"{self.node.name} is added"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    t_s: float
    node: str
    cause: Cause
    evidence: str
    is_requested: bool = False
    """The user had it killed."""
    is_tried_again: bool = False
    """Without anybody asking for it."""

    def describe(self) -> str:
        return f"{self.node} lost: {self.evidence}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAdopted:
    """A generation begins: the plan, why it was chosen, and what is expected of it."""

    t_s: float
    generation: int
    plan: ExecutionPlan
    action: Action
    reason: str
    predicted_step_s: float
    num_layers: int
    redundant: bool
    """False when fewer than f + 1 copies of some layer live."""
    best_step_s: float | None = None
    """Predicted step time of the best plan for the nodes held; None where the plan is that one."""
    pipeline_generations: tuple[int, ...] = ()
    """For each pipeline, the generation in which its group is formed."""
    boundary: int = 0
    """Steps applied when the plan takes effect."""
    partial: PartialStep = NOTHING
    """What of the step after is committed then."""
    num_sections: int = 1
    """Into how many sections a step is cut."""
    schedules: tuple[ScheduleKind, ...] = ()
    """For each pipeline, in which order its stages work."""
    finish: int | None = None
    """The step in flight, to be finished first; None when what is not committed of it is forgotten."""
    finished_under: int | None = None
    """The generation of the plan under which that step is finished."""
    restored: str | None = None
    """The checkpoint that is gone back to; None where none is."""
    restored_step: int | None = None
    """Its step; 0 where the model's initial values are gone back to; None where nothing is."""
    segments: tuple[Segment, ...] = ()
    """What broken pipelines leave of it, dealt among the whole ones."""

    def describe(self) -> str:
        return f"generation {self.generation}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    t_s: float
    record: CommitRecord
    tokens: int

    def describe(self) -> str:
        return f"step {self.record.step} committed: loss {self.record.loss:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """Many like steps, one after the other: what a simulation of months says in place of one entry a step."""

    t_s: float
    """When the last was committed."""
    first_step: int
    record: CommitRecord
    """Of the last step."""
    tokens_per_step: int

    @property
    def num_steps(self) -> int:
        return self.record.step - self.first_step + 1

    def describe(self) -> str:
        return f"steps {self.first_step} to {self.record.step} committed, {self.record.duration_s:.3f} s each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The model of a step was evaluated on samples that it is not trained on."""

    t_s: float
    step: int
    loss: float
    num_samples: int
    duration_s: float

    def describe(self) -> str:
        return f"evaluation after step {self.step}: loss {self.loss:.4f} ({self.num_samples} samples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangExplained:
    """Why no step was committed although nobody was lost, as far as the survivors can tell."""

    t_s: float
    generation: int
    cut_off: tuple[str, ...]
    """Nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...]
    """Workers that others wait for, and that wait for nobody."""
    stacks: tuple[tuple[WorkerId, str], ...]
    """Where each worker's training thread was."""

    def describe(self) -> str:
        if self.cut_off:
            return f"the network between {', '.join(self.cut_off)} and their peers is cut"
        if self.stuck:
            return f"all wait for {', '.join(map(str, self.stuck))}"
        return "nobody can tell who holds the others up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecided:
    """From here on so many nodes train, and the others rest."""

    t_s: float
    policy: str
    num_nodes: int
    num_available: int
    reason: str

    def describe(self) -> str:
        return f"{self.num_nodes} of {self.num_available} nodes are to train ({self.policy}): {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChanged:
    """A node has become slow, or slower, or faster."""

    t_s: float
    node: str
    factor: float
    """Its time over the usual: 1 where it is not slow any more."""

    def describe(self) -> str:
        times = f"{self.factor:.1f} times the usual time" if self.factor > 1 else "the usual time again"
        return f"{self.node} takes {times}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted:
    """Nodes were lost; survivors are being fenced."""

    t_s: float
    generation: int
    nodes: tuple[str, ...]
    cause: Cause

    def describe(self) -> str:
        names = ", ".join(self.nodes)
        match self.cause:
            case Cause.JOINED:
                return f"taking in {names}"
            case Cause.DRAINED:
                return f"letting {names} go"
            case Cause.SCALED:
                return f"going on with more nodes, or fewer: {names}"
            case Cause.SLOW:
                return f"planning anew for the pace of {names}"
            case Cause.RETRIED:
                return f"trying again whether {names} is slow"
            case Cause.CORRUPTION:
                return f"making the layers of {names} equal to their other copies"
            case _:
                return f"recovering from the loss of {names}" if names else "regrouping; no node is lost"


_HAPPENED = {
    Cause.JOINED: "taken in",
    Cause.DRAINED: "drained",
    Cause.SLOW: "planned for",
    Cause.SCALED: "set aside or taken back",
    Cause.RETRIED: "tried again",
    Cause.CORRUPTION: "repaired",
}
"""To the nodes of a recovery that lost none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDone:
    """All survivors compute under the new plan."""

    t_s: float
    began_s: float
    """When the loss was noticed."""
    generation: int
    nodes: tuple[str, ...]
    cause: Cause
    action: Action
    detect_s: float
    decide_s: float
    transfer_s: float
    stall_s: float
    bytes_moved: int
    layers_moved: int
    microbatches_redone: int
    steps_lost: int
    unfinished: str = ""
    """Why survivors never came to compute under its plan; empty where they did."""

    def describe(self) -> str:
        if self.unfinished:
            return f"{self._what}; this recovery was not completed: {self.unfinished}"
        copied = f"{self.layers_moved} layers copied" if self.layers_moved else "nothing copied"
        lost = "no step lost" if not self.steps_lost else f"{self.steps_lost} steps lost"
        return f"{self._what}; {self.action.value}; {copied} in {self.transfer_s:.2f} s; {lost}"

    @property
    def _what(self) -> str:
        names = ", ".join(self.nodes)
        return f"{names} {_HAPPENED.get(self.cause, 'lost')}" if names else "regrouped"


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

    def describe(self) -> str:
        size, pause = f"{self.size_bytes / 2**20:.1f} MiB", f"{self.pause_s:.3f} s"
        return f"checkpoint of step {self.step}: {size}; training waited {pause}, the disk took {self.duration_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A save was given up: there is no checkpoint of this step."""

    t_s: float
    step: int
    """0 where nobody knows which."""
    reason: str
    newest_step: int | None
    """Of the newest checkpoint on disk; None where there is none."""
    is_our_doing: bool = False
    """Nothing is wrong with memory or disk: a node was lost, and the next save follows at once."""

    def describe(self) -> str:
        what = f"step {self.step} is not saved" if self.step else "a save has failed"
        there = (
            "there is none" if self.newest_step is None else f"the newest checkpoint is that of step {self.newest_step}"
        )
        return f"{what}: {self.reason}; {there}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalGap:
    """The journal itself could not be written for a while; what it says of that time came late, or is missing.

    There is one when it begins (`until_s` is None), where the disk has room for it, and one when it is over.
    """

    t_s: float
    since_s: float
    """The time of the first entry that could not be written."""
    until_s: float | None
    problem: str
    num_late: int = 0
    """Entries that were written when that was possible again."""
    num_lost: int = 0
    """Entries that were not: there were more than are kept."""

    @property
    def is_open(self) -> bool:
        return self.until_s is None

    def describe(self) -> str:
        since = f"the journal could not be written from {self.since_s:.1f} s on: {self.problem}"
        if self.until_s is None:
            return f"{since}; what happened since is not in it yet"
        lost = f"{self.num_lost} entries are missing" if self.num_lost else "nothing is missing"
        return f"{since}; since {self.until_s:.1f} s it is: {self.num_late} entries came late, {lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersArriving:
    """A worker has received a part of the layers that the newest plan gives it; only long transfers tell."""

    t_s: float
    generation: int
    node: str
    device: int
    received_bytes: int
    all_bytes: int

    def describe(self) -> str:
        share = self.received_bytes / self.all_bytes
        return f"{self.node} has received {share:.0%} of the {self.all_bytes / 1e9:.2f} GB that it needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsKnown:
    """The shards that the job's data is in, in the order in which they are numbered."""

    t_s: float
    names: tuple[str, ...]

    def describe(self) -> str:
        return f"the data is in {len(self.names)} shards"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaced:
    """Steps take records from this position on; what was dealt to later steps before is taken back."""

    t_s: float
    generation: int
    """Whose plan is the first to follow it."""
    assignment_version: int
    step: int
    """The last step that is committed by then."""
    position: DataPosition

    def describe(self) -> str:
        return f"the data goes on at record {self.position.records}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsDealt:
    """Which records a step takes; they are done once the step is."""

    t_s: float
    records: StepRecords

    def describe(self) -> str:
        return f"step {self.records.step} takes {self.records.num_records} records"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardQuarantined:
    """A shard cannot be read: nothing more is taken of it."""

    t_s: float
    shard: str
    """Its name."""
    position: int
    """Where reading failed."""
    problem: str

    def describe(self) -> str:
        return f"{self.shard} is in quarantine, and the data not complete without it: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something worth telling; `level` is info, warning or error."""

    t_s: float
    level: str
    text: str

    def describe(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnded:
    """The last entry of a run."""

    t_s: float
    exit_code: int
    reason: str

    def describe(self) -> str:
        return self.reason


JournalEntry = (
    JobStarted
    | MasterResumed
    | ProfileKnown
    | NodeConnected
    | WorkerUp
    | NodeLost
    | NodeLeft
    | NodeAdded
    | WorkerDown
    | PlanAdopted
    | StepDone
    | Evaluated
    | StepsDone
    | HangExplained
    | ScalingDecided
    | PaceChanged
    | RecoveryStarted
    | LayersArriving
    | RecoveryDone
    | CheckpointSaved
    | SaveFailed
    | JournalGap
    | ShardsKnown
    | DataPlaced
    | RecordsDealt
    | ShardQuarantined
    | Notice
    | JobEnded
)
