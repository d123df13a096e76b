"""Simulated runs as a picture: one panel a policy, with throughput, nodes and what kept it from training.

Plain SVG, written by hand, to scale; all panels share their axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor

from oobleck.ui.formatting import duration_text, percent_text
from oobleck.ui.run_panels import ACTIVITIES, Band, RunPanel

from . import axes

_LABELS, _RIGHT = 74, 64
_TITLE, _PLOT, _STRIP, _GAP, _AXIS = 40, 150, 14, 34, 34
_NODES = "#54a24b"
_UNITS = ((86_400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_STEPS = tuple(base * 10**power for power in range(9) for base in (1, 2, 5))
_MOST_TICKS = 12
_COLUMNS = axes.WIDTH - 2 * axes.MARGIN - _LABELS - _RIGHT


def sim_svg(panels: Sequence[RunPanel], *, title: str) -> str:
    """Draw runs below one another and return the text of an SVG file."""
    rate_top = axes.round_up(max((band.samples_per_s for panel in panels for band in panel.bands), default=0.0))
    nodes_top = axes.round_up(max(count for panel in panels for _, count in panel.num_nodes))
    height = axes.MARGIN + _TITLE + len(panels) * (_TITLE + _PLOT + _STRIP + _GAP) + _AXIS + axes.MARGIN
    parts: list[str] = [axes.text(axes.MARGIN, axes.MARGIN + 16, title, 'font-weight="bold" font-size="17"')]
    top = axes.MARGIN + _TITLE
    for panel in panels:
        parts += _panel(panel, top, rate_top, nodes_top)
        top += _TITLE + _PLOT + _STRIP + _GAP
    parts += _legend(panels, top)
    return axes.svg_file(parts, height=height)


def _panel(panel: RunPanel, top: int, rate_top: float, nodes_top: float) -> Iterator[str]:
    left, floor_y = axes.MARGIN + _LABELS, top + _TITLE + _PLOT
    scale = _COLUMNS / panel.duration_s
    numbers = f"{panel.samples_per_s:,.4g} samples/s, goodput {percent_text(panel.summary.goodput)}"
    recoveries = f"{panel.summary.num_recoveries:,} recoveries, {panel.summary.steps_lost:,} steps lost"
    yield axes.text(axes.MARGIN, top + 14, panel.name, 'font-weight="bold" font-size="15"')
    yield axes.text(left + 40, top + 14, f"{numbers}; {recoveries}")
    yield axes.text(left + 40, top + 30, panel.about, 'fill="#777777" font-size="11"')
    yield from _grid(left, floor_y, rate_top, nodes_top)
    yield f'<path d="{_area(panel.bands, left, floor_y, scale, rate_top)}" fill="{ACTIVITIES["training"][1]}"/>'
    nodes = _line(panel, left, floor_y, scale, nodes_top)
    yield f'<path d="{nodes}" fill="none" stroke="{_NODES}" stroke-width="1.6"/>'
    yield from _strip(panel.bands, left, floor_y + 4, scale)
    yield from _time_axis(panel.duration_s, left, floor_y + 4 + _STRIP, scale)


def _grid(left: int, floor_y: int, rate_top: float, nodes_top: float) -> Iterator[str]:
    for quarter in range(5):
        y = floor_y - _PLOT * quarter / 4
        stroke = "#999999" if quarter == 0 else "#e3e3e3"
        yield f'<line x1="{left}" y1="{y}" x2="{left + _COLUMNS}" y2="{y}" stroke="{stroke}"/>'
        yield axes.text(left - 6, y + 4, f"{rate_top * quarter / 4:,.4g}", 'text-anchor="end" fill="#555555"')
        yield axes.text(left + _COLUMNS + 6, y + 4, f"{nodes_top * quarter / 4:,.4g}", f'fill="{_NODES}"')
    middle = floor_y - _PLOT / 2
    yield _turned(axes.MARGIN + 6, middle, "samples/s", "#555555")
    yield _turned(left + _COLUMNS + _RIGHT - 8, middle, "nodes", _NODES)


def _columns(bands: Sequence[Band], scale: float) -> list[float]:
    """The mean throughput of each pixel's time: what is shorter than a pixel still shows as a notch."""
    sums = [0.0] * _COLUMNS
    for band in bands:
        first, last = band.start_s * scale, band.stop_s * scale
        for column in range(floor(first), min(_COLUMNS, ceil(last))):
            sums[column] += band.samples_per_s * max(0.0, min(last, column + 1) - max(first, column))
    return sums


