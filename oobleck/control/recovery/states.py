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

# Losses within this time count as one: nodes that are killed together disappear within milliseconds.
_SETTLE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a recovery is about. Each state hands it to the next until the recovery is over."""

    began_s: float
    detect_s: float
    cause: PlanCause
    loss: LossCause | None
    """Why the first nodes were lost; None if none was."""
    nodes: tuple[str, ...]
    control: ControlSpec
    fault_threshold: int
    """How many nodes may be lost at once."""
    # All may be fenced again before the orders; `fence`, `fenced_s` and `asked` are those of the newest fence.
    fence: Fence
    fenced_s: float
    lost_s: float
    """When the newest loss was noticed."""
    asked: tuple[WorkerId, ...]
    """The workers that are to answer, in the order of the nodes."""
    explains: bool
    """Nothing moves and the cause is unknown: all are asked what they wait for."""
    busy: tuple[WorkerId, ...] = ()
    """The workers that compute, whatever they answer."""
    cut_off: tuple[str, ...] = ()
    """The nodes that their peers could not reach at the last fence, if they are too many to give up."""
    cut_since_s: float = math.inf
    """Since when the run waits for the network between nodes; infinity if it does not."""
    found_by_s: float = math.inf
    """Until when workers may look for checkpoints; infinity before any is asked."""
    returns_by_s: float = math.inf
    """Until when the run waits for restarting workers."""

    @property
    def generation(self) -> int:
        return self.fence.generation

    @property
    def awaits_network(self) -> bool:
        return math.isfinite(self.cut_since_s)

    @property
    def settles_s(self) -> float:
        """Until when complete answers wait for further losses with the same cause."""
        return self.lost_s + _SETTLE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a decision is made from."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    is_unexplained: bool = False
    """No answer explains a hang: the groups themselves are not to be trusted."""


# --- states ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """No plan is ordered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All workers train by the newest plan."""

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
    """What the answers together reveal about a hang."""

    cut_off: tuple[str, ...]
    """The nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...]
    """The workers that others wait for, and that wait for none."""
    is_network_down: bool
    """More nodes are cut off than may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fencing:
    """All are asked where they stand. Complete answers wait for further losses, and then for a decision."""

    recovery: Recovery
    statuses: Gathered[WorkerId, Status]
    until_s: float
    is_overdue: bool = False
    """The time for answers is over."""
    finding: Finding | None = None
    """None until all have answered, and if there is no hang to explain."""

    @property
    def awaited(self) -> tuple[WorkerId, ...]:
        return tuple(worker_id for worker_id in self.recovery.asked if worker_id not in self.statuses)

    @property
    def is_complete(self) -> bool:
        """Whether all have answered; O(1) while too few have."""
        return self.statuses.has_all(self.recovery.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusing:
    """The answers name what holds all up: nodes, which are given up, or workers, which are ended."""

    recovery: Recovery
    statuses: Mapping[WorkerId, Status]
    stuck: tuple[WorkerId, ...]
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingNetwork:
    """More nodes are cut off than may be lost: the run waits for the network, and gives none of them up."""

    recovery: Recovery
    until_s: float
    """When to ask all again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitingWorkers(Answers):
    """The remaining workers need others, which are restarting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatingCheckpoint(Answers):
    """A layer has no living copy: workers are asked which checkpoints they can read."""


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
    | AwaitingWorkers
    | LocatingCheckpoint
    | Ended
)
# These ask for a decision. Its answer follows within the same event, so no state waits for it.
Deciding = Fencing | Accusing | AwaitingWorkers | LocatingCheckpoint


# --- inputs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBegun:
    """The first plan is ordered, by this master or by an earlier one."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryBegun:
    """The run needs another plan, under a new generation."""

    wanted: BeginRecovery
    control: ControlSpec
    fault_threshold: int
    fence: Fence
    """Contains the addresses of all workers if the cause may need them."""
    asked: tuple[WorkerId, ...]
    heard_s: float
    """When a message from any of them last arrived; for a master that takes over, when it has reached them."""
    num_regroups: int
    """How often all regrouped without a known cause since the newest committed step, including this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreLost:
    """Other nodes are lost while all are asked where they stand."""

    nodes: tuple[str, ...]
    fence: Fence
    """The fence as it would be sent now."""


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
    """The size of the plan: all of its workers may report the same failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrdered:
    """Decision: all have their orders for a new plan."""

    worker_ids: tuple[WorkerId, ...]
    action: Action
    layers_moved: int
    microbatches_redone: int
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersWanted:
    """Decision: wait until more workers are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWanted:
    """Decision: only a checkpoint can help, and workers are asked which ones they can read."""


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
    """A node is reached again: the last messages to it may be lost."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """A node without a part in the plan is given up. The run may be waiting for its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    """A drained node has left. A master that took over since may be waiting for its answer to a fence."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed, perhaps past the state's deadline."""

    is_suspicious: bool
    """Most nodes are silent: this master itself may be cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldUp:
    """This master itself was stopped for a while. It reads the messages of that time until `until_s`."""

    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is finished, or cannot continue."""


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
    detect_s: float = 0.0
    busy: tuple[WorkerId, ...] = ()
    """The workers whose processes use the processor, as far as their agents have reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decide:
    """Decide, and give PlanOrdered, WorkersWanted or CheckpointWanted as the next input, or end the run."""

    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Give nodes up. Each begins the recovery again."""

    nodes: tuple[str, ...]
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDown:
    """End the run: the network between these nodes and their peers did not come back in time."""

    nodes: tuple[str, ...]
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryEnded:
    """Record a recovery that is over, or that another event has overtaken."""

    recovery: Recovery
    adopting: Adopting | None
    """None if it got no orders."""
    overtaken_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInForce:
    """All compute under the newest plan: release whatever only the previous one needed."""


RecoveryEffect = (
    Record | Send | SendAll | BeginRecovery | Decide | GiveUp | NetworkDown | RecoveryEnded | PlanInForce | EndRun
)
"""Journal entries and messages are the coordinator's own commands; the others concern its parts."""

Step = tuple[State, tuple[RecoveryEffect, ...]]
"""The next state, and the effects in their order."""
