"""Entries about nodes and their workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.control import protocol
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId

from .entry import Entry
from .failures import Failure
from .losses import Loss, WorkerEnded

# A node that the user had killed is lost in one of these ways. Any other failure came before that.
_MAY_BE_REQUESTED = frozenset({Failure.CONTACT_LOST, Failure.UNFIT_NODE, Failure.CUT_OFF})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected(Entry):
    node: str
    agent_pid: int

    @property
    def sentence(self) -> str:
        return f"{self.node} connected (agent process {self.agent_pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUp(Entry):
    node: str
    device: int
    pid: int
    data_digest: str
    """Equal on all nodes, else they would train on different text."""
    address: protocol.WorkerAddress | None = None
    saves: bool = False
    alike: protocol.Things = ()
    """What else must be equal on all workers."""

    @property
    def sentence(self) -> str:
        return f"{self.node} device {self.device} is ready (worker process {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDown(Entry):
    """A worker ended; its node stays, and restarts it, with the node's other workers."""

    level: ClassVar[str] = "warning"
    node: str
    device: int
    pid: int
    end: protocol.WorkerEnd
    also: tuple[int, ...] = ()
    """Devices whose workers are ended for that, and restarted too."""

    @property
    def sentence(self) -> str:
        what = f"worker of {self.node} ended ({protocol.end_text(self.end)})"
        return f"a {what}; the node's workers are started again" if self.also else f"the {what}; it is started again"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return protocol.end_text(self.end)

    def detail(self, worker_id: WorkerId | None) -> str:
        return self.end.traceback if isinstance(self.end, protocol.Raised) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(Entry):
    level: ClassVar[str] = "warning"
    node: str
    loss: Loss
    is_requested: bool = False
    is_tried_again: bool = False

    @property
    def failure(self) -> Failure:
        failure = self.loss.failure
        return Failure.REQUESTED if self.is_requested and failure in _MAY_BE_REQUESTED else failure

    @property
    def sentence(self) -> str:
        return f"{self.node} lost: {self._cause}"

    @property
    def _cause(self) -> str:
        return f"{self.loss.text} (killed on request)" if self.failure is not self.loss.failure else self.loss.text

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self._cause

    def detail(self, worker_id: WorkerId | None) -> str:
        end = self.loss.end if isinstance(self.loss, WorkerEnded) else None
        return end.traceback if isinstance(end, protocol.Raised) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnfit(Entry):
    """A node's check found it faulty; it is not in the run, and stays out."""

    level: ClassVar[str] = "warning"
    node: str
    fault: str
    is_tried_again: bool
    """Whether it is tried again automatically: a lost node is, one that a run begins without is not."""

    @property
    def sentence(self) -> str:
        if self.is_tried_again:
            return f"{self.node} is not taken in again: {self.fault}"
        way_back = f"once it is repaired, `oobleck add {self.node}` adds it"
        return f"{self.node} is faulty and left out: {self.fault}; {way_back}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self.fault


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationNoticed(Entry):
    """A node will be taken away, and is drained before."""

    level: ClassVar[str] = "warning"
    node: str
    reason: str

    @property
    def sentence(self) -> str:
        return f"{self.node} is to be terminated: {self.reason}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerDown(Entry):
    """The process that forks a node's workers has ended. The workers that it has forked live on."""

    level: ClassVar[str] = "warning"
    node: str
    end: protocol.ServerEnd
    is_restarted: bool

    @property
    def sentence(self) -> str:
        return f"{self.node}'s fork server ended: {self.evidence(None)}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        never = "it is not started again, because it has ended too often"
        return f"{protocol.server_end_text(self.end)}; {'it is started again' if self.is_restarted else never}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft(Entry):
    """A node was drained, and holds nothing any more that is needed."""

    node: str

    @property
    def sentence(self) -> str:
        return f"{self.node} has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdded(Entry):
    node: NodeSpec

    @property
    def sentence(self) -> str:
        return f"{self.node.name} is added{f' ({self.node.origin})' if self.node.origin else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChanged(Entry):
    """A node has become slow, or slower, or faster."""

    node: str
    factor: float
    """Its time over the usual time: 1 where it is not slow any more."""

    @property
    def level(self) -> str:
        return "warning" if self.factor > 1 else "info"

    @property
    def sentence(self) -> str:
        slow = f"{self.factor:.1f} times the usual time"
        return f"{self.node} takes {slow if self.factor > 1 else 'the usual time again'}"


NodeEntry = (
    NodeConnected
    | WorkerUp
    | WorkerDown
    | NodeLost
    | NodeUnfit
    | TerminationNoticed
    | ForkServerDown
    | NodeLeft
    | NodeAdded
    | PaceChanged
)
