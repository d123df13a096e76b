"""The events of a trace, and their form in a trace file.

A new event is a class with a `kind`, listed in `TraceEvent`. `Gone` or `Stays` as a base defines its effect on a node's
state; otherwise add the effect to `state`. Type checking then names the three places that carry it out, each in its own
world: `sim/sweep/sweep.py`, `sim/cluster/run.py` and `cli/chaos_run/play.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, get_args

from oobleck.errors import ConfigError, shown
from oobleck.job import MAX_DEVICES
from oobleck.job.bounds import MAX_SECONDS

_MAX_SLOWNESS = 1e6


class _Lasting:
    """An event with a duration."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in ("down_s", "frozen_s", "grace_s"):
            value = getattr(self, name, 0.0)
            if not 0 <= value <= MAX_SECONDS:
                raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, from 0 to {MAX_SECONDS:,.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfNode:
    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(_OfNode):
    """A node leaves, whatever its state was. It may join again, holding nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stays(_OfNode):
    """A node keeps its state: the event strikes a process on it, or only announces something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Gone):
    """A node loses its power, its machine, or its instance."""

    kind: ClassVar[str] = "node_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(_OfNode):
    """An absent node comes up empty, and wants to take part."""

    kind: ClassVar[str] = "node_joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen(_OfNode):
    """All processes of a node freeze, with its connections open."""

    kind: ClassVar[str] = "node_frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thawed(_OfNode):
    """A frozen node continues."""

    kind: ClassVar[str] = "node_thawed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed(_OfNode):
    """A node takes `factor` times as long as usual from now on; 1 restores its usual speed."""

    kind: ClassVar[str] = "node_slow"
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _MAX_SLOWNESS:
            raise ConfigError(f"factor is {self.factor!r}; it must be from 1, the usual speed, to {_MAX_SLOWNESS:,.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrashed(Stays):
    """The worker process of one device ends; the node and its agent continue."""

    kind: ClassVar[str] = "worker_crashed"
    device: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.device < MAX_DEVICES:
            raise ConfigError(f"device is {shown(self.device)}; it must be at least 0, and less than {MAX_DEVICES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCrashed(Gone):
    """A node's agent ends with its workers; the machine stays up, and may join again."""

    kind: ClassVar[str] = "agent_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerCrashed(Stays):
    """A node's fork server ends; living workers continue, and the next fork server starts."""

    kind: ClassVar[str] = "fork_server_crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterCrashed(_Lasting):
    """The master process ends, and another starts `down_s` seconds later."""

    kind: ClassVar[str] = "master_crashed"
    t_s: float
    down_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterFrozen(_Lasting):
    """The master process freezes for `frozen_s` seconds."""

    kind: ClassVar[str] = "master_frozen"
    t_s: float
    frozen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFrozen(_Lasting, Stays):
    """A node's agent freezes for `frozen_s` seconds; its workers train on."""

    kind: ClassVar[str] = "agent_frozen"
    frozen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioned:
    """These nodes reach one another, but neither the other nodes nor, without `spares_master`, the master."""

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
class Noticed(_Lasting, Stays):
    """The provider announces that it will take a node away in `grace_s` seconds; the loss is a separate event."""

    kind: ClassVar[str] = "notice"
    grace_s: float


NodeEvent = (
    Lost | Joined | Frozen | Thawed | Slowed | WorkerCrashed | ForkServerCrashed | AgentCrashed | AgentFrozen | Noticed
)

TraceEvent = NodeEvent | MasterCrashed | MasterFrozen | Partitioned | Healed


def event_types() -> Mapping[str, type[TraceEvent]]:
    """Return the classes of events by their kinds in a trace file."""
    return _TYPES


_TYPES: dict[str, type[TraceEvent]] = {event_type.kind: event_type for event_type in get_args(TraceEvent)}


def event_nodes(event: TraceEvent) -> tuple[str, ...]:
    if isinstance(event, _OfNode):
        return (event.node,)
    return event.nodes if isinstance(event, Partitioned) else ()


def event_to_json(event: TraceEvent) -> dict[str, object]:
    """Return an event in the form of a trace file: seconds and kind, then the fields of the kind."""
    values = {part.name: getattr(event, part.name) for part in fields(event)}
    return {"t_s": values.pop("t_s"), "kind": event.kind, **values}
