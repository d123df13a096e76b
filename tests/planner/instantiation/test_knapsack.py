from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.instantiation.knapsack import best_filling, best_items, best_values

values_of_sizes = st.lists(st.sampled_from((-math.inf, 1.0, 2.0, 3.0, 5.0, 8.0)), min_size=1, max_size=5)


def brute_exact(smallest: int, values: list[float], count: int, total: int) -> float:
    sizes = range(smallest, smallest + len(values))
    sums = [
        sum(values[size - smallest] for size in chosen)
        for chosen in itertools.combinations_with_replacement(sizes, count)
        if sum(chosen) == total
    ]
    return max(sums, default=-math.inf)


def table_filling(smallest: int, values: list[float], total: int) -> float:
    best = [0.0] * (total + 1)
    for amount in range(1, total + 1):
        options = [
            best[amount - size] + values[size - smallest]
            for size in range(smallest, smallest + len(values))
            if size <= amount
        ]
        best[amount] = max([best[amount - 1], *options])
    return best[total]


def worth(smallest: int, values: list[float], items: Mapping[int, int] | None) -> float:
    if items is None:
        return -math.inf
    return sum(values[size - smallest] * times for size, times in items.items() if times)


@given(smallest=st.integers(1, 4), values=values_of_sizes, count=st.integers(1, 6), extra=st.integers(0, 20))
def test_exact_numbers_of_items_are_best(smallest: int, values: list[float], count: int, extra: int) -> None:
    total = smallest * count + extra
    items = best_items(smallest, np.array(values), count=count, total=total, enough=0)
    best = brute_exact(smallest, values, count, total)
    assert worth(smallest, values, items) == best
    if items is not None:
        assert sum(items.values()) == count
        assert sum(size * times for size, times in items.items()) == total
        assert best_items(smallest, np.array(values), count=count, total=total, enough=best + 1) is None


@given(smallest=st.integers(1, 4), values=values_of_sizes, total=st.integers(1, 400))
def test_fillings_of_any_number_of_items_are_best(smallest: int, values: list[float], total: int) -> None:
    items = best_filling(smallest, np.array(values), total=total, enough=0)
    best = table_filling(smallest, values, total)
    assert items is not None
    assert worth(smallest, values, items) == best
    assert sum(size * times for size, times in items.items()) <= total
    assert best_filling(smallest, np.array(values), total=total, enough=best + 1) is None


@given(smallest=st.integers(1, 4), values=values_of_sizes, count=st.integers(1, 6), extra=st.integers(0, 20))
def test_each_number_of_items_up_to_a_few_is_best(smallest: int, values: list[float], count: int, extra: int) -> None:
    total = smallest * count + extra
    found = best_values(smallest, np.array(values), most=count, total=total)
    for number in range(1, count + 1):
        assert found[number] == max(brute_exact(smallest, values, number, amount) for amount in range(total + 1))


def test_many_items_of_two_sizes() -> None:
    # 7 · 3 + 143 · 7 = 1022: no other 150 items of 3 or 7 fill it.
    values = np.array([1.0, -np.inf, -np.inf, -np.inf, 2.0])
    assert best_items(3, values, count=150, total=1022, enough=293) == {3: 7, 7: 143}
    assert best_items(3, values, count=150, total=1022, enough=294) is None
