"""What can happen in a cluster, and how each event stands in a trace file.

A new one is a class with a kind here, in `TraceEvent`. If it is based on `Gone` or `Stays`, what it does to a node's
state is said by that; else `state` has to say it. Type checking then names the three places that make it happen, each
in a world of its own: `sim/sweep/sweep.py`, `sim/cluster/run.py` and `cli/chaos_run/play.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, get_args

from oobleck.errors import ConfigError, shown
from oobleck.job import MAX_DEVICES
from oobleck.job.bounds import MAX_SECONDS

_MAX_SLOWNESS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfNode:
    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(_OfNode):
    """After this a node is away, whatever was wrong with it before. It may join again, holding nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays(_OfNode):
    """A node stays where it was: what happens, happens to a process on it, or is only announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Gone):
    """A node is gone: its power, its machine, its instance."""

    kind: ClassVar[str] = "node_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(_OfNode):
    """A node that was away is there, empty, and wants to take part."""

    kind: ClassVar[str] = "node_joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(_OfNode):
    """Nothing on a node moves any more, and nothing says so: its connections stay open."""

    kind: ClassVar[str] = "node_frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thawed(_OfNode):
    """A frozen node continues where it stood."""

    kind: ClassVar[str] = "node_thawed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed(_OfNode):
    """From now on a node takes `factor` times as long as usual; 1 is its usual speed again."""

    kind: ClassVar[str] = "node_slow"
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _MAX_SLOWNESS:
            raise ConfigError(f"factor is {self.factor!r}; it must be from 1, the usual speed, to {_MAX_SLOWNESS:,.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrashed(Stays):
    """The worker process of one device ends; the node and its agent are well."""

    kind: ClassVar[str] = "worker_crashed"
    device: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.device < MAX_DEVICES:
            raise ConfigError(f"device is {shown(self.device)}; it must be at least 0, and less than {MAX_DEVICES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCrashed(Gone):
    """The agent process of a node ends, and its workers with it; the machine is well, and may join again."""

    kind: ClassVar[str] = "agent_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerCrashed(Stays):
    """The process that forks a node's workers ends; those that live continue, and a next one is started."""

    kind: ClassVar[str] = "fork_server_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterCrashed:
    """The master process ends, and is started again `down_s` seconds later."""

    kind: ClassVar[str] = "master_crashed"
    t_s: float
    down_s: float = 1.0

    def __post_init__(self) -> None:
        _check_seconds("down_s", self.down_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterFrozen:
    """The master process is stopped, and continues where it stood `frozen_s` seconds later."""

    kind: ClassVar[str] = "master_frozen"
    t_s: float
    frozen_s: float

    def __post_init__(self) -> None:
        _check_seconds("frozen_s", self.frozen_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFrozen(Stays):
    """The agent process of a node is stopped for `frozen_s` seconds; its workers train on."""

    kind: ClassVar[str] = "agent_frozen"
    frozen_s: float

    def __post_init__(self) -> None:
        _check_seconds("frozen_s", self.frozen_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioned:
    """From now on these nodes reach one another, but neither the other nodes nor the master.

    With `spares_master` the master reaches them all the same: the network between nodes is cut, and no other.
    """

    kind: ClassVar[str] = "partition"
    t_s: float
    nodes: tuple[str, ...]
    spares_master: bool = False

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"nodes is {list(self.nodes)}; it must name at least 1 node, and each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """All partitions end."""

    kind: ClassVar[str] = "heal"
    t_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed(Stays):
    """The provider says that it will take a node away in `grace_s` seconds. The loss, if it comes, is an event too."""

    kind: ClassVar[str] = "notice"
    grace_s: float

    def __post_init__(self) -> None:
        _check_seconds("grace_s", self.grace_s)


NodeEvent = (
    Lost | Joined | Frozen | Thawed | Slowed | WorkerCrashed | ForkServerCrashed | AgentCrashed | AgentFrozen | Noticed
)

TraceEvent = NodeEvent | MasterCrashed | MasterFrozen | Partitioned | Healed

_TYPES: dict[str, type[TraceEvent]] = {event_type.kind: event_type for event_type in get_args(TraceEvent)}


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value <= MAX_SECONDS:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, from 0 to {MAX_SECONDS:,.0f}")


def event_types() -> Mapping[str, type[TraceEvent]]:
    """Return all kinds of events by their names in a trace file."""
    return _TYPES


def event_nodes(event: TraceEvent) -> tuple[str, ...]:
    match event:
        case MasterCrashed() | MasterFrozen() | Healed():
            return ()
        case Partitioned(nodes=nodes):
            return nodes
        case _:
            return (event.node,)


def event_to_json(event: TraceEvent) -> dict[str, object]:
    """Return an event as it stands in a trace file: seconds and kind first, then what the kind asks for."""
    document: dict[str, object] = {"t_s": event.t_s, "kind": event.kind}
    document |= {part.name: getattr(event, part.name) for part in fields(event) if part.name != "t_s"}
    return document
