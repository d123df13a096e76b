"""Numbers as people read them, and a summary's facts that every way of showing it words alike."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oobleck.control.journal import NodeSummary, Summary


def duration_text(seconds: float | None) -> str:
    """Hours, minutes and seconds: `0:01:23`; a dash for None."""
    return "–" if seconds is None else str(timedelta(seconds=max(0, round(seconds))))


def seconds_text(seconds: float | None) -> str:
    """Seconds with the digits that matter: `0.012 s`, `3.21 s`, `124 s`; a dash for None."""
    if seconds is None:
        return "–"
    digits = 3 if seconds < 1 else 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f} s"


def hours_text(hours: float) -> str:
    """Hours with the digits that matter: `0.0123`, `1.50`, `1,024.0`."""
    digits = 4 if hours < 0.1 else 3 if hours < 1 else 2 if hours < 10 else 1
    return f"{hours:,.{digits}f}"


def count_text(value: float | None) -> str:
    """A whole number with thousands set apart: `12,345`; a dash for None."""
    return "–" if value is None else f"{value:,.0f}"


def percent_text(share: float) -> str:
    """A share of one as `93.1 %`."""
    return f"{100 * share:.1f} %"


def bytes_text(size_bytes: float) -> str:
    """A size in decimal units: `28.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def layers_text(first_layer: int, stop_layer: int) -> str:
    """Layers [first_layer, stop_layer) as `3` or `0-3`."""
    last = stop_layer - 1
    return str(first_layer) if last == first_layer else f"{first_layer}-{last}"


def chunks_text(chunks: Iterable[tuple[int, int]]) -> str:
    """The layers of a stage, chunk by chunk: `0-3`, or `0-1, 4-5`."""
    return ", ".join(layers_text(first, stop) for first, stop in chunks)


def one_line(text: str) -> str:
    """A text from elsewhere as one line that is safe to draw: no line breaks, no control characters."""
    return "".join(character if character.isprintable() else "�" for character in " ".join(text.split()))


def steps_text(summary: Summary) -> str:
    """The newest committed step, of all that the run was asked for, and how many this run has added to earlier ones."""
    reached = f"{count_text(summary.last_step)} of {count_text(summary.max_steps)}"
    return f"{reached}, {count_text(summary.steps_committed)} of them in this run" if summary.begun_after else reached


def recoveries_text(summary: Summary) -> str:
    """How many recoveries there were, and how often the plan changed with nothing wrong."""
    planned = len(summary.recoveries) - summary.num_recoveries
    changes = f", and {planned} planned change{'' if planned == 1 else 's'} of nodes" if planned else ""
    return f"{count_text(summary.num_recoveries)}{changes}"


def node_hours_text(nodes: NodeSummary) -> str:
    """Say how many node-hours were there, what they went into, and what was got for them."""
    parts = ("training", nodes.training), ("idle", nodes.idle), ("recovering", nodes.recovering), ("other", nodes.other)
    told = ", ".join(
        f"{what} {hours_text(hours)} ({percent_text(hours / nodes.there)})" for what, hours in parts if hours
    )
    each = nodes.per_million_tokens
    return f"{hours_text(nodes.there)}: {told}" + ("" if each is None else f"; {each:.3g} per million tokens")
