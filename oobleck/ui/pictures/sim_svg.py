"""Simulated runs as an SVG picture: one panel a policy, with throughput, nodes and what kept it from training.

All panels share their axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from oobleck.sim.costs import Outcome
from oobleck.sim.trace import Trace
from oobleck.ui.formatting import duration_text, percent_text
from oobleck.ui.run_panels import ACTIVITIES, Band, RunPanel, column_means, panel_of

from . import axes

_LABELS, _RIGHT = 74, 64
_TITLE, _PLOT, _STRIP, _GAP, _AXIS = 40, 150, 14, 34, 34
_NODES = "#54a24b"
_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_TICKS = 9
_LEFT = axes.MARGIN + _LABELS
_COLUMNS = axes.WIDTH - axes.MARGIN - _LEFT - _RIGHT


def sim_svg(panels: Sequence[RunPanel], *, title: str) -> str:
    """Draw runs below one another, and return the text of an SVG file."""
    rate_top = axes.round_up(max((band.samples_per_s for panel in panels for band in panel.bands), default=0.0))
    nodes_top = axes.round_up(max(count for panel in panels for _, count in panel.num_nodes))
    height = axes.MARGIN + _TITLE + len(panels) * (_TITLE + _PLOT + _STRIP + _GAP) + _AXIS + axes.MARGIN
    parts: list[str] = [axes.text(axes.MARGIN, axes.MARGIN + 16, title, 'font-weight="bold" font-size="17"')]
    top = axes.MARGIN + _TITLE
    for panel in panels:
        floor_y = top + _TITLE + _PLOT
        scales = _Scales(
            time=axes.Scale(0.0, panel.duration_s, _LEFT, _LEFT + _COLUMNS),
            rate=axes.Scale(0.0, rate_top, floor_y, floor_y - _PLOT),
            nodes=axes.Scale(0.0, nodes_top, floor_y, floor_y - _PLOT),
        )
        parts += _panel(panel, top, scales)
        top += _TITLE + _PLOT + _STRIP + _GAP
    parts += _legend(panels, top)
    return axes.svg_file(parts, height=height)


def outcomes_svg(outcomes: Sequence[Outcome], trace: Trace, *, title: str) -> str:
    """Draw simulated runs of one trace, and return the text of an SVG file."""
    return sim_svg([panel_of(outcome, trace) for outcome in outcomes], title=title)


class _Scales(NamedTuple):
    time: axes.Scale
    rate: axes.Scale
    nodes: axes.Scale


def _panel(panel: RunPanel, top: int, scales: _Scales) -> Iterator[str]:
    numbers = f"{panel.samples_per_s:,.4g} samples/s, goodput {percent_text(panel.summary.goodput)}"
    recoveries = f"{panel.summary.num_recoveries:,} recoveries, {panel.summary.steps_lost:,} steps lost"
    yield axes.text(axes.MARGIN, top + 14, panel.name, 'font-weight="bold" font-size="15"')
    yield axes.text(_LEFT + 40, top + 14, f"{numbers}; {recoveries}")
    yield axes.text(_LEFT + 40, top + 30, panel.about, 'fill="#777777" font-size="11"')
    yield from _grid(scales)
    yield f'<path d="{_area(panel.bands, scales)}" fill="{ACTIVITIES["training"][1]}"/>'
    yield f'<path d="{_line(panel, scales)}" fill="none" stroke="{_NODES}" stroke-width="1.6"/>'
    strip_y = scales.rate.start + 4
    yield from _strip(panel.bands, strip_y, scales.time)
    yield from _time_axis(strip_y + _STRIP, scales.time)


def _grid(scales: _Scales) -> Iterator[str]:
    right = _LEFT + _COLUMNS
    for quarter in range(5):
        rate, nodes = scales.rate.high * quarter / 4, scales.nodes.high * quarter / 4
        y = scales.rate(rate)
        yield axes.line(_LEFT, y, right, y, "#999999" if quarter == 0 else "#e3e3e3")
        yield axes.text(_LEFT - 6, y + 4, f"{rate:,.4g}", 'text-anchor="end" fill="#555555"')
        yield axes.text(right + 6, y + 4, f"{nodes:,.4g}", f'fill="{_NODES}"')
    middle = scales.rate(scales.rate.high / 2)
    for x, words, colour in ((axes.MARGIN + 6, "samples/s", "#555555"), (right + _RIGHT - 8, "nodes", _NODES)):
        turn = f'transform="rotate(-90 {x:.2f} {middle:.2f})"'
        yield axes.text(x, middle, words, f'text-anchor="middle" fill="{colour}" {turn}')


def _area(bands: Sequence[Band], scales: _Scales) -> str:
    floor_y = scales.rate.start
    parts, before = [f"M{_LEFT} {floor_y}"], None
    # The mean over each pixel's time lets even a shorter interruption show as a notch.
    rates = [(band.start_s, band.samples_per_s) for band in bands]
    for column, rate in enumerate(column_means(rates, scales.time.high, _COLUMNS)):
        y = scales.rate(rate)
        if before is None or abs(y - before) > 0.05:
            parts.append(f"H{_LEFT + column}V{y:.2f}")
            before = y
    return "".join((*parts, f"H{_LEFT + _COLUMNS}V{floor_y}Z"))


def _line(panel: RunPanel, scales: _Scales) -> str:
    parts: list[str] = []
    for t_s, count in panel.num_nodes:
        x, y = scales.time(t_s), scales.nodes(count)
        parts.append(f"H{x:.2f}V{y:.2f}" if parts else f"M{x:.2f} {y:.2f}")
    return "".join((*parts, f"H{_LEFT + _COLUMNS}"))


def _strip(bands: Sequence[Band], y: float, time: axes.Scale) -> Iterator[str]:
    """Yield a strip that shows what a run does."""
    yield axes.box(_LEFT, y, _COLUMNS, _STRIP, "#dfe8f1")
    for band in bands:
        if band.activity != "training":
            words, colour = ACTIVITIES[band.activity]
            # Even the shortest interruption is a pixel wide.
            width = max(1.0, (band.stop_s - band.start_s) * time.unit)
            title = f"{words}, {duration_text(band.start_s)} to {duration_text(band.stop_s)}"
            yield axes.box(time(band.start_s), y, width, _STRIP, colour, title)


def _time_axis(y: float, time: axes.Scale) -> Iterator[str]:
    unit_s, unit = next((each for each in _UNITS if time.high >= 3 * each[0]), _UNITS[-1])
    length = time.high / unit_s
    for value in axes.ticks(0.0, length, max(1, min(_TICKS, int(length)))):
        yield from axes.tick(time(value * unit_s), y, f"{value:g} {unit}", length=4, drop=16, colour="#999999")


def _legend(panels: Sequence[RunPanel], top: int) -> Iterator[str]:
    used = {band.activity for panel in panels for band in panel.bands}
    shown = [ACTIVITIES[each] for each in ACTIVITIES if each in used]
    colours = {"throughput" if words == "training" else words: colour for words, colour in shown}
    parts, x = axes.legend(colours, _LEFT, top, gap=24 + axes.NUMBER_WIDTH)
    yield from parts
    yield axes.line(x, top + 6, x + 16, top + 6, _NODES, width=2)
    yield axes.text(x + 22, top + 10, "nodes that are there")
