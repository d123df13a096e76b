"""The values of the recovery's state machine: its states, its inputs and its effects.

`machine.py` has the transitions, and the one function that makes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.control.events import EndRun, Record, Send, SendAll
from oobleck.control.journal import Action, Loss, LossCause, PlanCause
from oobleck.control.protocol import Fence, Resumed, Status
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId

from .gathered import Gathered

_SETTLE_S = 0.01
"""Losses within this are one: nodes that are killed together are seen to go within milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a recovery is about. It is carried from state to state until the recovery is over.

    What comes before its orders belongs to it, however often all are fenced again: `fence`, `fenced_s`, `asked` and
    what follows are those of the newest fence.
    """

    began_s: float
    detect_s: float
    cause: PlanCause
    loss: LossCause | None
    """Of the nodes that were lost first; None where none was."""
    nodes: tuple[str, ...]
    control: ControlSpec
    fault_threshold: int
    """So many nodes may be lost at once."""
    fence: Fence
    fenced_s: float
    lost_s: float
    """When the newest of the losses that it is about was noticed."""
    asked: tuple[WorkerId, ...]
    """Who is to answer, in the order of the nodes."""
    explains: bool
    """Nobody knows why nothing moves: all are asked what they wait for."""
    busy: tuple[WorkerId, ...] = ()
    """The workers that compute, whatever they answer."""
    cut_off: tuple[str, ...] = ()
    """The nodes that their peers did not reach when all were asked last, where these are too many to give up."""
    cut_since_s: float = math.inf
    """Since then the network between nodes is waited for; infinity where it is not."""
    found_by_s: float = math.inf
    """Until then checkpoints are looked for; infinity before anybody is asked."""
    returns_by_s: float = math.inf
    """Until then workers that are started again are waited for. No later fence extends it."""

    @property
    def generation(self) -> int:
        return self.fence.generation

    @property
    def why(self) -> tuple[PlanCause, LossCause | None]:
        return self.cause, self.loss

    @property
    def awaits_network(self) -> bool:
        return math.isfinite(self.cut_since_s)

    @property
    def settles_s(self) -> float:
        """Until then complete answers wait: losses that belong together arrive within moments of each other."""
        return self.lost_s + _SETTLE_S


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """No plan is ordered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All train by the newest plan."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopting:
    """A plan is ordered, and some workers do not compute under it yet. The others train."""

    recovery: Recovery
    ordered: PlanOrdered
    ordered_s: float
    resumed: Gathered[WorkerId, Resumed] = field(default_factory=Gathered)

    @property
    def awaited(self) -> tuple[WorkerId, ...]:
        """Who has not reported yet."""
        return tuple(worker_id for worker_id in self.ordered.worker_ids if worker_id not in self.resumed)

    @property
    def generation(self) -> int:
        return self.recovery.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspecting:
    """A survivor's collective failed. The cause usually shows within milliseconds."""

    training: Training | Adopting
    since_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What all answers together say of a hang."""

    cut_off: tuple[str, ...]
    """The nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...]
    """The workers that others wait for, and that wait for nobody."""
    is_network_down: bool
    """More nodes are cut off than may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fencing:
    """All are asked where they stand. Once they have answered, another loss of the same moment may be on its way."""

    recovery: Recovery
    statuses: Gathered[WorkerId, Status]
    until_s: float
    is_overdue: bool = False
    """The time for answers is over. Some may not be read yet, or the fence may not have arrived."""
    finding: Finding | None = None
    """None until all have answered, and where nothing is to be explained."""

    @property
    def awaited(self) -> tuple[WorkerId, ...]:
        """Who has not answered yet."""
        return tuple(worker_id for worker_id in self.recovery.asked if worker_id not in self.statuses)

    @property
    def is_complete(self) -> bool:
        """Whether all have answered; O(1) as long as too few have."""
        return self.statuses.has_all(self.recovery.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusing:
    """The answers name what holds all up: a node, which is given up, or workers, which are ended."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    stuck: tuple[WorkerId, ...]
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingNetwork:
    """More nodes do not reach each other than may be lost: the network is waited for, and nobody is given up."""

    recovery: Recovery
    until_s: float
    """Then all are asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """A decision is being made. The state is left within the event that led to it."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    is_unexplained: bool = False
    """Nobody could tell what they wait for: the groups themselves are not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingWorkers:
    """The workers that are left need others, which are being started again."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    is_unexplained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatingCheckpoint:
    """A layer has no living copy: workers are asked which checkpoints they can read."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    is_unexplained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over."""


