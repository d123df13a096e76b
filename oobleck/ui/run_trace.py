"""Simulated runs as a Chrome trace: JSON that Perfetto and chrome://tracing open.

A policy is a process; what it does is a thread, throughput and nodes are counters. Times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from .run_panels import ACTIVITIES, RunPanel

__all__ = ["run_trace"]

_MICROSECONDS = 1e6

Event = dict[str, object]


def run_trace(panels: Sequence[RunPanel]) -> str:
    """Return the text of a trace file with one process for each run."""
    events = [event for process, panel in enumerate(panels) for event in _events(process, panel)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(process: int, panel: RunPanel) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": panel.name}}
    for band in panel.bands:
        yield {
            "ph": "X",
            "name": ACTIVITIES[band.activity][0],
            "pid": process,
            "tid": 0,
            "ts": band.start_s * _MICROSECONDS,
            "dur": (band.stop_s - band.start_s) * _MICROSECONDS,
            "args": {"samples_per_s": band.samples_per_s},
        }
        yield _counter(process, "samples/s", band.start_s, band.samples_per_s)
    for t_s, count in panel.num_nodes:
        yield _counter(process, "nodes", t_s, count)


def _counter(process: int, name: str, t_s: float, value: float) -> Event:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": t_s * _MICROSECONDS, "args": {name: value}}
