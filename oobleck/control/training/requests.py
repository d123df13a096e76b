"""What parts of the coordinator return: commands and requests. `routing.py` carries each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.control.checkpoints import Candidate, KnownCheckpoint
from oobleck.control.events import Command, EndRun, ExpectSteps, NodeUp, Repair
from oobleck.control.journal import Loss, LossCause
from oobleck.control.protocol import Raised
from oobleck.control.recovery import states
from oobleck.planner import NetworkProfile, NodeKind, WorkerId

from .choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTakenIn:
    """A node's agent has to be configured, and its workers started."""

    event: NodeUp


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHere:
    """A node that trains has reached this master: its workers need to know the records of the steps to come."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDropped:
    """A node is given up, with all that was asked of it."""

    node: str
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRaised:
    """An exception has ended a worker."""

    worker_id: WorkerId
    error: Raised


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRestarted:
    """A worker has ended and is started again, and those of other devices of its node with it."""

    worker_id: WorkerId
    pid: int
    also: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """Have a worker started in its place."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersFail:
    """A node's workers keep failing. Handling this may end the run."""

    node: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDropped:
    """A worker has ended, with all that was asked of it, and is started again."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWithout:
    """A node is not ready any more: plan without it, if it has a part in the plan in force."""

    node: str
    loss: LossCause
    detect_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksWanted:
    """Have the links timed that this network assumes, and look again once that is over."""

    network: NetworkProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class LocateCheckpoints:
    """Ask workers which checkpoints they can read."""

    worker_ids: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportProblems:
    """Say which checkpoints cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowCheckpoints:
    """Which checkpoints are this run's own to prune, and which saves will never be complete."""

    complete: Sequence[KnownCheckpoint]
    unfinished: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTraining:
    """Order the first plan: all that it needs is known."""

    kinds: tuple[NodeKind, ...]
    candidate: Candidate | None
    """The checkpoint that the run begins from; None for the model's initial values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreTime:
    """The step in flight may take until then before its lack is a hang."""

    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepDraining:
    """The run cannot go on without nodes that were to leave: keep them."""

    nodes: tuple[str, ...]


Effect = (
    Command
    | states.BeginRecovery
    | BeginTraining
    | states.CheckpointWanted
    | Choice
    | states.Decide
    | EndRun
    | ExpectSteps
    | states.GiveUp
    | KeepDraining
    | KnowCheckpoints
    | LinksWanted
    | LocateCheckpoints
    | MoreTime
    | states.NetworkDown
    | NodeDropped
    | states.NodeGone
    | NodeHere
    | states.NodeDrained
    | states.NodeReached
    | NodeTakenIn
    | states.PlanInForce
    | PlanWithout
    | states.RecoveryEnded
    | Repair
    | ReportProblems
    | StartAgain
    | WorkerDropped
    | WorkerRaised
    | WorkerRestarted
    | WorkersFail
    | states.WorkersWanted
)
Effects = tuple[Effect, ...]
"""What is to be done, in this order."""