State = (
    Preparing
    | Training
    | Adopting
    | Suspecting
    | Fencing
    | Accusing
    | AwaitingNetwork
    | Deciding
    | AwaitingWorkers
    | LocatingCheckpoint
    | Ended
)


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBegun:
    """The first plan is ordered, or was by an earlier master."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBegun:
    """Another plan is needed, under a new generation: a loss, or whatever else `cause` says."""

    nodes: tuple[str, ...]
    cause: PlanCause
    loss: LossCause | None
    detect_s: float
    control: ControlSpec
    fault_threshold: int
    fence: Fence
    """With the address of every worker where `cause` may need them, whether or not they are to be asked for."""
    asked: tuple[WorkerId, ...]
    heard_s: float
    """When something was last heard of any of them. A master that takes over has to reach them first."""
    num_regroups: int
    """How often all regrouped since the newest committed step because nothing moved, this time included."""
    busy: tuple[WorkerId, ...] = ()
    """They compute, whatever they answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreLost:
    """Other nodes are lost while all are asked where they stand.

    Nobody is asked again. What the others have answered, or will, stays true until their next orders, whatever other
    node is lost; and their orders tell those who still wait for the lost ones.
    """

    nodes: tuple[str, ...]
    fence: Fence
    """As it would be asked now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Workers answer a fence."""

    worker_ids: tuple[WorkerId, ...]
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSuspected:
    """A collective failed under a survivor."""

    generation: int
    num_workers: int
    """Of the plan: all of them may be reporting the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrdered:
    """The decision: a plan, and all have their orders."""

    worker_ids: tuple[WorkerId, ...]
    """Of the plan."""
    action: Action
    layers_moved: int
    microbatches_redone: int
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersWanted:
    """The decision: nothing can be done until more workers are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWanted:
    """The decision: only a checkpoint can help, and workers are asked which ones there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReported:
    """A worker reports which checkpoints it can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersResumed:
    """Workers compute under a plan."""

    worker_ids: tuple[WorkerId, ...]
    message: Resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReached:
    """A node is reached again: what was last sent to it may be lost."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """A node without a part in the plan is given up. Its workers may be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    """A drained node is gone. A master that took over since may be waiting for its answer to a fence."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed, perhaps past the state's deadline."""

    is_suspicious: bool
    """Most nodes are silent: it may be this master that hears nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUp:
    """This master itself was stopped for a while: it reads the messages that came meanwhile until `until_s`."""

    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Nothing is left to do, or there is no way on."""


Input = (
    TrainingBegun
    | RecoveryBegun
    | MoreLost
    | Answered
    | FailureSuspected
    | PlanOrdered
    | WorkersWanted
    | CheckpointWanted
    | CheckpointReported
    | WorkersResumed
    | NodeReached
    | NodeGone
    | NodeDrained
    | TimePassed
    | HeldUp
    | RunEnded
)


# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRecovery:
    """Fence all survivors under a new generation; during a recovery, begin it again."""

    cause: PlanCause
    nodes: tuple[str, ...] = ()
    loss: LossCause | None = None
    """Why the nodes were lost, if they were."""
    detect_s: float = 0.0
    busy: tuple[WorkerId, ...] = ()
    """The workers whose processes use the processor, as far as their agents have said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Decide what to do, and answer with PlanOrdered, WorkersWanted or CheckpointWanted, or end the run."""

    deciding: Deciding


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Give nodes up. Each begins the recovery again."""

    nodes: tuple[str, ...]
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDown:
    """The network between these nodes and their peers did not come back in time: end the run."""

    nodes: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryEnded:
    """Record a recovery that is over, or that `overtaken_by` something will never be."""

    recovery: Recovery
    adopting: Adopting | None
    """None where it got no orders."""
    overtaken_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """All compute under the newest plan: release whatever only the previous one needed."""


RecoveryEffect = (
    Record | Send | SendAll | BeginRecovery | Decide | GiveUp | NetworkDown | RecoveryEnded | PlanInForce | EndRun
)
"""Journal entries and messages are the coordinator's own commands; the others concern its parts."""

Step = tuple[State, tuple[RecoveryEffect, ...]]
"""The next state, and what is to be done, in that order."""
