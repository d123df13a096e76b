"""Traces and simulated runs on the terminal: tables of numbers, and charts of characters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oobleck.sim import Repeated

from .formatting import count_text, duration_text, percent_text
from .run_panels import RunPanel, column_means
from .summary_table import facts_table

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = len(_BLOCKS) - 1


def sim_report(panels: Sequence[RunPanel], *, width: int) -> RenderableType:
    """Draw the runs of several policies over one trace, on one scale."""
    table = Table(title=f"{duration_text(panels[0].duration_s)} simulated", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for header in ("samples/s", "goodput", "steps", "lost", "recoveries"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("time elsewhere")
    for panel in panels:
        counts = panel.summary.steps_committed, panel.summary.steps_lost, panel.summary.num_recoveries
        shares = f"{panel.samples_per_s:,.4g}", percent_text(panel.summary.goodput)
        table.add_row(panel.name, *shares, *map(count_text, counts), _elsewhere(panel))
    # One scale for all policies, so that their charts compare.
    top = max((band.samples_per_s for panel in panels for band in panel.bands), default=0.0)
    charts: list[RenderableType] = []
    for panel in panels:
        charts.append(Text.assemble((panel.name, "bold"), (f"  {panel.about}", "dim")))
        rates = [(band.start_s, band.samples_per_s) for band in panel.bands]
        charts += step_chart(rates, panel.duration_s, width=min(width, 100), unit="samples/s", top=top)
    return Group(table, *charts)


def repeated_report(repeated: Sequence[Repeated]) -> RenderableType:
    """Draw the means of several policies over several traces."""
    table = Table(title=f"{len(repeated[0].outcomes)} traces: means and 95 % confidence intervals", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for header in ("samples/s", "goodput", "lost"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in repeated:
        table.add_row(each.policy, str(each.samples_per_s), str(each.goodput), str(each.steps_lost))
    return table


def _elsewhere(panel: RunPanel) -> str:
    shares = sorted(panel.summary.downtime_s.items(), key=lambda item: -item[1])
    told = [f"{word} {percent_text(spent / panel.duration_s)}" for word, spent in shares if spent > 0]
    return ", ".join(told) or "none"


def trace_report(
    name: str, facts: Mapping[str, object], counts: Sequence[tuple[float, int]], duration_s: float, *, width: int
) -> RenderableType:
    """Draw what a trace holds. `facts` are those of `TraceFacts.to_dict`, `counts` the nodes by time."""
    chart = step_chart([(t_s, float(count)) for t_s, count in counts], duration_s, width=min(width, 100), unit="nodes")
    return Group(facts_table(name, _rows(facts)), *chart)


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


def step_chart(
    points: Sequence[tuple[float, float]],
    duration_s: float,
    *,
    width: int,
    unit: str,
    height: int = 5,
    top: float | None = None,
    style: str = "cyan",
) -> list[Text]:
    """Draw a quantity that keeps each value until the next point, in columns of its mean.

    `points` are (seconds, value) in order; `width` includes the labels. `top` is the value at the top, by default the
    greatest of all.
    """
    highest = top if top is not None else max((value for _, value in points), default=0.0)
    label = f"{highest:,.4g} {unit}" if highest < 1000 else f"{highest:,.0f} {unit}"
    columns = max(10, width - len(label) - 2)
    means = column_means(points, duration_s, columns)
    levels = [round(value / highest * height * _EIGHTHS) if highest > 0 else 0 for value in means]
    lines = []
    for row in range(height - 1, -1, -1):
        blocks = "".join(_BLOCKS[min(_EIGHTHS, max(0, level - row * _EIGHTHS))] for level in levels)
        left = label if row == height - 1 else "0" if row == 0 else ""
        lines.append(Text.assemble((left.rjust(len(label)), "dim"), " ▕", (blocks, style)))
    end = duration_text(duration_s)
    lines.append(Text(" " * (len(label) + 2) + "0".ljust(columns - len(end)) + end, style="dim"))
    return lines
