"""Conversion of public traces of failures and preemptions.

    format       who                      what a file holds
    oobleck      Oobleck (SOSP'23)        `t_ms,add|remove,node`, a line each
    bamboo       Bamboo (NSDI'23)         `t,count`, two lines a change; the unit is a header's, or seconds, or hours
                                          where times have decimals
    infinitehbd  InfiniteHBD (SIGCOMM'25) a JSON list of fault_start and fault_end, in days
    parcae       Parcae (NSDI'24)         a JSON array a line: [t_ms, "add" | "remove" | …, {"nodes": […]}]
    skypilot     SkyPilot's spot traces   {"metadata": {"gap_seconds": g}, "data": [count, …]}
    lanl         LANL 1996-2005           CSV with a header: nodenumz, Prob Started, Prob Fixed

Where a file names no nodes, a seed draws the ones that leave. Text in, trace out; this module reads no files.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from oobleck.errors import ConfigError, shown
from oobleck.job import MAX_NODES
from oobleck.json_table import JsonTable, parse_json

from .changes import Change, trace_of_changes, trace_of_counts
from .trace import Trace

_DAY_S = 86_400.0
_UNITS_S = {"ms": 0.001, "s": 1.0, "h": 3600.0}
_UNIT_WORDS = {
    **dict.fromkeys(("ms", "msec", "millis", "millisecond", "milliseconds"), "ms"),
    **dict.fromkeys(("s", "sec", "second", "seconds"), "s"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
}
# Published counts last some days: times that seem to last longer are probably in milliseconds.
_LONGEST_GUESSED_S = 30 * _DAY_S
_LANL_TIMES = ("%m/%d/%Y %H:%M", "%m/%d/%y %H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True, slots=True)
class _Source:
    text: str
    name: str
    seed: int
    num_nodes: int | None
    unit: str | None


def convert(
    text: str, *, format_name: str, name: str, seed: int = 0, num_nodes: int | None = None, unit: str | None = None
) -> Trace:
    """Convert a public trace's text; `name` names the file in errors and in the trace.

    `num_nodes` is the size of the cluster where the file lists only nodes that fail, `unit` the unit of times (`UNITS`)
    where the format leaves that open. Raises ConfigError that names the line.
    """
    try:
        if unit is not None and format_name != "bamboo":
            raise ConfigError(f"times of the format {format_name} have a unit of their own; leave --unit out")
        return FORMATS[format_name](_Source(text, name, seed, num_nodes, unit))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def detect_format(text: str) -> str | None:
    """Return the format of a file's text, judged by its beginning; None for an unknown one."""
    head = text.lstrip()[:2000]
    first = head.partition("\n")[0]
    if head.startswith("{") and '"gap_seconds"' in text:
        return "skypilot"
    if head.startswith("[") and '"fault_type"' in head:
        return "infinitehbd"
    if head.startswith("[") and first.rstrip().endswith("]"):
        return "parcae"
    if "nodenumz" in first:
        return "lanl"
    fields = first.split(",")
    if len(fields) == 3 and fields[1].strip() in ("add", "remove"):
        return "oobleck"
    if len(fields) == 2 and (_unit_named(first) is not None or (_is_number(fields[0]) and _is_number(fields[1]))):
        return "bamboo"
    return None


def _unit_named(header: str) -> str | None:
    """Return the unit that a header of counts names, such as `ms` for `time_ms,count` or `milliseconds,count`."""
    words = header.partition(",")[0].lower().replace("_", " ").replace("(", " ").replace(")", " ").split()
    return _UNIT_WORDS.get(words[-1]) if words else None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(text: object, where: str) -> float:
    """Return a finite number, from a JSON number or a CSV text."""
    if isinstance(text, bool) or not isinstance(text, str | int | float) or not _is_number(str(text)):
        raise ConfigError(f"{where}: {shown(text)} is not a number")
    return float(text)


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"line {number}", line


