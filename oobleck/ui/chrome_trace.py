"""Timelines as a Chrome trace: JSON that Perfetto and chrome://tracing open.

A pipeline is a process, a stage or a link a thread of it. Times are microseconds, as the format asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from oobleck.schedule import Instruction

from .timeline import PASS_WORDS
from .timeline_svg import Figure

__all__ = ["chrome_trace"]

_MICROSECONDS = 1e6

Event = dict[str, object]


def chrome_trace(figures: Sequence[Figure]) -> str:
    """Return the text of a trace file with one process for each figure."""
    events = [event for process, figure in enumerate(figures) for event in _events(process, figure)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(process: int, figure: Figure) -> Iterator[Event]:
    found = figure.timeline
    yield _name("process_name", process, 0, figure.title)
    for stage, (label, spans) in enumerate(zip(figure.labels, found.spans, strict=True)):
        yield _name("thread_name", process, stage, label)
        for span in spans:
            yield _slice(process, stage, span.start_s, span.end_s, span.instruction)
    links = sorted({transfer.link for transfer in found.transfers})
    threads = {link: len(figure.labels) + index for index, link in enumerate(links)}
    for link, thread in threads.items():
        yield _name("thread_name", process, thread, str(link))
    for transfer in found.transfers:
        yield _slice(process, threads[transfer.link], transfer.start_s, transfer.end_s, transfer.instruction)


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, start_s: float, end_s: float, instruction: Instruction) -> Event:
    return {
        "ph": "X",
        "name": str(instruction),
        "cat": PASS_WORDS.get(instruction.op, "send"),
        "pid": process,
        "tid": thread,
        "ts": start_s * _MICROSECONDS,
        "dur": (end_s - start_s) * _MICROSECONDS,
        "args": {"microbatch": instruction.microbatch, "chunk": instruction.chunk},
    }
