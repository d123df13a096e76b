"""Entries about plans: why there is a new one, what it is, and what the change cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from oobleck.control.protocol import NOTHING, PartialStep, Segment
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

from .losses import LossCause


class PlanCause(StrEnum):
    """Why there is a new plan."""

    LOSS = "loss"
    """A node or a worker was lost; `LossCause` says why."""
    PEER_FAILED = "peer_failed"
    """A collective failed under a survivor, and no node was lost."""
    HANG = "hang"
    """No step was committed for many times as long as one takes, and no node was lost."""
    NETWORK = "network"
    """More nodes do not reach each other than may be lost: they are asked again until the network is back."""
    MASTER_LOST = "master_lost"
    """The master was lost in the middle of a recovery: its successor begins that again."""
    CHECKPOINT_BROKEN = "checkpoint_broken"
    """A checkpoint could not be read while it was gone back to: the one before is taken."""
    CORRUPTION = "corruption"
    """Copies of a layer differed, and are made equal again."""
    DATA_UNREADABLE = "data_unreadable"
    """A record of the step in flight could not be read, and the step is begun again."""
    SLOW = "slow"
    """Nodes became slow, or normal again."""
    JOINED = "joined"
    """A node came, or a worker came back."""
    DRAINED = "drained"
    """A node leaves, and gives its state away first."""
    SCALED = "scaled"
    """Another number of nodes is the better one."""
    RETRIED = "retried"
    """Nodes that were left out for being slow get another chance."""

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
    """What broken pipelines leave of it, given to the whole ones."""
    oldest: int = 0
    """The oldest generation whose plan a worker may still have in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangExplained:
    """Why no step was committed although no node was lost, as far as the survivors know."""

    t_s: float
    generation: int
    cut_off: tuple[str, ...]
    """Nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...]
    """Workers that others wait for, and that wait for none."""
    stacks: tuple[tuple[WorkerId, str], ...]
    """Where each worker's training thread was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryStarted:
    """A new plan is needed; survivors are being fenced."""

    t_s: float
    generation: int
    nodes: tuple[str, ...]
    cause: PlanCause
    loss: LossCause | None = None
    """Why these nodes, or their workers, were lost; None where none was."""

    @property
    def why(self) -> LossCause | PlanCause:
        """The cause in a word: of a loss, what kind of loss it was."""
        return self.loss or self.cause


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersArriving:
    """A worker has received a part of the layers that the newest plan gives it; only long transfers report this."""

    t_s: float
    generation: int
    node: str
    device: int
    received_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDone:
    """All survivors compute under the new plan."""

    t_s: float
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