def _json(text: str, where: str) -> object:
    try:
        return parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _oobleck(source: _Source) -> Trace:
    changes: list[Change] = []
    for where, line in _lines(source.text):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or fields[1] not in ("add", "remove"):
            raise ConfigError(f"{where}: {line!r} is not `milliseconds,add|remove,node`")
        t_s = _number(fields[0], where) / 1000
        changes.append(Change(t_s=t_s, node=fields[2], joins=fields[1] == "add", where=where))
    return trace_of_changes(changes, source=f"{source.name} (Oobleck, SOSP'23)")


def _parcae(source: _Source) -> Trace:
    changes: list[Change] = []
    end_s = begin_s = 0.0
    for where, line in _lines(source.text):
        entry = _json(line, where)
        if not isinstance(entry, list) or len(entry) != 3:
            raise ConfigError(f"{where}: {line.strip()!r} is not [milliseconds, event, details]")
        # Lines without a change count too: the last line tells when the trace ends.
        end_s = _number(entry[0], where) / 1000
        begin_s = begin_s if changes else end_s
        if entry[1] in ("add", "remove"):
            nodes = JsonTable(entry[2], f"{where}: details").texts("nodes")
            changes += [Change(t_s=end_s, node=node, joins=entry[1] == "add", where=where) for node in nodes]
        elif entry[1] not in ("no-op", "migration"):
            raise ConfigError(f"{where}: event is {entry[1]!r}; it must be add, remove, no-op or migration")
    return trace_of_changes(changes, source=f"{source.name} (Parcae, NSDI'24)", duration_s=end_s - begin_s)


def _infinitehbd(source: _Source) -> Trace:
    entries = _json(source.text, "the file")
    if not isinstance(entries, list):
        raise ConfigError(f"the file must be a list, not {type(entries).__name__}")
    faults: list[Change] = []
    for index, entry in enumerate(entries):
        table = JsonTable(entry, f"entry {index}")
        kind = table.text("event_type")
        if kind not in ("fault_start", "fault_end"):
            raise ConfigError(f"{table.where}: event_type is {kind!r}; it must be fault_start or fault_end")
        t_s = _number(table.number("event_time"), table.where) * _DAY_S
        faults.append(Change(t_s=t_s, node=table.text("node_id"), joins=kind == "fault_end", where=table.where))
    return _trace_of_faults(faults, source, f"{source.name} (InfiniteHBD, SIGCOMM'25)")


def _lanl(source: _Source) -> Trace:
    faults: list[Change] = []
    rows = csv.DictReader(source.text.splitlines())
    for number, row in enumerate(rows, start=2):
        where = f"line {number}"
        node = f"node{_field(row, 'nodenumz', where)}"
        began_s = _lanl_time(_field(row, "Prob Started", where), where)
        faults.append(Change(t_s=began_s, node=node, joins=False, where=where))
        if fixed := (row.get("Prob Fixed") or "").strip():
            # A record may end before it begins.
            fixed_s = max(began_s, _lanl_time(fixed, where))
            faults.append(Change(t_s=fixed_s, node=node, joins=True, where=where))
    # At one moment losses come first, so that a fault of no length begins before it ends.
    faults.sort(key=lambda fault: (fault.t_s, fault.joins))
    if not faults:
        raise ConfigError("the file lists no failures")
    return _trace_of_faults(faults, source, f"{source.name} (LANL)", begin_s=faults[0].t_s)


def _field(row: Mapping[str, str | None], name: str, where: str) -> str:
    value = row.get(name)
    if value is None or not value.strip():
        raise ConfigError(f"{where}: {name} is missing")
    return value.strip()


def _lanl_time(text: str, where: str) -> float:
    for pattern in _LANL_TIMES:
        try:
            return (datetime.strptime(text, pattern) - datetime(1970, 1, 1)).total_seconds()
        except ValueError:
            pass
    raise ConfigError(f"{where}: {text!r} is not a time like 07/31/2003 14:05")


