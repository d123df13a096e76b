"""What times of messages say of a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError
from oobleck.planner.profiles import LinkSpeed, fit_link, link_from_json, link_to_json, median_link

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23)


def times(link: LinkSpeed) -> dict[int, float]:
    return {size: link.latency_s + size / link.bytes_per_s for size in SIZES}


@given(speed=st.floats(1e5, 1e12), latency=st.floats(1e-6, 0.1), first=st.integers(0, 3))
def test_times_of_a_line_give_the_line(speed: float, latency: float, first: int) -> None:
    link = LinkSpeed(bytes_per_s=speed, latency_s=latency)
    found = fit_link(dict(list(times(link).items())[first:]))
    takes_s = {size: found.latency_s + size / found.bytes_per_s for size in SIZES[first:]}
    assert takes_s == pytest.approx({size: times(link)[size] for size in SIZES[first:]}, rel=1e-6)


def test_a_small_message_counts_as_much_as_a_large_one() -> None:
    link = LinkSpeed(bytes_per_s=1e9, latency_s=5e-5)
    measured = {
        size: time_s * (1.05 if index % 2 else 0.95) for index, (size, time_s) in enumerate(times(link).items())
    }
    found = fit_link(measured)
    assert found.latency_s == pytest.approx(5e-5, rel=0.1)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_there_is_no_negative_latency() -> None:
    found = fit_link({1_000: 1e-6, 10_000: 2e-5, 100_000: 2e-4})
    assert found.latency_s == 0
    assert found.bytes_per_s == pytest.approx(5e8)


@given(seconds=st.dictionaries(st.integers(1, 1 << 30), st.floats(1e-9, 1e3), min_size=2, max_size=8))
def test_any_times_give_a_link_that_can_be(seconds: dict[int, float]) -> None:
    found = fit_link(seconds)
    assert found.latency_s >= 0
    assert 0 < found.bytes_per_s <= 1e15


def test_times_that_do_not_grow_are_all_latency() -> None:
    found = fit_link({1_000: 3e-4, 1_000_000: 2e-4})
    assert found.latency_s == 2e-4
    assert found.bytes_per_s == 1e15


def test_one_bad_link_of_three_does_not_count() -> None:
    good = [LinkSpeed(bytes_per_s=1e9, latency_s=1e-4), LinkSpeed(bytes_per_s=1.1e9, latency_s=2e-4)]
    bad = LinkSpeed(bytes_per_s=1e3, latency_s=3.0)
    assert median_link([good[0], bad, good[1]]) == LinkSpeed(bytes_per_s=1e9, latency_s=2e-4)
    assert median_link(good) == LinkSpeed(bytes_per_s=1e9, latency_s=2e-4)


def test_a_file_gives_back_what_was_written_and_is_read_strictly() -> None:
    link = LinkSpeed(bytes_per_s=1.25e9, latency_s=3.3e-5)
    text = link_to_json("inter_node", link)
    assert link_from_json(text) == ("inter_node", link)
    for wrong in (
        "{torn",
        "{}",
        text.replace("inter", "outer"),
        text.replace("3.3e-05", '"x"'),
        text[:-2] + ', "more": 1}',
    ):
        with pytest.raises(ConfigError):
            link_from_json(wrong)
