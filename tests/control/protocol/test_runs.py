"""Numbers in few words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import numbers_in, runs_of


@given(st.lists(st.integers(0, 30)))
def test_runs_stand_for_their_numbers(numbers: list[int]) -> None:
    assert numbers_in(runs_of(numbers)) == numbers


def test_numbers_that_follow_each_other_are_one_run() -> None:
    assert runs_of([3, 4, 5, 9, 8]) == ((3, 3), (9, 1), (8, 1))
