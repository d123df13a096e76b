"""Incidents: what went wrong, the evidence, what was done about it, and what it cost. Values only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oobleck.planner import WorkerId

from .entry import Entry, Worded
from .failures import Failure, Remedy

_REPEATED_TIMES = 3
_NOTHING = (Remedy.NOTHING, Remedy.NOTHING_HANDED_OVER, Remedy.NOTHING_CONTINUED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    t_s: float
    """When it happened, as far as that is known: a frozen node is noticed late."""
    failure: Failure
    node: str | None
    """None where it concerns the whole run."""
    evidence: Entry
    origin: str = ""
    """What provided the node; empty where a user named it."""
    worker_id: WorkerId | None = None
    is_tried_again: bool | None = None
    """Whether the lost node is tried again automatically; None where none was lost."""

    @property
    def is_caused_by_peer(self) -> bool:
        return self.failure in (Failure.PEER, Failure.HANG)

    @property
    def text(self) -> str:
        return self.evidence.evidence(self.worker_id)

    @property
    def detail(self) -> str:
        return self.evidence.detail(self.worker_id)


class Measure(Worded):
    """What was done about a failure, in words with the node or shard concerned."""

    WORKER_RESTARTED = "worker_restarted", "the worker of {subject} is started again"
    NODE_LEFT_OUT = "node_left_out", "the run continues without {subject}"
    SHARD_LEFT_OUT = "shard_left_out", "the run continues without {subject}, from record position {position} on"
    FORK_SERVER_RESTARTED = "fork_server_restarted", "workers that live train on; the fork server is started again"
    WORKERS_KEPT = "workers_kept", "workers that live train on; the fork server is not started again"
    MASTER_REPLACED = "master_replaced", "another master took the run over"
    PLAN_CHANGED = "plan_changed", "{reason}"
    RANKS_RESTARTED = "ranks_restarted", "{reason}"
    TRAINING_CONTINUED = "training_continued", "training continues"
    NOTHING = "nothing", "none: training continues"
    JOB_ENDED = "job_ended", "the job ended: {first_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A measure, and what it was taken for."""

    measure: Measure
    subject: str = ""
    position: int = 0
    """The record from which on a shard is left out."""
    reason: str = ""

    @property
    def text(self) -> str:
        # "cannot start:" and the like say nothing without the line after them.
        first_line = re.sub(r":\n", ": ", self.reason, count=1).partition("\n")[0]
        return self.measure.template.format(
            subject=self.subject, position=self.position, reason=self.reason, first_line=first_line
        )


@dataclass(slots=True, kw_only=True)
class Incident:
    """A failure with what it led to. It grows while it is under way."""

    number: int
    findings: tuple[Finding, ...] = ()
    responses: tuple[Response, ...] = ()
    stall_s: float = 0.0
    """Seconds in which no microbatch of a committed step made progress anywhere."""
    microbatches_redone: int = 0
    steps_lost: int = 0
    bytes_moved: int = 0
    lost: tuple[str, ...] = ()
    ended_s: float | None = None
    """None while it is under way."""
    is_fatal: bool = False
    repeated: int = 1
    """How often this node was at fault within ten minutes."""

    @property
    def root(self) -> Finding:
        """The earliest finding that no peer caused."""
        # By when they happened: a node that froze is noticed after the failures that it caused.
        ordered = sorted(self.findings, key=lambda finding: finding.t_s)
        return next((finding for finding in ordered if not finding.is_caused_by_peer), ordered[0])

    @property
    def consequences(self) -> tuple[Finding, ...]:
        """The other findings, in order; most of them follow from the root."""
        root = self.root
        return tuple(finding for finding in self.findings if finding is not root)

    @property
    def title(self) -> str:
        return f"{self.root.node}: {self.root.failure.text}" if self.root.node else self.root.failure.text

    @property
    def advice(self) -> str:
        node, repeated = self.root.node or "", self.repeated
        return " ".join(remedy.text(node=node, repeated=repeated) for remedy in self.remedies)

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        """What a person should do now, the most urgent first."""
        remedy = self.root.failure.remedy
        if self.is_fatal and remedy in _NOTHING:
            remedy = Remedy.START_AGAIN
        if self.repeated >= _REPEATED_TIMES and self.root.node:
            return Remedy.CHECK_REPEATED_NODE, remedy
        if self.is_fatal or self.root.is_tried_again is None:
            return (remedy,)
        return remedy, Remedy.IS_TRIED_AGAIN if self.root.is_tried_again else Remedy.ADD_NODE
