"""Entries about nodes and their workers."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.protocol import ServerEnd, Things, WorkerAddress, WorkerEnd
from oobleck.job import NodeSpec

from .losses import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConnected:
    t_s: float
    node: str
    agent_pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUp:
    """A worker is ready to train."""

    t_s: float
    node: str
    device: int
    pid: int
    data_digest: str
    """Equal on all nodes, or they would train on different text."""
    address: WorkerAddress | None = None
    saves: bool = False
    """Whether it has a place to save its state in."""
    alike: Things = ()
    """What else it has as all others do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDown:
    """A worker ended by itself; its node stays, and starts it again, with the node's other workers."""

    t_s: float
    node: str
    device: int
    pid: int
    end: WorkerEnd
    also: tuple[int, ...] = ()
    """Devices whose workers are ended for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    t_s: float
    node: str
    loss: Loss
    is_requested: bool = False
    """The user had it killed."""
    is_tried_again: bool = False
    """Without anybody asking for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnfit:
    """A node that is not in the run was found faulty by its check, and stays out."""

    t_s: float
    node: str
    fault: str
    """What the check found."""
    is_tried_again: bool
    """Without anybody asking for it: one that was lost is; one that a run begins without is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminationNoticed:
    """A node will be taken away: it is drained before."""

    t_s: float
    node: str
    reason: str
    """In the words of the agent that announced it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerDown:
    """The process that forks a node's workers has ended. Workers that it has forked live on."""

    t_s: float
    node: str
    end: ServerEnd
    is_restarted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node was drained: it holds nothing that is needed any more."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAdded:
    """The user gave the job another node."""

    t_s: float
    node: NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChanged:
    """A node has become slow, or slower, or faster."""

    t_s: float
    node: str
    factor: float
    """Its time over the usual: 1 where it is not slow any more."""
