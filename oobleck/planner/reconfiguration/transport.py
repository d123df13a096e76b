"""The transportation problem: an exact assignment in which many rows and columns are alike.

Successive shortest paths with prices (Ahuja, Magnanti and Orlin 1993, section 9.7): each path is a Dijkstra search over
the kinds, vectorised over the supplies, and carries as many units as it can. O(paths · demands · supplies), with about
one path for each kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.tables import Floats

Flows = NDArray[np.int64]


def transport(costs: Floats, demands: Sequence[int], supplies: Sequence[int]) -> Flows:
    """Return the units from each supply to each demand, [demand, supply], for the least cost.

    `costs`, [demand, supply], are at least 0; the supplies suffice.
    """
    assert sum(demands) <= sum(supplies), "the supplies suffice"
    # scipy's `linear_sum_assignment` needs a row for each node: at 4096 nodes it takes 5 s and 144 MB where this takes
    # 1 ms, and 0.7 s to import. The tests compare with it.
    solver = _Solver(costs, supplies)
    for row, units in enumerate(demands):
        while units:
            units -= solver.send(row, units)
    return solver.flows


class _Solver:
    def __init__(self, costs: Floats, supplies: Sequence[int]) -> None:
        self._costs = costs
        self._room = np.array(supplies, dtype=np.int64)
        # Under these prices no open path has a negative cost, which Dijkstra's search needs.
        self._row_prices, self._column_prices = np.zeros(costs.shape[0]), np.zeros(costs.shape[1])
        self.flows: Flows = np.zeros(costs.shape, dtype=np.int64)

    def send(self, start: int, units: int) -> int:
        """Send up to `units` more to a demand along the cheapest path; return how many."""
        num_rows, num_columns = self._costs.shape
        column_distance, column_from = np.full(num_columns, np.inf), np.full(num_columns, start)
        row_distance, row_from = np.full(num_rows, np.inf), np.full(num_rows, -1)
        done = np.zeros(num_columns, dtype=bool)
        row_distance[start] = 0.0
        fresh, distance = [start], 0.0
        while True:
            for row in fresh:
                through = distance + self._costs[row] - self._row_prices[row] - self._column_prices
                better = ~done & (through < column_distance)
                column_distance[better] = through[better]
                column_from[better] = row
            column = int(np.where(done, np.inf, column_distance).argmin())
            distance = float(column_distance[column])
            done[column] = True
            if self._room[column]:
                break
            # The demands that an exhausted supply serves may give its units up.
            fresh = [row for row in np.flatnonzero(self.flows[:, column]).tolist() if row_distance[row] == np.inf]
            row_distance[fresh] = distance
            row_from[fresh] = column
        self._row_prices += np.where(np.isfinite(row_distance), distance - row_distance, 0.0)
        self._column_prices -= np.where(done, distance - column_distance, 0.0)
        return self._carry(start, column, units, column_from, row_from)

    def _carry(
        self, start: int, end: int, units: int, column_from: NDArray[np.int64], row_from: NDArray[np.int64]
    ) -> int:
        """Move as many units as possible along the path from `start` to the supply `end`."""
        path = [(int(column_from[end]), end)]
        while (row := path[-1][0]) != start:
            column = int(row_from[row])
            path.append((int(column_from[column]), column))
        # Each demand on the path but the first gives up its next supply for the previous one.
        given_up = [(row, path[index + 1][1]) for index, (row, _) in enumerate(path[:-1])]
        units = min(units, int(self._room[end]), *(int(self.flows[pair]) for pair in given_up))
        for pair in path:
            self.flows[pair] += units
        for pair in given_up:
            self.flows[pair] -= units
        self._room[end] -= units
        return units
