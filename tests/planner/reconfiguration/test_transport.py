from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from oobleck.planner.reconfiguration.transport import transport


def check(costs: np.ndarray, demands: list[int], supplies: list[int]) -> float:
    flows = transport(costs, demands, supplies)
    assert flows.min(initial=0) >= 0
    assert flows.sum(axis=1).tolist() == demands
    assert (flows.sum(axis=0) <= supplies).all()
    return float((flows * costs).sum())


@given(data=st.data(), num_rows=st.integers(1, 5), extra=st.integers(0, 2), largest=st.sampled_from((1, 3, 99)))
def test_no_permutation_costs_less(data: st.DataObject, num_rows: int, extra: int, largest: int) -> None:
    row = st.lists(st.integers(0, largest), min_size=num_rows + extra, max_size=num_rows + extra)
    costs = np.array(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)), dtype=float)
    assert check(costs, [1] * num_rows, [1] * (num_rows + extra)) == min(
        sum(costs[i, column] for i, column in enumerate(columns))
        for columns in itertools.permutations(range(num_rows + extra), num_rows)
    )


@given(data=st.data(), largest=st.sampled_from((1, 3, 10**6)))
def test_many_alike_cost_what_an_assignment_of_each_costs(data: st.DataObject, largest: int) -> None:
    demands = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    supplies = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    supplies.append(max(0, sum(demands) - sum(supplies)))
    row = st.lists(st.integers(0, largest), min_size=len(supplies), max_size=len(supplies))
    costs = np.array(data.draw(st.lists(row, min_size=len(demands), max_size=len(demands))), dtype=float)
    each = np.repeat(np.repeat(costs, demands, axis=0), supplies, axis=1)
    rows, columns = linear_sum_assignment(each)
    assert check(costs, demands, supplies) == each[rows, columns].sum()


@pytest.mark.parametrize("size", [40, 150])
def test_large_problems_are_solved_too(size: int) -> None:
    costs = np.random.default_rng(size).integers(0, 1000, (size, size + 3)).astype(float)
    rows, columns = linear_sum_assignment(costs)
    assert check(costs, [1] * size, [1] * (size + 3)) == costs[rows, columns].sum()
