from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.ui.run_panels import column_means
from oobleck.ui.sim_report import step_chart


def test_columns_are_as_high_as_their_means() -> None:
    lines = [line.plain for line in step_chart([(0, 4), (50, 2), (75, 0)], 100, width=28, unit="nodes", height=2)]
    assert lines == [
        "4 nodes ▕█████████▄         ",
        "      0 ▕██████████████▂    ",
        "         0           0:01:40",
    ]


def test_nothing_is_drawn_as_nothing() -> None:
    lines = [line.plain for line in step_chart([(0, 0)], 10, width=20, unit="x")]
    assert not any("█" in line for line in lines)


@given(
    values=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6)), min_size=1, max_size=20),
    columns=st.integers(1, 50),
)
def test_means_keep_the_sum_over_time(values: list[tuple[float, float]], columns: int) -> None:
    points = [(0.0, 1.0), *sorted(values)]
    means = column_means(points, 100.0, columns)
    whole = sum(v * (points[i + 1][0] if i + 1 < len(points) else 100.0) - v * t for i, (t, v) in enumerate(points))
    assert sum(means) * 100 / columns == pytest.approx(whole, rel=1e-6, abs=1e-6)
