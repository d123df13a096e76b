"""Simulated runs on the terminal: a table that compares them, and the throughput of each over time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .formatting import count_text, duration_text, percent_text
from .run_panels import RunPanel
from .step_chart import step_chart


def sim_report(panels: Sequence[RunPanel], *, width: int) -> RenderableType:
    """Draw the runs of several policies over one trace, on one scale."""
    table = Table(title=f"{duration_text(panels[0].duration_s)} simulated", pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for header in ("samples/s", "goodput", "steps", "lost", "recoveries"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("time elsewhere")
    for panel in panels:
        table.add_row(
            panel.name,
            f"{panel.samples_per_s:,.4g}",
            percent_text(panel.goodput),
            count_text(panel.steps_committed),
            count_text(panel.steps_lost),
            count_text(panel.num_recoveries),
            _elsewhere(panel),
        )
    top = max((band.samples_per_s for panel in panels for band in panel.bands), default=0.0)
    charts: list[RenderableType] = []
    for panel in panels:
        charts.append(Text.assemble((panel.name, "bold"), (f"  {panel.about}", "dim")))
        charts += step_chart(panel.throughput, panel.duration_s, width=min(width, 100), unit="samples/s", top=top)
    return Group(table, *charts)


def _elsewhere(panel: RunPanel) -> str:
    shares = sorted(panel.seconds.items(), key=lambda item: -item[1])
    told = [f"{word} {percent_text(spent / panel.duration_s)}" for word, spent in shares if spent > 0]
    return ", ".join(told) or "none"
