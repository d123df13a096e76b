"""What an agent says to its master: of its node, and of workers that cannot say it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .bases import FromWorker
from .checkpoint_messages import CheckpointCommitted, LayersPersisted
from .ends import Killed, ServerEnd, Unseen, WorkerEnd
from .rank_messages import RanksReport
from .relay_messages import RelayReport
from .worker_messages import WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(FromWorker):
    """A worker process exists."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """What a group of processes may use of its machine: a container, a task, a set of cores."""

    group: str
    """Distinguishes it from the other groups of the machine."""
    num_cores: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The agent's answer to the greeting: who it is, and whether it fits."""

    protocol: int
    oobleck_version: str
    python_version: str
    node: str
    pid: int
    generation: int
    """The newest generation that this agent's workers were ordered to adopt; 0 for none."""
    workers: tuple[WorkerStarted, ...]
    """The workers that live, by device."""
    num_cores: int
    memory_bytes: int
    machine: str = ""
    """Identifies the machine among all; empty where that is not known."""
    container: str = ""
    """Identifies, on its machine, what the agent sees of devices."""
    limits: tuple[ResourceLimit, ...] = ()
    """What leaves the agent, and all else in these groups, less than the machine has."""
    clock_s: float
    """The machine's monotonic clock at the time of sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Said by the agent every interval."""

    sequence: int | None
    """Where it is to be answered: the master says it again, with its number, once all before it is dealt with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(FromWorker):
    """A worker process is gone."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    pid: int
    end: WorkerEnd

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether nothing speaks for an error of its own."""
        return isinstance(self.end, Killed | Unseen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The node was given notice of its termination: it asks to be drained."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStopped:
    """The agent has ended its workers and leaves now."""

    reason: str
    is_failure: bool = False
    """It cannot do what it is for, which was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerEnded:
    """The process that forks the node's workers has ended. Workers that it has forked live on."""

    end: ServerEnd
    is_restarted: bool
    """False where it has ended too often of late: then the node can start no worker any more."""


AgentMessage = (
    Hello
    | Heartbeat
    | WorkerStarted
    | WorkerExited
    | Leaving
    | AgentStopped
    | ForkServerEnded
    | LayersPersisted
    | CheckpointCommitted
    | WorkerReport
    | RanksReport
)
"""What an agent says to the master, its workers' words included."""

FromAgent = AgentMessage | RelayReport
"""What comes from an agent, be it said by others through it."""
