"""Entries about plans: why there is a new one, what it is, and what the change cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from oobleck.control.protocol import NOTHING, PartialStep, Segment
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

from .entry import Entry
from .losses import LossCause


class PlanCause(StrEnum):
    """Why there is a new plan, and how that is said."""

    known_by: str
    """What went wrong is known by this, where no entry of its own says it."""
    happened: str
    """To the nodes that it is about."""
    _begins: str

    def __new__(cls, value: str, begins: str = "", happened: str = "lost", known_by: str = "") -> PlanCause:
        member = str.__new__(cls, value)
        member._value_, member._begins, member.happened = value, begins, happened
        member.known_by = known_by or f"there is a new plan: {value}"
        return member

    LOSS = "loss"
    """A node or a worker was lost; `LossCause` says why."""
    PEER_FAILED = "peer_failed", "", "lost", "a collective failed, and no node was lost"
    HANG = "hang", "", "lost", "no step was committed for many times as long as one takes"
    """And no node was lost."""
    NETWORK = "network"
    """More nodes do not reach each other than may be lost: they are asked again until the network is back."""
    MASTER_LOST = "master_lost"
    """The master was lost in the middle of a recovery: its successor begins that again."""
    CHECKPOINT_BROKEN = "checkpoint_broken"
    """A checkpoint could not be read while it was gone back to: the one before is taken."""
    CORRUPTION = (
        "corruption",
        "making the layers of {} equal to their other copies",
        "repaired",
        "copies of a layer differ",
    )
    DATA_UNREADABLE = "data_unreadable", "", "lost", "a record of the step in flight could not be read"
    """The step is begun again."""
    SLOW = "slow", "planning again for the pace of {}", "planned for"
    """Nodes became slow, or normal again."""
    JOINED = "joined", "taking in {}", "taken in"
    """A node came, or a worker came back."""
    DRAINED = "drained", "letting {} go", "drained"
    """A node leaves, and gives its state away first."""
    SCALED = "scaled", "continuing with more nodes, or fewer: {}", "set aside or taken back"
    """Another number of nodes is the better one."""
    RETRIED = "retried", "trying again whether {} is slow", "tried again"
    """Nodes that were left out for being slow get another chance."""

    def begins(self, names: str) -> str:
        """Say that a recovery about these nodes begins."""
        if self is PlanCause.NETWORK:
            return f"asking all nodes again whether they reach each other{f'; {names} lost' if names else ''}"
        if self._begins:
            return self._begins.format(names)
        return f"recovering from the loss of {names}" if names else "regrouping; no node is lost"

    @property
    def is_planned(self) -> bool:
        """No node was lost, and nothing is wrong but the speed of a node."""
        return self in (PlanCause.JOINED, PlanCause.DRAINED, PlanCause.SLOW, PlanCause.SCALED, PlanCause.RETRIED)

    @property
    def is_calm(self) -> bool:
        """Nothing wrong had led to it: a change of the plan, and no recovery."""
        return self.is_planned and self is not PlanCause.SLOW


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
class PlanAdopted(Entry):
    """A generation begins: the plan, why it was chosen, and what is expected of it."""

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
    """What broken pipelines leave of it, given to the whole ones."""
    oldest: int = 0
    """The oldest generation whose plan a worker may still have in force."""

    @property
    def level(self) -> str:
        return "info" if self.redundant else "warning"

    @property
    def sentence(self) -> str:
        return f"generation {self.generation}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HangExplained(Entry):
    """Why no step was committed although no node was lost, as far as the survivors know."""

    level: ClassVar[str] = "warning"
    generation: int
    cut_off: tuple[str, ...]
    """Nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...]
    """Workers that others wait for, and that wait for none."""
    stacks: tuple[tuple[WorkerId, str], ...]
    """Where each worker's training thread was."""

    @property
    def sentence(self) -> str:
        if self.cut_off:
            return f"the network between {', '.join(self.cut_off)} and their peers is cut"
        if self.stuck:
            return f"all wait for {', '.join(map(str, self.stuck))}"
        return "no worker is stuck, and no network cut"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self.sentence if worker_id is None else f"all wait for {worker_id}, and it waits for nobody"

    def detail(self, worker_id: WorkerId | None) -> str:
        return "" if worker_id is None else dict(self.stacks).get(worker_id, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted(Entry):
    """A new plan is needed; survivors are being fenced."""

    generation: int
    nodes: tuple[str, ...]
    cause: PlanCause
    loss: LossCause | None = None
    """Why these nodes, or their workers, were lost; None where none was."""

    @property
    def why(self) -> LossCause | PlanCause:
        """The cause in a word: of a loss, what kind of loss it was."""
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
    """A worker has received a part of the layers that the newest plan gives it; only long transfers report this."""

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
    """Why survivors never came to compute under its plan; empty where they did."""
    loss: LossCause | None = None
    """As in `RecoveryStarted`."""

    @property
    def why(self) -> LossCause | PlanCause:
        """The cause in a word: of a loss, what kind of loss it was."""
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
        copied = f"{self.layers_moved} layers copied" if self.layers_moved else "nothing copied"
        lost = "no step lost" if not self.steps_lost else f"{self.steps_lost} steps lost"
        return f"{what}; {self.action.value}; {copied} in {self.transfer_s:.2f} s; {lost}"


PlanEntry = PlanAdopted | HangExplained | RecoveryStarted | LayersArriving | RecoveryDone
