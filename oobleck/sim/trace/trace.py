"""Failure traces: what happens to the nodes of a cluster, and when.

A trace says what the world does, never what a system makes of it. The simulator plays it on virtual nodes in
either mode, and the same file can be played on a real cluster. Its file form is JSON, versioned, with units in
the names; `trace_from_json` and `trace_to_json` are inverses.

    state of a node     may happen to it                                        leads to
    away                joined                                                  here
    here                lost, agent_crashed                                     away
    here                frozen                                                  frozen
    here                slow, worker_crashed, fork_server_crashed,              here
                        agent_frozen, notice
    frozen              thawed                                                  here
    frozen              lost                                                    away
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

from oobleck.errors import ConfigError
from oobleck.job import MAX_DEVICES, MAX_NODES
from oobleck.json_table import JsonTable, parse_json, shown

__all__ = [
    "MAX_EVENTS",
    "MAX_SECONDS",
    "TRACE_VERSION",
    "AgentCrashed",
    "AgentFrozen",
    "ForkServerCrashed",
    "Frozen",
    "Healed",
    "Joined",
    "Lost",
    "MasterCrashed",
    "MasterFrozen",
    "NodeEvent",
    "Noticed",
    "Partitioned",
    "Slowed",
    "Thawed",
    "Trace",
    "TraceEvent",
    "WorkerCrashed",
    "event_kind",
    "event_kinds",
    "event_to_json",
    "trace_from_json",
    "trace_to_json",
]

TRACE_VERSION = 1
MAX_EVENTS = 1_000_000
MAX_SECONDS = 5e8
"""Fifteen years: half as long again as the longest failure trace that is published."""
_LEAST_SECONDS = 1e-3
_MAX_SLOWNESS = 1e6


# --- what can happen ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node is gone: its power, its machine, its instance. It may join again, holding nothing."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A node that was away is there, empty, and wants to take part."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """Nothing on a node moves any more, and nothing says so: its connections stay open."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thawed:
    """A frozen node goes on where it stood."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """From now on a node takes `factor` times as long as usual; 1 is its usual speed again."""

    t_s: float
    node: str
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _MAX_SLOWNESS:
            raise ConfigError(f"factor is {self.factor!r}; it must be from 1, the usual speed, to {_MAX_SLOWNESS:,.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrashed:
    """The worker process of one device ends; the node and its agent are well."""

    t_s: float
    node: str
    device: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.device < MAX_DEVICES:
            raise ConfigError(f"device is {shown(self.device)}; it must be at least 0, and less than {MAX_DEVICES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCrashed:
    """The agent process of a node ends, and its workers with it; the machine is well, and may join again."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerCrashed:
    """The process that forks a node's workers ends; those that live go on, and a next one is started."""

    t_s: float
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterCrashed:
    """The master process ends, and is started again `down_s` seconds later."""

    t_s: float
    down_s: float = 1.0

    def __post_init__(self) -> None:
        _check_seconds("down_s", self.down_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterFrozen:
    """The master process is stopped, and goes on where it stood `frozen_s` seconds later."""

    t_s: float
    frozen_s: float

    def __post_init__(self) -> None:
        _check_seconds("frozen_s", self.frozen_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFrozen:
    """The agent process of a node is stopped for `frozen_s` seconds; its workers train on."""

    t_s: float
    node: str
    frozen_s: float

    def __post_init__(self) -> None:
        _check_seconds("frozen_s", self.frozen_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partitioned:
    """From now on these nodes reach one another, but neither the other nodes nor the master."""

    t_s: float
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"nodes is {list(self.nodes)}; it must name at least 1 node, and each once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healed:
    """All partitions end."""

    t_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """The provider says that it will take a node away in `grace_s` seconds. The loss, if it comes, is an event too."""

    t_s: float
    node: str
    grace_s: float

    def __post_init__(self) -> None:
        _check_seconds("grace_s", self.grace_s)


NodeEvent = (
    Lost | Joined | Frozen | Thawed | Slowed | WorkerCrashed | ForkServerCrashed | AgentCrashed | AgentFrozen | Noticed
)
"""What happens to one node."""

TraceEvent = NodeEvent | MasterCrashed | MasterFrozen | Partitioned | Healed

_KINDS: dict[str, type[TraceEvent]] = {
    "node_lost": Lost,
    "node_joined": Joined,
    "node_frozen": Frozen,
    "node_thawed": Thawed,
    "node_slow": Slowed,
    "worker_crashed": WorkerCrashed,
    "fork_server_crashed": ForkServerCrashed,
    "agent_crashed": AgentCrashed,
    "agent_frozen": AgentFrozen,
    "master_crashed": MasterCrashed,
    "master_frozen": MasterFrozen,
    "partition": Partitioned,
    "heal": Healed,
    "notice": Noticed,
}
_NAMES = {event_type: kind for kind, event_type in _KINDS.items()}


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value <= MAX_SECONDS:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds, from 0 to {MAX_SECONDS:,.0f}")


# --- a trace --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A cluster, and what happens to it in `duration_s` seconds. Raises ConfigError for what cannot be."""

    duration_s: float
    nodes: tuple[str, ...]
    """All nodes that are ever there."""
    start: tuple[str, ...]
    """Those that are there at the beginning."""
    events: tuple[TraceEvent, ...] = ()
    """In the order of time."""
    source: str = ""
    """Where the trace comes from, for people."""

    def __post_init__(self) -> None:
        if not _LEAST_SECONDS <= self.duration_s <= MAX_SECONDS:
            raise ConfigError(
                f"duration_s is {self.duration_s!r}; it must be a number of seconds from {_LEAST_SECONDS} to "
                f"{MAX_SECONDS:,.0f} (fifteen years)"
            )
        for name, number, most in (("nodes", len(self.nodes), MAX_NODES), ("events", len(self.events), MAX_EVENTS)):
            if number > most:
                raise ConfigError(f"there are {number:,} {name}; a trace has at most {most:,}")
        for name, nodes in (("nodes", self.nodes), ("start", self.start)):
            if twice := [node for node, number in Counter(nodes).items() if number > 1]:
                raise ConfigError(f"{name} names {twice[0]!r} twice")
        if "" in self.nodes:
            raise ConfigError("nodes holds an empty name")
        if unknown := sorted(set(self.start) - set(self.nodes)):
            raise ConfigError(f"start names {unknown[0]!r}, which is not among the trace's nodes")
        _check_events(self)

    @cached_property
    def counts(self) -> tuple[tuple[float, int], ...]:
        """(seconds, nodes there from then on), from 0, one for each change."""
        here = set(self.start)
        counts = [(0.0, len(here))]
        for event in self.events:
            match event:
                case Joined(node=node):
                    here.add(node)
                case Lost(node=node) | AgentCrashed(node=node):
                    here.discard(node)
                case _:
                    continue
            if counts[-1][0] == event.t_s:
                counts.pop()
            counts.append((event.t_s, len(here)))
        return tuple(counts)


def _check_events(trace: Trace) -> None:
    check = _Check(trace)
    for index, event in enumerate(trace.events):
        if (problem := check.problem(event)) is not None:
            raise ConfigError(f"event {index} {json.dumps(event_to_json(event))}: {problem}")


class _Check:
    """Follows the nodes' states through the events of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._known = frozenset(trace.nodes)
        self._duration_s = trace.duration_s
        self._here = set(trace.start)
        self._frozen: set[str] = set()
        self._is_partitioned = False
        self._now_s = 0.0

    def problem(self, event: TraceEvent) -> str | None:
        """Take the next event in; return what is wrong with it."""
        return self._time_problem(event.t_s) or self._name_problem(event) or self._state_problem(event)

    def _time_problem(self, t_s: float) -> str | None:
        if not (math.isfinite(t_s) and t_s >= 0):
            return f"t_s is {t_s!r}; it must be a number of seconds, at least 0"
        if t_s < self._now_s:
            return f"time goes backwards: the event before is at {self._now_s:g} s"
        if t_s > self._duration_s:
            return f"the trace ends at {self._duration_s:g} s"
        self._now_s = t_s
        return None

    def _name_problem(self, event: TraceEvent) -> str | None:
        match event:
            case MasterCrashed() | MasterFrozen() | Healed():
                names: tuple[str, ...] = ()
            case Partitioned(nodes=names):
                pass
            case _:
                names = (event.node,)
        unknown = [name for name in names if name not in self._known]
        return f"{unknown[0]!r} is not among the trace's nodes" if unknown else None

    def _state_problem(self, event: TraceEvent) -> str | None:
        match event:
            case MasterCrashed() | MasterFrozen():
                return None
            case Partitioned():
                self._is_partitioned = True
                return None
            case Healed():
                return self._heal()
            case Joined(node=node):
                return self._join(node)
            case _ if event.node not in self._here:
                return f"{event.node} is not there"
            case Lost(node=node):
                self._leave(node)
                return None
            case Thawed(node=node):
                return self._thaw(node)
            case _ if event.node in self._frozen:
                return f"{event.node} is frozen"
            case Frozen(node=node):
                self._frozen.add(node)
            case AgentCrashed(node=node):
                self._leave(node)
            case Slowed() | WorkerCrashed() | AgentFrozen() | Noticed():
                pass
        return None

    def _heal(self) -> str | None:
        problem = None if self._is_partitioned else "there is no partition"
        self._is_partitioned = False
        return problem

    def _join(self, node: str) -> str | None:
        problem = f"{node} is there already" if node in self._here else None
        self._here.add(node)
        return problem

    def _leave(self, node: str) -> None:
        self._here.discard(node)
        self._frozen.discard(node)

    def _thaw(self, node: str) -> str | None:
        problem = None if node in self._frozen else f"{node} is not frozen"
        self._frozen.discard(node)
        return problem


# --- the file -------------------------------------------------------------------------------------------------


def event_kinds() -> tuple[str, ...]:
    """Return all kinds of events, as they stand in a trace file."""
    return tuple(_KINDS)


def event_kind(event: TraceEvent) -> str:
    """Return an event's kind, as it stands in a trace file."""
    return _NAMES[type(event)]


def event_to_json(event: TraceEvent) -> dict[str, object]:
    """Return an event as it stands in a trace file: seconds and kind first, then what the kind asks for."""
    document: dict[str, object] = {"t_s": event.t_s, "kind": event_kind(event)}
    document |= {part.name: getattr(event, part.name) for part in fields(event) if part.name != "t_s"}
    return document


def trace_to_json(trace: Trace) -> str:
    """Return the trace as the text of a trace file, one event a line."""
    head = {"version": TRACE_VERSION, "duration_s": trace.duration_s, "nodes": trace.nodes, "start": trace.start}
    if trace.source:
        head["source"] = trace.source
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    events = ",\n".join(f"  {json.dumps(event_to_json(event))}" for event in trace.events)
    return "{" + ",\n ".join([*lines, f'"events": [\n{events}\n ]' if events else '"events": []']) + "}\n"


def trace_from_json(text: str, *, source: str = "trace") -> Trace:
    """Read a trace file's text; O(events).

    `source` names the file in errors. Raises ConfigError that names the event, by its index (from 0) and its
    content, or the field, and what was expected.
    """
    try:
        return _read_trace(JsonTable(parse_json(text), "the file"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_trace(table: JsonTable) -> Trace:
    table.check_keys(("version", "duration_s", "nodes", "events"), optional=("start", "source"))
    version = table.integer("version")
    if version != TRACE_VERSION:
        raise ConfigError(f"trace version {version} is not known; this program reads {TRACE_VERSION}")
    nodes = table.texts("nodes")
    return Trace(
        duration_s=table.number("duration_s"),
        nodes=nodes,
        start=table.texts("start") if "start" in table.items else nodes,
        events=tuple(_read_event(value, index) for index, value in enumerate(table.list("events"))),
        source=table.text("source") if "source" in table.items else "",
    )


def _read_event(value: object, index: int) -> TraceEvent:
    table = JsonTable(value, f"event {index} {shown(value)}")
    kind = table.text("kind") if "kind" in table.items else None
    if kind not in _KINDS:
        raise ConfigError(f"{table.where}: kind is {kind!r}; it must be one of {', '.join(_KINDS)}")
    event_type = _KINDS[kind]
    names = [part.name for part in fields(event_type)]
    required = [part.name for part in fields(event_type) if part.name not in _OPTIONAL]
    table.check_keys(["kind", *required], optional=_OPTIONAL & set(names))
    values = {name: _read_value(table, name) for name in names if name in table.items}
    try:
        # The keys are checked above against the fields of the kind, and each has one type in all kinds.
        return event_type(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{table.where}: {error}") from None


_OPTIONAL = frozenset({"device", "down_s"})


def _read_value(table: JsonTable, name: str) -> str | int | float | tuple[str, ...]:
    match name:
        case "node":
            return table.text(name)
        case "device":
            return table.integer(name)
        case "nodes":
            return table.texts(name)
        case _:
            return table.number(name)
