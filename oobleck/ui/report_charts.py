"""Charts of a report: SVG that stretches to any width, with its labels as text beside it that does not.

A chart is drawn in a box of 1000 by 1000 units that the page scales in both directions; lines keep their width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Marker", "Series", "chart", "ticks"]

_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through points."""

    points: Sequence[tuple[float, float]]
    style: str
    """A class of the page's style sheet."""
    is_area: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A vertical line at a moment, with what happened then."""

    x: float
    text: str
    is_calm: bool = False
    """Nothing was lost then."""


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_range: tuple[float, float],
    y_max: float,
    y_min: float = 0.0,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    markers: Iterable[Marker] = (),
) -> str:
    """Draw series as an HTML figure; O(points)."""
    x_low, x_high = x_range
    x_high = x_high if x_high > x_low else x_low + 1.0
    y_max = y_max if y_max > y_min else y_min + 1.0

    def x_of(x: float) -> float:
        return (x - x_low) / (x_high - x_low) * _SIZE

    def y_of(y: float) -> float:
        return _SIZE - (min(max(y, y_min), y_max) - y_min) / (y_max - y_min) * _SIZE

    grid, labels = [], []
    for value in ticks(y_min, y_max, 4):
        grid.append(f'<line class="grid" x1="0" x2="{_SIZE}" y1="{y_of(value):.1f}" y2="{y_of(value):.1f}"/>')
        labels.append(f'<span class="y" style="top:{y_of(value) / 10:.2f}%">{escape(y_text(value))}</span>')
    for value in ticks(x_low, x_high, 5):
        share = x_of(value) / 10
        side = " first" if share < 5 else " last" if share > 95 else ""
        labels.append(f'<span class="x{side}" style="left:{share:.2f}%">{escape(x_text(value))}</span>')
    marks = [_mark(mark, x_of(mark.x)) for mark in markers]
    lines = [_line(one, x_of, y_of) for one in series]
    return (
        f'<div class="chart"><div class="plot"><svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(title, quote=True)}">{"".join((*grid, *lines, *marks))}</svg>'
        f"{''.join(labels)}</div></div>"
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values within [low, high], about so many: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    if not (raw > 0 and math.isfinite(raw)):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _mark(mark: Marker, x: float) -> str:
    style = "mark calm" if mark.is_calm else "mark"
    return (
        f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_SIZE}"><title>{escape(mark.text)}</title></line>'
    )


def _line(series: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    points = [(x_of(x), y_of(y)) for x, y in series.points if math.isfinite(x) and math.isfinite(y)]
    if not points:
        return ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    line = f'<path class="line {series.style}" d="{path}"/>'
    if not series.is_area:
        return line
    closed = f"{path}L{points[-1][0]:.1f} {_SIZE}L{points[0][0]:.1f} {_SIZE}Z"
    return f'<path class="area {series.style}" d="{closed}"/>{line}'
