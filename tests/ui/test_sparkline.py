from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oobleck.ui.sparkline import BLOCKS, gauge, sparkline

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


def test_a_row_goes_from_a_sliver_to_the_top():
    assert sparkline([0.0, 1.0, 2.0, 3.0], width=4) == ["▁▃▆█"]


def test_rows_are_filled_from_below():
    assert sparkline([0.0, 8.0, 15.0], width=3, height=2) == [" ▁█", "▁██"]


def test_few_values_are_joined_by_lines_and_many_are_averaged():
    assert sparkline([0.0, 7.0], width=8) == [BLOCKS[1:]]
    assert sparkline([0.0, 0.0, 7.0, 7.0], width=2) == ["▁█"]


def test_a_scale_may_begin_below_the_lowest_value():
    assert sparkline([7.0, 14.0], width=2, low=0.0) == ["▅█"]


def test_equal_values_are_in_the_middle():
    assert sparkline([3.0] * 9, width=5, height=1) == ["▄▄▄▄▄"]


@given(VALUES, st.integers(1, 200), st.integers(1, 30))
def test_it_is_as_wide_and_as_high_as_asked(values, width, height):
    rows = sparkline(values, width=width, height=height)
    assert [len(row) for row in rows] == [width] * height
    assert all(row[column] != " " for row in rows[-1:] for column in range(width)), "every value is visible"


def test_a_gauge_is_never_empty_and_never_overflows():
    assert [gauge(share) for share in (0.0, 0.5, 1.0, 7.0)] == ["▁", "▄", "█", "█"]