def _area(bands: Sequence[Band], left: int, floor_y: int, scale: float, rate_top: float) -> str:
    parts, before = [f"M{left} {floor_y}"], None
    for column, rate in enumerate(_columns(bands, scale)):
        y = floor_y - _PLOT * rate / rate_top if rate_top else floor_y
        if before is None or abs(y - before) > 0.05:
            parts.append(f"H{left + column}V{y:.2f}")
            before = y
    return "".join((*parts, f"H{left + _COLUMNS}V{floor_y}Z"))


def _line(panel: RunPanel, left: int, floor_y: int, scale: float, nodes_top: float) -> str:
    parts: list[str] = []
    shown = -1.0
    for t_s, count in panel.num_nodes:
        x, y = left + t_s * scale, floor_y - _PLOT * count / nodes_top
        parts.append(f"M{x:.2f} {y:.2f}" if not parts else f"H{x:.2f}V{y:.2f}")
        shown = x
    assert shown <= left + _COLUMNS + 1
    return "".join((*parts, f"H{left + _COLUMNS}"))


def _strip(bands: Sequence[Band], left: int, y: int, scale: float) -> Iterator[str]:
    """A strip that says what a run does; what is not training is at least a pixel wide."""
    yield f'<rect x="{left}" y="{y}" width="{_COLUMNS}" height="{_STRIP}" fill="#dfe8f1"/>'
    for band in bands:
        if band.activity != "training":
            words, colour = ACTIVITIES[band.activity]
            width = max(1.0, (band.stop_s - band.start_s) * scale)
            told = f"{words}, {duration_text(band.start_s)} to {duration_text(band.stop_s)}"
            x = left + band.start_s * scale
            shape = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_STRIP}"'
            yield f'<rect {shape} fill="{colour}"><title>{told}</title></rect>'


def _time_axis(duration_s: float, left: int, y: int, scale: float) -> Iterator[str]:
    unit_s, unit = next((each for each in _UNITS if duration_s >= 3 * each[0]), _UNITS[-1])
    step = next(step for step in _STEPS if duration_s / unit_s / step <= _MOST_TICKS)
    for number in range(int(duration_s / unit_s / step) + 1):
        x = left + number * step * unit_s * scale
        yield from axes.tick(x, y, f"{number * step:g} {unit}", length=4, drop=16, colour="#999999")


def _legend(panels: Sequence[RunPanel], top: int) -> Iterator[str]:
    used = {band.activity for panel in panels for band in panel.bands}
    shown = [ACTIVITIES[each] for each in ACTIVITIES if each in used]
    colours = {"throughput" if words == "training" else words: colour for words, colour in shown}
    parts, x = axes.legend(colours, axes.MARGIN + _LABELS, top, gap=24 + axes.NUMBER_WIDTH)
    yield from parts
    yield f'<line x1="{x}" y1="{top + 6}" x2="{x + 16}" y2="{top + 6}" stroke="{_NODES}" stroke-width="2"/>'
    yield axes.text(x + 22, top + 10, "nodes that are there")


def _turned(x: float, y: float, words: str, colour: str) -> str:
    turn = f'transform="rotate(-90 {x:.2f} {y:.2f})"'
    return axes.text(x, y, words, f'text-anchor="middle" fill="{colour}" {turn}')
