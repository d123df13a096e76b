"""Incidents: what went wrong, what that is known by, what was done about it, and what it cost. Values only.

The evidence of a finding is the journal entry that it was found in; `incident_sentences` says it to people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from oobleck.planner import WorkerId

from .failures import Failure, Remedy, remedy_of
from .node_entries import ForkServerDown, NodeLost, NodeUnfit, PaceChanged, TerminationNoticed, WorkerDown
from .plan_entries import HangExplained, RecoveryStarted
from .ranks import RankDown, RanksHung
from .run_entries import JobEnded, JournalGap, MasterResumed
from .state_entries import SaveFailed, ShardQuarantined
from .step_entries import ReplicasDiffer, StepDone

_REPEATED_TIMES = 3

Evidence = (
    WorkerDown
    | RankDown
    | RanksHung
    | NodeLost
    | NodeUnfit
    | TerminationNoticed
    | ForkServerDown
    | PaceChanged
    | HangExplained
    | RecoveryStarted
    | StepDone
    | ReplicasDiffer
    | SaveFailed
    | JournalGap
    | ShardQuarantined
    | MasterResumed
    | JobEnded
)
"""The entries that something wrong is known by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that went wrong."""

    t_s: float
    """When it happened, as far as it is known: a frozen node is noticed late."""
    failure: Failure
    node: str | None
    """None where it is the whole run's."""
    evidence: Evidence
    origin: str = ""
    """What has given the node; empty where a user has named it."""
    worker_id: WorkerId | None = None
    """Where one worker is at fault: of those that the evidence names, this one."""
    is_tried_again: bool | None = None
    """Whether the lost node is, without anybody asking for it; None where none was lost."""

    @property
    def is_caused_by_peer(self) -> bool:
        return self.failure in (Failure.PEER, Failure.HANG)


class Measure(StrEnum):
    """What was done about a failure."""

    WORKER_RESTARTED = "worker_restarted"
    NODE_LEFT_OUT = "node_left_out"
    SHARD_LEFT_OUT = "shard_left_out"
    FORK_SERVER_RESTARTED = "fork_server_restarted"
    WORKERS_KEPT = "workers_kept"
    """Of a fork server that ended too often: nothing but that what it has forked lives on."""
    MASTER_REPLACED = "master_replaced"
    PLAN_CHANGED = "plan_changed"
    RANKS_RESTARTED = "ranks_restarted"
    """All of them, as another generation."""
    TRAINING_CONTINUED = "training_continued"
    NOTHING = "nothing"
    JOB_ENDED = "job_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A measure, with whom it was taken for."""

    measure: Measure
    subject: str = ""
    """The node or the shard."""
    position: int = 0
    """In a shard: from where on it is left out."""
    reason: str = ""
    """Of the new plan, or of the job's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure with what it led to."""

    number: int
    """From 1, in the order of the journal."""
    root: Finding
    consequences: tuple[Finding, ...]
    """What went wrong besides, in order; most of it because of the root."""
    responses: tuple[Response, ...]
    stall_s: float = 0.0
    """Time in which no microbatch of a committed step made progress anywhere."""
    microbatches_redone: int = 0
    steps_lost: int = 0
    bytes_moved: int = 0
    lost: tuple[str, ...] = ()
    """Nodes that the run continues without."""
    ended_s: float | None = None
    """None while it is under way."""
    is_fatal: bool = False
    """Whether the job ended over it."""
    repeated: int = 1
    """How often this node was at fault within ten minutes."""

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What a person should do now, the most urgent first."""
        remedy = remedy_of(self.root.failure)
        if self.repeated >= _REPEATED_TIMES and self.root.node:
            return Remedy.CHECK_REPEATED_NODE, remedy
        if self.is_fatal or self.root.is_tried_again is None:
            return (remedy,)
        return remedy, Remedy.IS_TRIED_AGAIN if self.root.is_tried_again else Remedy.ADD_NODE
