"""A quantity over time on the terminal: columns of block characters, each the mean over its share of the time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from .formatting import duration_text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = len(_BLOCKS) - 1


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
    """Draw a quantity that keeps each value until the next point.

    `points` are (seconds, value), growing; `width` counts the labels in. `top` is the value at the top, by default
    the greatest of all.
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


def column_means(points: Sequence[tuple[float, float]], duration_s: float, columns: int) -> list[float]:
    """Return the mean of each of so many equal parts of the time; O(points + columns)."""
    sums = [0.0] * columns
    each_s = duration_s / columns
    for (since_s, value), (until_s, _) in pairwise([*points, (duration_s, 0.0)]):
        first, last = int(since_s / each_s), min(columns - 1, int(until_s / each_s))
        for column in range(first, last + 1) if value else ():
            inside_s = min(until_s, (column + 1) * each_s) - max(since_s, column * each_s)
            sums[column] += value * max(0.0, inside_s)
    return [total / each_s for total in sums]
