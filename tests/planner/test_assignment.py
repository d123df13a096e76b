from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.assignment import assign, shortest_paths
from oobleck.planner.scipy_assignment import assign_by_scipy


@given(data=st.data(), num_rows=st.integers(1, 5), extra=st.integers(0, 2), largest=st.sampled_from((1, 3, 99)))
def test_no_permutation_costs_less(data: st.DataObject, num_rows: int, extra: int, largest: int) -> None:
    row = st.lists(st.integers(0, largest), min_size=num_rows + extra, max_size=num_rows + extra)
    costs = np.array(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)), dtype=float)
    best = min(
        sum(costs[i, column] for i, column in enumerate(columns))
        for columns in itertools.permutations(range(num_rows + extra), num_rows)
    )
    for columns in (assign(costs), assign_by_scipy(costs)):
        assert len(set(columns)) == num_rows
        assert sum(costs[i, column] for i, column in enumerate(columns)) == best


@pytest.mark.parametrize("size", [63, 64, 100])
def test_small_and_large_problems_agree(size: int) -> None:
    costs = np.random.default_rng(size).integers(0, 1000, (size, size + 3)).astype(float)
    totals = {float(sum(costs[range(size), columns])) for columns in (assign(costs), shortest_paths(costs))}
    assert len(totals) == 1
