"""Limits that grow with the cluster: a few are as before, and thousands are given what one master needs for them."""

from __future__ import annotations

import pytest

from oobleck.control.nodes import adopting_s, attaching_s, reading_s, starting_s


@pytest.mark.parametrize("number", [1, 16, 64])
def test_few_have_the_least_limits(number: int):
    assert attaching_s(10.0, number) == 10.0
    assert starting_s(120.0, number) == 120.0
    assert reading_s(0.1, number) == 0.1
    assert adopting_s(number, ()) == 30.0


@pytest.mark.parametrize(
    ("measured_each_s", "limit"),
    [
        (0.021, lambda number: attaching_s(0.0, number)),
        (0.053, lambda number: starting_s(0.0, number)),
        (6e-5, lambda number: reading_s(0.0, number)),
        (0.004, lambda number: adopting_s(number, ())),
    ],
    ids=["attaching", "starting", "reading", "adopting"],
)
def test_thousands_have_twice_what_was_measured_of_each(measured_each_s: float, limit):
    for number in (1024, 4096, 10_000):
        assert limit(number) > 2 * measured_each_s * number


def test_a_network_that_is_slow_to_adopt_is_given_more():
    assert adopting_s(8, (2.0, 5.0)) == 30.0
    assert adopting_s(8, (2.0, 25.0, 3.0)) == 75.0
