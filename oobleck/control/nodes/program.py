"""The program that a run's nodes carry out, as the parts that know the nodes call it: training, or a script's ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from oobleck.control.events import NodeUp, StopRequested, Turn
from oobleck.control.journal import Loss, LossCause
from oobleck.control.protocol import WorkerEnd
from oobleck.planner import WorkerId

from .membership import Member


class Program(ABC):
    """Its methods are called when nodes join and leave, once `Membership` knows that, in the turn of the cause."""

    work: ClassVar[str]
    """What a node that can be drained does, for people."""

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether the run survives the loss of a node; before, such a loss ends the start."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """The newest generation known here."""

    @abstractmethod
    def is_at_work(self, member: Member) -> bool:
        """Whether a node has a part in what runs, or could have, so that it can be drained."""

    @abstractmethod
    def needs(self, node: str) -> bool:
        """Whether what runs counts on a node, although it is to leave."""

    @abstractmethod
    def configure(self, turn: Turn, node: str) -> None:
        """Tell a node's agent what to run: the agent is new, or may have missed it."""

    @abstractmethod
    def node_back(self, turn: Turn, event: NodeUp) -> None:
        """A known agent is reached again, or meets its next master."""

    @abstractmethod
    def drop_node(self, turn: Turn, node: str, loss: Loss) -> None:
        """A node is lost: discard what it was asked, or ask others."""

    @abstractmethod
    def go_on_without(self, turn: Turn, member: Member, loss: LossCause, silent_s: float) -> None:
        """Continue without a node, which was last heard `silent_s` ago; `member` is what it was."""

    @abstractmethod
    def node_draining(self, turn: Turn, node: str) -> None:
        """A node that is at work is to leave."""

    @abstractmethod
    def node_left(self, turn: Turn, node: str) -> None:
        """A node was drained, and is gone."""

    @abstractmethod
    def stop(self, turn: Turn, event: StopRequested) -> None:
        """End what runs: the user wants that, or nothing is left to run on."""


class WorkerProgram(Protocol):
    """A program whose nodes have workers, which can be started again."""

    @property
    def is_begun(self) -> bool: ...

    @property
    def furthest_step(self) -> int:
        """The newest step that was ever committed."""

    def node_met(self, turn: Turn, node: str, *, is_again: bool) -> None:
        """A node with workers is reached; if that is `is_again`, messages to it may be lost."""

    def worker_ended(self, turn: Turn, worker_id: WorkerId, end: WorkerEnd) -> None:
        """A worker has ended by itself, or was killed."""

    def is_met_elsewhere(self, worker_id: WorkerId) -> bool:
        """Whether the exception that ended a worker has just ended another one, too, so that no device is to blame."""

    def drop_worker(self, turn: Turn, worker_id: WorkerId) -> None:
        """A worker has ended and is restarted: discard what it was asked, or ask others."""

    def go_on_without(self, turn: Turn, member: Member, loss: LossCause, silent_s: float) -> None:
        """As in `Program`."""
