"""A curve as characters, of one row or more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = len(BLOCKS) - 1


def sparkline(values: Sequence[float], *, width: int, height: int = 1, low: float | None = None) -> list[str]:
    """Draw values from left to right, over the whole width, in `height` rows; O(values + width · height).

    The highest one reaches the top; `low`, or the lowest one, is a sliver of the lowest row.
    """
    if not values or width < 1 or height < 1:
        return []
    columns = _columns(values, width)
    bottom = min(columns) if low is None else low
    span = max(columns) - bottom
    steps = height * _EIGHTHS
    # Something is drawn for the lowest value too, so that it does not look like none.
    filled = [1 + round((value - bottom) / span * (steps - 1)) if span > 0 else steps // 2 for value in columns]
    return [
        "".join(BLOCKS[min(_EIGHTHS, max(0, level - row * _EIGHTHS))] for level in filled)
        for row in reversed(range(height))
    ]


def gauge(share: float) -> str:
    """Return a block as high as a share of one."""
    return BLOCKS[max(1, min(_EIGHTHS, round(share * _EIGHTHS)))]


def _columns(values: Sequence[float], width: int) -> list[float]:
    """Return a value for each column: the mean of those in it, or one between the two that are next to it."""
    if len(values) >= width:
        edges = [column * len(values) // width for column in range(width + 1)]
        return [sum(values[first:stop]) / (stop - first) for first, stop in pairwise(edges)]
    places = (column * (len(values) - 1) / max(1, width - 1) for column in range(width))
    padded = [*values, values[-1]]
    return [padded[int(at)] + (padded[int(at) + 1] - padded[int(at)]) * (at - int(at)) for at in places]
