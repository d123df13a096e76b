"""Numbers as people read them, and the facts of a summary that all its views share."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from oobleck.planner.formatting import counted

if TYPE_CHECKING:
    from oobleck.control.journal import NodeSummary, Summary


def duration_text(seconds: float | None) -> str:
    """Return hours, minutes and seconds, as `0:01:23`; a dash for None."""
    return "–" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))


def seconds_text(seconds: float | None) -> str:
    """Return seconds with the digits that matter: `0.012 s`, `3.21 s`, `124 s`; a dash for None."""
    if seconds is None:
        return "–"
    digits = 3 if seconds < 1 else 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f} s"


def hours_text(hours: float) -> str:
    """Return hours with the digits that matter: `0.0123`, `1.50`, `1,024.0`."""
    digits = 4 if hours < 0.1 else 3 if hours < 1 else 2 if hours < 10 else 1
    return f"{hours:,.{digits}f}"


def count_text(value: float | None) -> str:
    """Return a whole number with its thousands set apart: `12,345`; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def percent_text(share: float) -> str:
    """Return a share of one as `93.1 %`."""
    return f"{100 * share:.1f} %"


def bytes_text(size_bytes: float) -> str:
    """Return a size in decimal units: `28.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def layers_text(first_layer: int, stop_layer: int) -> str:
    """Return layers [first_layer, stop_layer) as `3` or `0-3`."""
    last = stop_layer - 1
    return str(first_layer) if last == first_layer else f"{first_layer}-{last}"


def chunks_text(chunks: Iterable[tuple[int, int]]) -> str:
    """Return the layers of a stage, chunk by chunk: `0-3`, or `0-1, 4-5`."""
    return ", ".join(layers_text(first, stop) for first, stop in chunks)


def one_line(text: str) -> str:
    """Return a text as one line that is safe to draw, without line breaks and control characters."""
    return "".join(character if character.isprintable() else "�" for character in " ".join(text.split()))


def steps_text(summary: Summary) -> str:
    """Return the newest committed step, the steps of the job, and how many of them this run has made."""
    reached = f"{count_text(summary.last_step)} of {count_text(summary.max_steps)}"
    return f"{reached}, {count_text(summary.steps_committed)} of them in this run" if summary.begun_after else reached


def recoveries_text(summary: Summary) -> str:
    """Return the number of recoveries, and of planned changes of nodes."""
    planned = len(summary.recoveries) - summary.num_recoveries
    changes = f", and {counted(planned, 'planned change')} of nodes" if planned else ""
    return f"{count_text(summary.num_recoveries)}{changes}"


def node_hours_text(nodes: NodeSummary) -> str:
    """Return the node-hours, their uses, and their number per million tokens."""
    parts = ("training", nodes.training), ("idle", nodes.idle), ("recovering", nodes.recovering), ("other", nodes.other)
    uses = (f"{what} {hours_text(hours)} ({percent_text(hours / nodes.there)})" for what, hours in parts if hours)
    each = nodes.per_million_tokens
    return f"{hours_text(nodes.there)}: {', '.join(uses)}" + (
        "" if each is None else f"; {each:.3g} per million tokens"
    )
