"""What an agent reports to its master: about its node, and about workers that cannot report it themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .checkpoint_messages import CheckpointCommitted, LayersPersisted
from .ends import Killed, ServerEnd, Unseen, WorkerEnd
from .rank_messages import RanksReport
from .records import FromWorker
from .relay_messages import RelayReport
from .worker_messages import WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(FromWorker):
    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """How much of its machine a group of processes may use: a container, a task, a set of cores."""

    group: str
    """Identifies it among the groups of the machine."""
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
    """The newest generation that its workers were ordered to adopt; 0 for none."""
    workers: tuple[WorkerStarted, ...]
    """The living workers, in the order of devices."""
    num_cores: int
    memory_bytes: int
    machine: str = ""
    """Identifies the machine; empty where that is not known."""
    container: str = ""
    """Identifies, on its machine, the set of devices that the agent sees."""
    limits: tuple[ResourceLimit, ...] = ()
    """The groups that the agent is in, which may use less than the machine has."""
    clock_s: float
    """The machine's monotonic clock at the time of sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Sent by the agent every interval."""

    sequence: int | None
    """If set, the master sends it back, once it has processed everything before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    busy: float
    """The share of time in which it computes, 0 to 1."""
    used_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """What a node's processes use of its machine. For people: it decides nothing, and is never repeated."""

    cores: float
    """The processor time of a second, in seconds."""
    num_cores: int
    used_bytes: int
    memory_bytes: int
    devices: tuple[DeviceUse, ...] = ()
    """In the order of their numbers; empty for CPUs, and without NVML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(FromWorker):
    """A worker process is gone."""

    needs_orders: ClassVar[bool] = False
    outlives_worker: ClassVar[bool] = True
    pid: int
    end: WorkerEnd

    @property
    def was_ended_from_outside(self) -> bool:
        # If how it ended is unknown, nothing indicates an error of its own.
        return isinstance(self.end, Killed | Unseen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The node has notice of its termination, and asks to be drained."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStopped:
    """The agent has ended its workers and leaves now."""

    reason: str
    is_failure: bool = False
    """It was not asked to leave: it cannot do its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerEnded:
    """The process that forks the node's workers has ended. The workers that it has forked live on."""

    end: ServerEnd
    is_restarted: bool
    """False where it has ended too often: then the node can start no worker any more."""


AgentMessage = (
    Hello
    | Heartbeat
    | NodeUse
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
"""What an agent sends to the master, its workers' messages included."""

FromAgent = AgentMessage | RelayReport
"""What arrives from an agent, from others through it included."""
