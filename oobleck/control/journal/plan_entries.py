"""Entries about plans: why there is a new one, what it is, and what the change cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from oobleck.control.protocol import NOTHING, PartialStep, Segment
from oobleck.job import Sharding
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

from .entry import Entry
from .losses import LossCause


class PlanCause(StrEnum):
    """Why there is a new plan, and its words."""

    known_by: str
    """What shows that something is wrong, where no entry of its own does."""
    happened: str
    _begins: str

    def __new__(cls, value: str, begins: str = "", happened: str = "lost", known_by: str = "") -> PlanCause:
        member = str.__new__(cls, value)
        member._value_, member._begins, member.happened = value, begins, happened
        member.known_by = known_by or f"there is a new plan: {value}"
        return member

    LOSS = "loss"
    """A node or a worker was lost; `LossCause` says why."""
    PEER_FAILED = "peer_failed", "", "lost", "a collective failed, and no node was lost"
    HANG = "hang", "", "lost", "no step was committed for many times the usual time"
    NETWORK = "network"
    """More nodes do not reach each other than may be lost: the master asks them again until the network is back."""
    MASTER_LOST = "master_lost"
    """The master was lost in the middle of a recovery, which its successor begins again."""
    CHECKPOINT_BROKEN = "checkpoint_broken"
    """The checkpoint to go back to could not be read: the run takes the one before."""
    CORRUPTION = (
        "corruption",
        "making the layers of {} equal to their other copies",
        "repaired",
        "copies of a layer differ",
    )
    DATA_UNREADABLE = "data_unreadable", "", "lost", "a record of the step in flight could not be read"
    SLOW = "slow", "planning again for the pace of {}", "planned for"
    """Nodes became slow, or normal again."""
    JOINED = "joined", "taking in {}", "taken in"
    """A node joined, or a worker came back."""
    DRAINED = "drained", "draining {}", "drained"
    """A node leaves, and hands its state over first."""
    SCALED = "scaled", "continuing with more nodes, or fewer: {}", "set aside or taken back"
    RETRIED = "retried", "trying {} again, which was slow", "tried again"
    """Nodes that were left out for being slow get another chance."""
    MEASURED = "measured", "planning again for what steps take"
    """Steps take longer or shorter than the profile says, for which another plan or schedule is faster."""

    def begins(self, names: str) -> str:
        if self is PlanCause.NETWORK:
            return f"asking all nodes once more whether they reach each other{f'; {names} lost' if names else ''}"
        if self._begins:
            return self._begins.format(names)
        return f"recovering from the loss of {names}" if names else "regrouping; no node is lost"

    @property
    def is_planned(self) -> bool:
        """Whether no node was lost, and nothing is wrong but a node's speed."""
        wrong = (PlanCause.SLOW, PlanCause.MEASURED)
        return self in (PlanCause.JOINED, PlanCause.DRAINED, PlanCause.SCALED, PlanCause.RETRIED, *wrong)

    @property
    def is_calm(self) -> bool:
        """Whether nothing went wrong: a change of the plan, and no recovery."""
        return self.is_planned and self is not PlanCause.SLOW


class Action(StrEnum):
    START = "start"
    REINSTANTIATE = "reinstantiate"
    BORROW = "borrow"
    MERGE = "merge"
    REBUILD = "rebuild"
    ABSORB = "absorb"
    RESTART_WORKER = "restart_worker"
    CHECKPOINT = "checkpoint"
    BEGIN_AGAIN = "begin_again"
    """All state is lost and nothing is saved: training restarts from the initial values."""

    @property
    def words(self) -> str:
        """What people read in its place."""
        return _ACTION_WORDS[self]


