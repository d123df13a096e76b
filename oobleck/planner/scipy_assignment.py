"""The one file that imports scipy: it takes a second, so it is loaded for the first large assignment."""

from __future__ import annotations

from scipy.optimize import linear_sum_assignment

from .costs import Floats

__all__ = ["assign_by_scipy"]


def assign_by_scipy(costs: Floats) -> list[int]:
    """Return the column of each row, for the least sum of costs: [rows, columns], rows at most columns."""
    _, columns = linear_sum_assignment(costs)
    return [int(column) for column in columns]
