"""Trace files: versioned JSON with units in the names. Reading and writing are inverses."""

from __future__ import annotations

import json
from dataclasses import fields

from oobleck.errors import ConfigError, shown
from oobleck.json_table import JsonTable, parse_json

from .events import TraceEvent, event_to_json, event_types
from .trace import Trace

TRACE_VERSION = 1


def trace_to_json(trace: Trace) -> str:
    """Return the trace as the text of a trace file, with one event a line."""
    head = {"version": TRACE_VERSION, "duration_s": trace.duration_s, "nodes": trace.nodes, "start": trace.start}
    if trace.kinds:
        head["kinds"] = {
            kind: [node for node in trace.nodes if trace.kinds[node] == kind]
            for kind in dict.fromkeys(trace.kinds.values())
        }
    if trace.domains:
        head["domains"] = {
            domain: [node for node in trace.nodes if trace.domains.get(node) == domain]
            for domain in dict.fromkeys(trace.domains.values())
        }
    if trace.source:
        head["source"] = trace.source
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    events = ",\n".join(f"  {json.dumps(event_to_json(event))}" for event in trace.events)
    return "{" + ",\n ".join([*lines, f'"events": [\n{events}\n ]' if events else '"events": []']) + "}\n"


def trace_from_json(text: str, *, source: str = "trace") -> Trace:
    """Read a trace file's text; `source` names the file in errors. O(events).

    Raises ConfigError with the event, by its index (from 0) and content, or the field, and the expectation.
    """
    try:
        return _read_trace(JsonTable(parse_json(text), "the file"))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read_trace(table: JsonTable) -> Trace:
    table.check_keys(("version", "duration_s", "nodes", "events"), optional=("start", "kinds", "domains", "source"))
    version = table.integer("version")
    if version != TRACE_VERSION:
        raise ConfigError(f"trace version {version} is not known; this program reads {TRACE_VERSION}")
    nodes = table.texts("nodes")
    return Trace(
        duration_s=table.number("duration_s"),
        nodes=nodes,
        start=table.texts("start") if "start" in table.items else nodes,
        events=tuple(_read_event(value, index) for index, value in enumerate(table.list("events"))),
        kinds=_read_groups(table, "kinds"),
        domains=_read_groups(table, "domains"),
        source=table.text("source") if "source" in table.items else "",
    )


def _read_groups(table: JsonTable, key: str) -> dict[str, str]:
    """Read {name: [node, …]}, if it is there; return the name of each node."""
    names: dict[str, str] = {}
    groups = JsonTable(table.items.get(key, {}), key)
    for name in groups.items:
        for node in groups.texts(name):
            if node in names:
                raise ConfigError(f"{key}: {node!r} is of {names[node]} and of {name}; name it once")
            names[node] = name
    return names


def _read_event(value: object, index: int) -> TraceEvent:
    table = JsonTable(value, f"event {index} {shown(value)}")
    kind = table.text("kind") if "kind" in table.items else None
    event_type = event_types().get(kind or "")
    if event_type is None:
        raise ConfigError(f"{table.where}: kind is {kind!r}; it must be one of {', '.join(event_types())}")
    names = [part.name for part in fields(event_type)]
    table.check_keys(["kind", *(name for name in names if name not in _OPTIONAL)], optional=_OPTIONAL & set(names))
    values = {name: _read_value(table, name) for name in names if name in table.items}
    try:
        # The keys are the fields of the kind, and each field has one type in all kinds.
        return event_type(**values)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{table.where}: {error}") from None


_OPTIONAL = frozenset({"device", "down_s", "spares_master"})


def _read_value(table: JsonTable, name: str) -> str | int | float | tuple[str, ...]:
    match name:
        case "node":
            return table.text(name)
        case "device":
            return table.integer(name)
        case "nodes":
            return table.texts(name)
        case "spares_master":
            return table.flag(name)
        case _:
            return table.number(name)