_ACTION_WORDS = {
    Action.START: "start",
    Action.REINSTANTIATE: "same pipelines",
    Action.BORROW: "pipelines borrow nodes",
    Action.MERGE: "pipelines merged",
    Action.REBUILD: "new pipelines",
    Action.ABSORB: "pipelines grow",
    Action.RESTART_WORKER: "worker restarted",
    Action.CHECKPOINT: "back to a checkpoint",
    Action.BEGIN_AGAIN: "back to the initial values",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAdopted(Entry):
    """A generation begins: the plan, why it was chosen, and what it predicts."""

    generation: int
    plan: ExecutionPlan
    action: Action
    reason: str
    predicted_step_s: float
    num_layers: int
    redundant: bool
    """False where fewer than f + 1 copies of a layer live."""
    best_step_s: float | None = None
    """The predicted step time of the best plan for these nodes; None where this plan is the best."""
    pipeline_generations: tuple[int, ...] = ()
    """The generation in which each pipeline's group is formed."""
    boundary: int = 0
    """Steps applied when the plan takes effect."""
    partial: PartialStep = NOTHING
    """What is committed of the next step then."""
    num_sections: int = 1
    schedules: tuple[ScheduleKind, ...] = ()
    finish: int | None = None
    """The step in flight, which is finished first; None where its uncommitted part is discarded."""
    finished_under: int | None = None
    restored: str | None = None
    restored_step: int | None = None
    """The step that the run goes back to; 0 for the model's initial values; None where it does not go back."""
    segments: tuple[Segment, ...] = ()
    """What broken pipelines leave of the step in flight, for the whole ones to do."""
    oldest: int = 0
    """The oldest generation whose plan may still be in force on a worker."""

    @property
    def level(self) -> str:
        return "info" if self.redundant else "warning"

    @property
    def sentence(self) -> str:
        return f"generation {self.generation}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinesFormed(Entry):
    """All workers of the first plan have formed their groups, and compute."""

    generation: int

    @property
    def sentence(self) -> str:
        return "all pipelines are formed"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangExplained(Entry):
    """Why no step was committed although no node was lost, as far as the survivors know."""

    level: ClassVar[str] = "warning"
    generation: int
    cut_off: tuple[str, ...]
    stuck: tuple[WorkerId, ...]
    """Workers that others wait for, and that wait for no other."""
    stacks: tuple[tuple[WorkerId, str], ...]

    @property
    def sentence(self) -> str:
        if self.cut_off:
            return f"the network between {', '.join(self.cut_off)} and their peers is cut"
        if self.stuck:
            return f"all wait for {', '.join(map(str, self.stuck))}"
        return "no worker is stuck, and no network is cut"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self.sentence if worker_id is None else f"all wait for {worker_id}, which waits for no other"

    def detail(self, worker_id: WorkerId | None) -> str:
        return "" if worker_id is None else dict(self.stacks).get(worker_id, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted(Entry):
    """The run needs a new plan, and fences the survivors."""

    generation: int
    nodes: tuple[str, ...]
    cause: PlanCause
    loss: LossCause | None = None
    """Why these nodes, or their workers, were lost; None if none was."""

    @property
    def why(self) -> LossCause | PlanCause:
        """The cause in a word; for a loss, what kind of loss it was."""
        return self.loss or self.cause

    @property
    def level(self) -> str:
        return "info" if self.cause.is_planned else "warning"

    @property
    def sentence(self) -> str:
        return self.cause.begins(", ".join(self.nodes))

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self.cause.known_by


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersArriving(Entry):
    """A worker has received a part of the layers that the newest plan gives it. Only long transfers report this."""

    generation: int
    node: str
    device: int
    received_bytes: int
    all_bytes: int

    @property
    def sentence(self) -> str:
        share = self.received_bytes / self.all_bytes
        return f"{self.node} has received {share:.0%} of the {self.all_bytes / 1e9:.2f} GB that it needs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDone(Entry):
    """All survivors compute under the new plan."""

    began_s: float
    """When the loss was noticed."""
    generation: int
    nodes: tuple[str, ...]
    cause: PlanCause
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
    """Why the survivors never computed under its plan; empty where they did."""
    loss: LossCause | None = None

    @property
    def why(self) -> LossCause | PlanCause:
        return self.loss or self.cause

    @property
    def level(self) -> str:
        return "warning" if self.unfinished else "info"

    @property
    def sentence(self) -> str:
        names = ", ".join(self.nodes)
        what = f"{names} {self.cause.happened}" if names else "regrouped"
        if self.unfinished:
            return f"{what}; this recovery was not completed: {self.unfinished}"
        copied = (
            f"{self.layers_moved} layers copied in {self.transfer_s:.2f} s" if self.layers_moved else "nothing copied"
        )
        steps = {0: "no step", 1: "1 step"}.get(self.steps_lost, f"{self.steps_lost} steps")
        return f"{what}; {self.action.words}; {copied}; {steps} lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChosen(Entry):
    """What the devices of a stage share out until the run ends, where the job leaves that to the planner."""

    sharding: Sharding
    step_s: tuple[tuple[Sharding, float | None], ...]
    """The predicted seconds of a step of each choice; None where it has no plan."""

    @property
    def sentence(self) -> str:
        each = (f"{name} {'has no plan' if taken_s is None else f'{taken_s:.3g} s'}" for name, taken_s in self.step_s)
        return f"sharding: {self.sharding} is chosen by the predicted steps: {', '.join(each)}"


PlanEntry = (
    PlanAdopted | ShardingChosen | PipelinesFormed | HangExplained | RecoveryStarted | LayersArriving | RecoveryDone
)
