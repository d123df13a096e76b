"""The assignment problem, exactly: each row gets a column of its own, for the least sum.

The method of shortest augmenting paths (Jonker and Volgenant 1987; Crouse 2016), one row of numpy a step:
O(r² · c) for r rows and c columns, with r the number of *paths* that are not trivial in practice. Small problems
are solved here; large ones by scipy's implementation of the same method, which takes a second to import.
"""

from __future__ import annotations

import numpy as np

from .costs import Floats

__all__ = ["assign", "shortest_paths"]

_LARGE = 64
"""Rows from which scipy is worth its import."""


def assign(costs: Floats) -> list[int]:
    """Return the column of each row, for the least sum of costs: [rows, columns], rows at most columns."""
    if len(costs) < _LARGE:
        return shortest_paths(costs)
    from .scipy_assignment import assign_by_scipy

    return assign_by_scipy(costs)


def shortest_paths(costs: Floats) -> list[int]:
    """Return the same as `assign`, without scipy."""
    num_rows, num_columns = costs.shape
    row_price, column_price = costs.min(axis=1), np.zeros(num_columns)
    row_of = np.full(num_columns, -1)
    column_of = [-1] * num_rows
    for row in range(num_rows):
        column = int(np.argmin(costs[row]))
        if row_of[column] < 0:
            row_of[column], column_of[row] = row, column
    for start in [row for row in range(num_rows) if column_of[row] < 0]:
        _augment(costs, start, row_price, column_price, row_of, column_of)
    return column_of


def _augment(
    costs: Floats, start: int, row_price: Floats, column_price: Floats, row_of: np.ndarray, column_of: list[int]
) -> None:
    num_columns = costs.shape[1]
    distance = np.full(num_columns, np.inf)
    came_from = np.full(num_columns, -1)
    done = np.zeros(num_columns, dtype=bool)
    visited = [start]
    row, reached = start, 0.0
    while True:
        through = reached + costs[row] - row_price[row] - column_price
        better = ~done & (through < distance)
        distance[better] = through[better]
        came_from[better] = row
        column = int(np.argmin(np.where(done, np.inf, distance)))
        reached = float(distance[column])
        done[column] = True
        if row_of[column] < 0:
            break
        row = int(row_of[column])
        visited.append(row)
    row_price[start] += reached
    for other in visited[1:]:
        row_price[other] += reached - distance[column_of[other]]
    settled = done.copy()
    settled[column] = False
    column_price[settled] -= reached - distance[settled]
    while True:
        row = int(came_from[column])
        row_of[column] = row
        column_of[row], column = column, column_of[row]
        if row == start:
            return
