"""Timelines and simulated runs as a Chrome trace: JSON that Perfetto and chrome://tracing open.

In a timeline, a pipeline is a process, and each of its stages and links is a thread. Among runs, a policy is a process,
its activity is a thread, and throughput and nodes are counters. Times are microseconds, as the format requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from oobleck.schedule import Instruction
from oobleck.ui.run_panels import ACTIVITIES, RunPanel
from oobleck.ui.timeline import LOOKS, Figure

_MICROSECONDS = 1e6

ChromeEvent = dict[str, object]


def chrome_trace(figures: Sequence[Figure]) -> str:
    """Return the text of a trace file with one process for each figure."""
    return _file(event for process, figure in enumerate(figures) for event in _of_figure(process, figure))


def run_trace(panels: Sequence[RunPanel]) -> str:
    """Return the text of a trace file with one process for each run."""
    return _file(event for process, panel in enumerate(panels) for event in _of_run(process, panel))


def _file(events: Iterable[ChromeEvent]) -> str:
    return json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}) + "\n"


def _of_figure(process: int, figure: Figure) -> Iterator[ChromeEvent]:
    found = figure.timeline
    yield _name("process_name", process, 0, figure.title)
    for stage, (label, spans) in enumerate(zip(figure.labels, found.spans, strict=True)):
        yield _name("thread_name", process, stage, label)
        for span in spans:
            yield _instruction(process, stage, span.start_s, span.end_s, span.instruction)
    links = sorted({transfer.link for transfer in found.transfers})
    threads = {link: len(figure.labels) + index for index, link in enumerate(links)}
    for link, thread in threads.items():
        yield _name("thread_name", process, thread, str(link))
    for transfer in found.transfers:
        yield _instruction(process, threads[transfer.link], transfer.start_s, transfer.end_s, transfer.instruction)


def _of_run(process: int, panel: RunPanel) -> Iterator[ChromeEvent]:
    yield _name("process_name", process, 0, panel.name)
    for band in panel.bands:
        words, rate = ACTIVITIES[band.activity][0], {"samples_per_s": band.samples_per_s}
        yield {"ph": "X", "name": words, **_span(process, 0, band.start_s, band.stop_s), "args": rate}
        yield _counter(process, "samples/s", band.start_s, band.samples_per_s)
    for t_s, count in panel.num_nodes:
        yield _counter(process, "nodes", t_s, count)


def _name(kind: str, process: int, thread: int, name: str) -> ChromeEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _instruction(process: int, thread: int, start_s: float, end_s: float, instruction: Instruction) -> ChromeEvent:
    return {
        "ph": "X",
        "name": str(instruction),
        "cat": LOOKS[instruction.op].words if instruction.op in LOOKS else "send",
        **_span(process, thread, start_s, end_s),
        "args": {"microbatch": instruction.microbatch, "chunk": instruction.chunk},
    }


def _span(process: int, thread: int, start_s: float, end_s: float) -> ChromeEvent:
    duration_us = (end_s - start_s) * _MICROSECONDS
    return {"pid": process, "tid": thread, "ts": start_s * _MICROSECONDS, "dur": duration_us}


def _counter(process: int, name: str, t_s: float, value: float) -> ChromeEvent:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": t_s * _MICROSECONDS, "args": {name: value}}