def _trace_of_faults(faults: list[Change], source: _Source, words: str, *, begin_s: float = 0.0) -> Trace:
    """Make a trace of faults that begin and end, with healthy nodes added; a node is present while it has no fault."""
    names = list(dict.fromkeys(fault.node for fault in faults))
    wanted = source.num_nodes if source.num_nodes is not None else len(names)
    if wanted < len(names):
        raise ConfigError(f"{len(names)} nodes fail in it; a cluster of {wanted} is too small")
    names += [f"healthy{number}" for number in range(wanted - len(names))]
    # Faults of a node may overlap: it returns with the end of the last.
    depth: Counter[str] = Counter()
    changes = [Change(t_s=begin_s, node=node, joins=True, where="the start") for node in names]
    for fault in faults:
        if fault.joins and not depth[fault.node]:
            raise ConfigError(f"{fault.where}: a fault of {fault.node} ends that never began")
        depth[fault.node] += -1 if fault.joins else 1
        if depth[fault.node] == (0 if fault.joins else 1):
            changes.append(fault)
    return trace_of_changes(changes, source=words)


def _bamboo(source: _Source) -> Trace:
    rows: list[tuple[float, int]] = []
    in_hours = False
    unit = source.unit
    for where, line in _lines(source.text):
        fields = line.split(",")
        if len(fields) != 2:
            raise ConfigError(f"{where}: {line!r} is not `time,count`")
        if not rows and (named := _unit_named(line)) is not None:
            if unit not in (None, named):
                raise ConfigError(f"{where}: it says that times are in {named}, and --unit says {unit}")
            unit = named
            continue
        in_hours = in_hours or "." in fields[0]
        rows.append((_number(fields[0], where), _count(fields[1], where)))
        if len(rows) > 1 and rows[-1][0] < rows[-2][0]:
            raise ConfigError(f"{where}: time goes backwards")
    if not rows:
        raise ConfigError("the file is empty")
    unit_s = _UNITS_S[unit or ("h" if in_hours else "s")]
    if unit is None and rows[-1][0] * unit_s > _LONGEST_GUESSED_S:
        guessed = "hours" if in_hours else "seconds"
        raise ConfigError(
            f"nothing says what its times are in, and in {guessed} it would last "
            f"{rows[-1][0] * unit_s / _DAY_S:,.0f} days; name the unit with --unit ms, s or h"
        )
    counts = [(t * unit_s, count) for t, count in rows]
    words = f"{source.name} (Bamboo, NSDI'23)"
    return trace_of_counts(counts, seed=source.seed, source=words, duration_s=counts[-1][0])


def _skypilot(source: _Source) -> Trace:
    table = JsonTable(_json(source.text, "the file"), "the file")
    if "metadata" not in table.items or "data" not in table.items:
        raise ConfigError("the file has no metadata, or no data")
    metadata = table.table("metadata")
    gap_s = _number(metadata.items.get("gap_seconds"), "metadata: gap_seconds")
    if gap_s <= 0:
        raise ConfigError(f"metadata: gap_seconds is {gap_s!r}; it must be above 0")
    data = [_count(value, f"data, entry {index}") for index, value in enumerate(table.list("data"))]
    counts = [(index * gap_s, count) for index, count in enumerate(data)]
    return trace_of_counts(counts, seed=source.seed, source=f"{source.name} (SkyPilot)", duration_s=len(data) * gap_s)


def _count(text: object, where: str) -> int:
    value = _number(text, where)
    if value < 0 or value != int(value) or value > MAX_NODES:
        raise ConfigError(f"{where}: {shown(text)} is not a number of nodes, from 0 to {MAX_NODES:,}")
    return int(value)


UNITS = tuple(_UNITS_S)

FORMATS: Mapping[str, Callable[[_Source], Trace]] = {
    "oobleck": _oobleck,
    "bamboo": _bamboo,
    "infinitehbd": _infinitehbd,
    "parcae": _parcae,
    "skypilot": _skypilot,
    "lanl": _lanl,
}
