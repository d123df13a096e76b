"""Why a node was lost: one class for each way, with what is known of it.

Decisions match on these classes, or on their `cause`; `sentences` says them to people. Texts within them come from
outside (SSH, an interpreter, a peer), and nobody looks into them.

    what happened                                     class              cause
    the connection to its agent broke                 ConnectionLost     connection_lost
    its agent is gone                                 AgentLost          connection_lost
    it reads none of what it is sent                  NotReading         connection_lost
    it said what the protocol does not allow          ProtocolBroken     connection_lost
    its agent, or a worker of it, said nothing        Silent             lease_expired
    its worker ended, and is not started again        WorkerEnded        worker_exited
    its agent can start no worker                     NoWorkerStarts     worker_exited
    its agent ended by itself                         AgentLeft          agent_left
    its peers do not reach it                         CutOff             cut_off
    it could not be reached                           Unreachable        unreachable
    it was reached, and does not fit the run          Misfit             unreachable
    it was reached, and is faulty                     Unfit              unfit
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from oobleck.control.protocol import Raised, WorkerEnd


class LossCause(StrEnum):
    """Why a node or a worker was lost, in a word."""

    CONNECTION_LOST = "connection_lost"
    LEASE_EXPIRED = "lease_expired"
    WORKER_EXITED = "worker_exited"
    """A worker ended: its node may stay, and start it again."""
    AGENT_LEFT = "agent_left"
    CUT_OFF = "cut_off"
    """It reaches the master, and not its peers."""
    UNREACHABLE = "unreachable"
    UNFIT = "unfit"
    """It can be reached, and was found faulty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLost:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    had_no_master: bool = False
    """It was lost while there was no master to see it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotReading:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    num_unread: int
    """Messages that waited for it at last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolBroken:
    cause: ClassVar[LossCause] = LossCause.CONNECTION_LOST
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    cause: ClassVar[LossCause] = LossCause.LEASE_EXPIRED
    silent_s: float
    is_worker: bool = False
    """Its agent was heard, and its worker did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    cause: ClassVar[LossCause] = LossCause.WORKER_EXITED
    pid: int
    end: WorkerEnd

    @property
    def is_users(self) -> bool:
        """Whether it says what the user must change."""
        return isinstance(self.end, Raised) and self.end.kind.is_users


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWorkerStarts:
    cause: ClassVar[LossCause] = LossCause.WORKER_EXITED
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLeft:
    cause: ClassVar[LossCause] = LossCause.AGENT_LEFT
    reason: str
    """What the agent said as it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    cause: ClassVar[LossCause] = LossCause.CUT_OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    cause: ClassVar[LossCause] = LossCause.UNREACHABLE
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    cause: ClassVar[LossCause] = LossCause.UNREACHABLE
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    cause: ClassVar[LossCause] = LossCause.UNFIT
    fault: str
    """What its check found."""


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
