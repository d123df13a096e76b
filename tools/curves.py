"""Curves over a number that doubles and doubles: an SVG picture with both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from oobleck.ui.pictures.axes import MARGIN, WIDTH, svg_file, text

__all__ = ["Curve", "curves_svg"]

Curve = Sequence[tuple[float, float]]
"""Points (x, y) with x growing, and y above zero."""

_LEFT, _RIGHT, _TOP, _HEIGHT, _BOTTOM = 80, 330, 64, 560, 56
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_GREY = "#999999"


def curves_svg(curves: Mapping[str, Curve], *, title: str, x_axis: str, y_axis: str, reference: str = "") -> str:
    """Draw a curve with its name for each; the one called `reference` is dashed and grey."""
    points = [point for curve in curves.values() for point in curve]
    assert points, "a picture needs a point"
    low_x, high_x = (math.log2(limit(x for x, _ in points)) for limit in (min, max))
    low_y = math.floor(math.log10(min(y for _, y in points)))
    high_y = max(low_y + 1, math.ceil(math.log10(max(y for _, y in points))))
    right, floor_y = WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x_of(value: float) -> float:
        return _LEFT + (right - _LEFT) * ((math.log2(value) - low_x) / (high_x - low_x) if high_x > low_x else 0.5)

    def y_of(value: float) -> float:
        return floor_y - (floor_y - _TOP) * (math.log10(value) - low_y) / (high_y - low_y)

    def drawn() -> Iterator[str]:
        yield text(MARGIN, 30, title, 'font-weight="bold" font-size="18"')
        yield text(_LEFT, 52, y_axis, 'fill="#555555"')
        yield text((_LEFT + right) / 2, _HEIGHT - 12, x_axis, 'text-anchor="middle" fill="#555555"')
        for power in range(low_y, high_y + 1):
            y = y_of(10.0**power)
            yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e3e3"/>'
            yield text(_LEFT - 8, y + 4, f"{10.0**power:g}", 'text-anchor="end" fill="#555555"')
        for x in sorted({x for x, _ in points}):
            yield f'<line x1="{x_of(x):.1f}" y1="{floor_y}" x2="{x_of(x):.1f}" y2="{floor_y + 5}" stroke="{_GREY}"/>'
            yield text(x_of(x), floor_y + 20, f"{x:,g}", 'text-anchor="middle" fill="#555555"')
        colours = iter(_COLOURS)
        for number, (name, curve) in enumerate(curves.items()):
            colour, dashes = (_GREY, ' stroke-dasharray="6 5"') if name == reference else (next(colours), "")
            places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in curve)
            yield f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            if name != reference:
                for x, y in curve:
                    told = f"<title>{name}: {y:.3g} at {x:,g}</title>"
                    yield f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="4" fill="{colour}">{told}</circle>'
            legend_y = _TOP + 22 * number
            yield f'<rect x="{right + 24}" y="{legend_y}" width="12" height="12" fill="{colour}"/>'
            yield text(right + 42, legend_y + 10, name)

    return svg_file(drawn(), height=_HEIGHT)
