"""The scales, axes and shapes of all pictures: round values, and the pieces of a plain SVG file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, MARGIN = 1280, 20
NUMBER_WIDTH = 7  # of a character, approximately
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps the values from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the place of a value; values beyond the ends lie beyond `start` and `end`."""
        return self.start + (value - self.low) * self.unit

    @property
    def unit(self) -> float:
        """How far apart two values are that differ by 1."""
        return (self.end - self.start) / (self.high - self.low)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return `about` round values within [low, high], in steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    if not (raw > 0 and math.isfinite(raw)):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    return _multiples(low, high, power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.8))


def time_ticks(low_s: float, high_s: float, about: int) -> list[float]:
    """Return `about` round moments within [low_s, high_s], in steps of whole seconds, minutes, hours or days."""
    raw_s = (high_s - low_s) / about
    if raw_s <= _TIME_STEPS_S[0] or not math.isfinite(raw_s):
        return ticks(low_s, high_s, about)
    days = math.ceil(raw_s / _TIME_STEPS_S[-1]) * _TIME_STEPS_S[-1]
    return _multiples(low_s, high_s, next((step for step in _TIME_STEPS_S if step >= raw_s * 0.8), days))


def round_up(value: float) -> float:
    """Return the next number that four parts divide well: 1, 1.2, 1.6, 2, … times a power of ten."""
    if value <= 0:
        return 1.0
    power = float(10 ** math.floor(math.log10(value)))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def _multiples(low: float, high: float, step: float) -> list[float]:
    # Rounding must not lose a tick at one of the ends.
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def svg_file(parts: Iterable[str], *, height: int) -> str:
    """Return the text of an SVG file, `WIDTH` wide, on white."""
    size = f'width="{WIDTH}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {height}" {_FONT} font-size="12">'
    return "\n".join((opening, f'<rect {size} fill="white"/>', *parts, "</svg>", ""))


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {attributes}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke="{stroke}" stroke-width="{width}"/>'


def box(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """Return a filled rectangle, which shows its title under the pointer."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height}" fill="{fill}">{inner}</rect>'


def tick(
    x: float, y: float, words: str, *, length: int, drop: int, colour: str, anchor: str = "middle"
) -> Iterator[str]:
    """Yield a mark below an axis at `y`, and its label `drop` below that."""
    yield line(x, y, x, y + length, colour)
    yield text(x, y + drop, words, f'text-anchor="{anchor}" fill="#555555"')


def legend(colours: Mapping[str, str], x: int, y: int, *, gap: int) -> tuple[list[str], int]:
    """Return coloured squares with their words, from `x` on, and the place where the next piece may begin."""
    parts: list[str] = []
    for words, colour in colours.items():
        parts += [box(x, y, 12, 12, colour), text(x + 17, y + 10, words)]
        x += gap + NUMBER_WIDTH * len(words)
    return parts, x
