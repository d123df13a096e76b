"""Why a node was lost: one class for each way, with what is known of it.

Decisions match on these classes, or on their `cause`; `text` is for people. Texts within them come from outside (SSH,
an interpreter, a peer), and no program parses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from oobleck.control.protocol import Raised, WorkerEnd, end_text

from .failures import Failure, failure_of_end


class LossCause(StrEnum):
    """Why a node or a worker was lost, in a word."""

    CONNECTION_LOST = "connection_lost"
    LEASE_EXPIRED = "lease_expired"
    WORKER_EXITED = "worker_exited"
    """A worker ended: its node may stay, and restart it."""
    AGENT_LEFT = "agent_left"
    CUT_OFF = "cut_off"
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    failure: ClassVar[Failure] = Failure.CONTACT_LOST
    text: ClassVar[str] = "its connection was lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    failure: ClassVar[Failure] = Failure.CONTACT_LOST
    had_no_master: bool = False

    @property
    def text(self) -> str:
        return "its agent was lost while there was no master" if self.had_no_master else "its agent is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReading:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    failure: ClassVar[Failure] = Failure.CONTACT_LOST
    num_unread: int

    @property
    def text(self) -> str:
        return f"did not read any of {self.num_unread} messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolBroken:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    failure: ClassVar[Failure] = Failure.CONTACT_LOST
    problem: str

    @property
    def text(self) -> str:
        return f"broke the protocol: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """Its agent, or a worker of it, sent nothing."""

    cause: ClassVar[LossCause] = LossCause.LEASE_EXPIRED
    failure: ClassVar[Failure] = Failure.FROZEN
    silent_s: float
    is_worker: bool = False
    """Whether its agent was heard, but its worker did not answer."""

    @property
    def text(self) -> str:
        return f"{'its worker did not answer' if self.is_worker else 'silent'} for {self.silent_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """Its worker ended, and is not restarted."""

    cause: ClassVar[LossCause] = LossCause.WORKER_EXITED
    pid: int
    end: WorkerEnd

    @property
    def failure(self) -> Failure:
        return failure_of_end(self.end)

    @property
    def text(self) -> str:
        return end_text(self.end) if self.is_users else f"worker process {self.pid} ended: {end_text(self.end)}"

    @property
    def is_users(self) -> bool:
        """Whether it tells the user what to change."""
        return isinstance(self.end, Raised) and self.end.kind.is_users


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWorkerStarts:
    cause: ClassVar[LossCause] = LossCause.WORKER_EXITED
    failure: ClassVar[Failure] = Failure.NO_WORKER
    problem: str

    @property
    def text(self) -> str:
        return f"no worker can be started: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLeft:
    cause: ClassVar[LossCause] = LossCause.AGENT_LEFT
    failure: ClassVar[Failure] = Failure.REQUESTED
    reason: str

    @property
    def text(self) -> str:
        return f"its agent stopped: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    cause: ClassVar[LossCause] = LossCause.CUT_OFF
    failure: ClassVar[Failure] = Failure.CUT_OFF
    text: ClassVar[str] = "it reaches the master, but its peers do not reach it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excluded:
    cause: ClassVar[LossCause] = LossCause.UNREACHABLE
    failure: ClassVar[Failure] = Failure.UNFIT_NODE
    problem: str

    @property
    def text(self) -> str:
        return self.problem


class Unreachable(_Excluded):
    """It could not be reached."""

    __slots__ = ()


class Misfit(_Excluded):
    """It was reached, and does not fit the run."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    cause: ClassVar[LossCause] = LossCause.UNFIT
    failure: ClassVar[Failure] = Failure.UNFIT_NODE
    fault: str

    @property
    def text(self) -> str:
        return f"faulty: {self.fault}"


Loss = (
    ConnectionLost
    | AgentLost
    | NotReading
    | ProtocolBroken
    | Silent
    | WorkerEnded
    | NoWorkerStarts
    | AgentLeft
    | CutOff
    | Unreachable
    | Misfit
    | Unfit
)
