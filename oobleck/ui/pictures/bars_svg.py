"""Grouped bars as an SVG picture: shares of something, by group and series. Plain SVG, to scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1000, 460, 88, 104, 48
_BAR, _BETWEEN = 40, 4
_COLOURS = ("#bab0ac", "#f2a541", "#4c78a8", "#54a24b")
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


def bars_svg(series: Mapping[str, Sequence[float]], groups: Sequence[str], *, title: str, axis: str) -> str:
    """Draw one bar for each series in each group; values are shares from 0 to 1, written on top of their bars."""
    plot_width, floor_y = _WIDTH - _LEFT - 20, _HEIGHT - _BOTTOM
    scale = floor_y - _TOP
    parts = [_text(20, 32, title, 'font-weight="bold" font-size="19"'), *_legend(list(series)), *_grid(floor_y, scale)]
    parts.append(_text(20, (floor_y + _TOP) / 2, axis, _turned(20, (floor_y + _TOP) / 2)))
    for number, group in enumerate(groups):
        middle = _LEFT + plot_width * (number + 0.5) / len(groups)
        parts.append(_text(middle, floor_y + 24, group, 'text-anchor="middle" font-size="15"'))
        left = middle - (len(series) * (_BAR + _BETWEEN) - _BETWEEN) / 2
        for index, (name, values) in enumerate(series.items()):
            x, height = left + index * (_BAR + _BETWEEN), scale * values[number]
            shape = f'x="{x:.1f}" y="{floor_y - height:.1f}" width="{_BAR}" height="{height:.1f}"'
            told = f"<title>{escape(f'{group}, {name}: {values[number]:.3f}')}</title>"
            parts.append(f'<rect {shape} fill="{_COLOURS[index]}">{told}</rect>')
            parts.append(_text(x + _BAR / 2, floor_y - height - 5, f"{100 * values[number]:.1f}", _CENTRED))
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>'
    return "\n".join((opening, f'<rect {size} fill="white"/>', *parts, "</svg>", ""))


_CENTRED = 'text-anchor="middle" font-size="12.5" fill="#333333"'


def _legend(names: Sequence[str]) -> Iterator[str]:
    x = _LEFT
    for name, colour in zip(names, _COLOURS, strict=False):
        yield f'<rect x="{x}" y="52" width="14" height="14" fill="{colour}"/>'
        yield _text(x + 20, 64, name, 'font-size="14"')
        x += 48 + round(7.2 * len(name))


def _grid(floor_y: float, scale: float) -> Iterator[str]:
    for fifth in range(6):
        y = floor_y - scale * fifth / 5
        stroke = "#999999" if fifth == 0 else "#e3e3e3"
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 20}" y2="{y:.1f}" stroke="{stroke}"/>'
        yield _text(_LEFT - 8, y + 5, f"{20 * fifth} %", 'text-anchor="end" font-size="13" fill="#555555"')


def _turned(x: float, y: float) -> str:
    return f'text-anchor="middle" font-size="13" fill="#555555" transform="rotate(-90 {x} {y:.1f})"'


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
