"""Charts of a report: SVG that stretches to any width, with labels as HTML text, which does not stretch.

A chart is drawn in a box of 1000 by 1000 units that the page scales in both directions; lines keep their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from .axes import Scale, ticks

_SIZE = 1000
_MAX_VALUES = 200
_LABEL_SHARE = 18.0  # percent of the width for the label of a marker, as in the style sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    points: Sequence[tuple[float, float]]
    style: str
    """A class of the style sheet."""
    is_area: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A vertical line at a moment, with the event of that moment."""

    x: float
    text: str
    label: str
    """A word or two, shown if there is room."""
    is_calm: bool = False
    """Whether nothing was lost then."""


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_range: tuple[float, float],
    y_max: float,
    y_min: float = 0.0,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    x_ticks: Sequence[float] | None = None,
    markers: Iterable[Marker] = (),
    values: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw series as an HTML figure; O(points). `values` are what a pointer shows, by where it is; in order."""
    x_low, x_high = x_range
    x_high = x_high if x_high > x_low else x_low + 1.0
    y_max = y_max if y_max > y_min else y_min + 1.0
    x_of, y_of = Scale(x_low, x_high, 0, _SIZE), Scale(y_min, y_max, _SIZE, 0)
    grid, labels = [], []
    for value in ticks(y_min, y_max, 4):
        grid.append(f'<line class="grid" x1="0" x2="{_SIZE}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>')
        labels.append(f'<span class="y" style="top:{y_of(value) / 10:.2f}%">{escape(y_text(value))}</span>')
    labels += [
        f'<span class="x" style="left:{x_of(value) / 10:.2f}%">{escape(x_text(value))}</span>'
        for value in (ticks(x_low, x_high, 5) if x_ticks is None else x_ticks)
    ]
    placed = [(x_of(mark.x), mark) for mark in markers]
    marks = [_mark(mark, x) for x, mark in placed]
    labels += _mark_labels(placed)
    lines = [_line(one, x_of, y_of) for one in series]
    drawn = "".join((*grid, *lines, *_values(values, x_of), *marks))
    kind = "chart marked" if placed else "chart"
    return (
        f'<div class="{kind}"><div class="plot"><svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(title, quote=True)}">{drawn}</svg>'
        f"{''.join(labels)}</div></div>"
    )


def _mark_labels(placed: Iterable[tuple[float, Marker]]) -> Iterator[str]:
    """Yield the labels of markers from the left, without those that would touch the one before."""
    free = 0.0
    for x, mark in sorted(placed, key=lambda one: one[0]):
        left = min(x / 10, 100.0 - _LABEL_SHARE)
        if left >= free:
            style = "m calm" if mark.is_calm else "m"
            side = "text-align:right;" if left < x / 10 else ""
            yield f'<span class="{style}" style="{side}left:{left:.2f}%">{escape(mark.label)}</span>'
            free = left + _LABEL_SHARE


def _mark(mark: Marker, x: float) -> str:
    style = "mark calm" if mark.is_calm else "mark"
    return (
        f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_SIZE}"><title>{escape(mark.text)}</title></line>'
    )


def _values(values: Sequence[tuple[float, str]], x_of: Scale) -> Iterator[str]:
    """Yield what browsers show under the pointer: columns that reach halfway to their neighbours."""
    values = values[:: math.ceil(len(values) / _MAX_VALUES) or 1]
    places = [x_of(x) for x, _ in values]
    edges = [0.0, *((left + right) / 2 for left, right in pairwise(places)), float(_SIZE)]
    for (_, text), (left, right) in zip(values, pairwise(edges), strict=False):
        yield (
            f'<rect class="value" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{_SIZE}">'
            f"<title>{escape(text)}</title></rect>"
        )


def _line(series: Series, x_of: Scale, y_of: Scale) -> str:
    finite = [(x, y) for x, y in series.points if math.isfinite(x) and math.isfinite(y)]
    # Values beyond the range are drawn at its edge.
    points = [(x_of(x), y_of(min(max(y, y_of.low), y_of.high))) for x, y in finite]
    if not points:
        return ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    line = f'<path class="line {series.style}" d="{path}"/>'
    if not series.is_area:
        return line
    closed = f"{path}L{points[-1][0]:.1f} {_SIZE}L{points[0][0]:.1f} {_SIZE}Z"
    return f'<path class="area {series.style}" d="{closed}"/>{line}'
