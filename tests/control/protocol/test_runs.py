"""Numbers and names in few words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import named, names_in, numbers_in, runs_of
from oobleck.control.protocol.runs import Names


@given(st.lists(st.integers(0, 30)))
def test_runs_stand_for_their_numbers(numbers: list[int]) -> None:
    assert numbers_in(runs_of(numbers)) == numbers


def test_numbers_that_follow_each_other_are_one_run() -> None:
    assert runs_of([3, 4, 5, 9, 8]) == ((3, 3), (9, 1), (8, 1))


KNOWN = "abcdefgh"
PLACES = {name: place for place, name in enumerate(KNOWN)}


@given(st.lists(st.sampled_from("abcdefghxyz")))
def test_names_are_said_by_their_places_in_a_list_that_may_lack_some(names: list[str]) -> None:
    said = named(names, PLACES)
    assert names_in(said, KNOWN) == tuple(names)
    assert {each for each in said if isinstance(each, str)} == {*names} - {*KNOWN}


def test_names_that_follow_each_other_are_one_run_and_others_a_place() -> None:
    assert named("abcxdehb", PLACES) == ((0, 3), "x", (3, 2), 7, 1)
    assert named("abc", {}) == ("a", "b", "c")


@pytest.mark.parametrize("said", [(-1,), (8,), ((7, 2),), ((-2, 2),), ((3, 0),), ((3, -1),), ((0, 10**12),)])
def test_a_place_that_the_list_does_not_have_names_nobody(said: Names) -> None:
    with pytest.raises(ValueError, match="of 8 that are known"):
        names_in(said, KNOWN)
