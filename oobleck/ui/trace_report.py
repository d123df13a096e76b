"""A failure trace on the terminal: its numbers, and how many nodes there are when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from .formatting import duration_text
from .step_chart import step_chart


def trace_report(
    name: str,
    facts: Mapping[str, object],
    counts: Sequence[tuple[float, int]],
    duration_s: float,
    *,
    width: int,
) -> RenderableType:
    """Draw what a trace holds. `facts` are those of `TraceFacts.to_dict`, `counts` the nodes by time."""
    table = Table(title=name, show_header=False)
    table.add_column("what", style="dim", no_wrap=True)
    table.add_column("value")
    for label, value in _rows(facts):
        table.add_row(label, value)
    chart = step_chart([(t_s, float(count)) for t_s, count in counts], duration_s, width=min(width, 100), unit="nodes")
    return Group(table, *chart)


def _rows(facts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    yield "source", str(facts["source"]) or "unknown"
    yield "length", _seconds(facts["duration_s"])
    yield "nodes", f"{facts['num_nodes']}, {facts['num_at_start']} of them at the start"
    yield "there", f"{facts['mean_nodes']:.1f} on average, {facts['fewest_nodes']} to {facts['most_nodes']}"
    yield "events", _counts(facts["events"]) or "none"
    yield (
        "losses",
        f"{facts['losses_per_node_hour']:.3g} in a node-hour; one in {_seconds(facts['mean_time_between_losses_s'])}",
    )
    yield "lost at once", _counts(facts["losses_at_once"]) or "none"
    yield "back after", f"{_seconds(facts['away_s_median'])} (median)"


def _seconds(value: object) -> str:
    return duration_text(value) if isinstance(value, int | float) else "–"


def _counts(value: object) -> str:
    assert isinstance(value, Mapping)
    return ", ".join(f"{key}: {count}" for key, count in value.items())
