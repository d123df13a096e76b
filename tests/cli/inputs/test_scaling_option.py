"""On how many nodes to train, as one word."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from oobleck.cli.inputs.values import parse_scaling
from oobleck.errors import UsageError
from oobleck.job import ScalingSpec

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", ScalingSpec(hysteresis_s=7.0)),
        ("efficient", ScalingSpec(policy="efficient", hysteresis_s=7.0)),
        ("deadline=90m", ScalingSpec(policy="deadline", deadline_s=5400.0, hysteresis_s=7.0)),
        ("deadline=2026-03-01T14:00+00:00", ScalingSpec(policy="deadline", deadline_s=7200.0, hysteresis_s=7.0)),
        ("deadline=2026-03-01T14:00+01:00", ScalingSpec(policy="deadline", deadline_s=3600.0, hysteresis_s=7.0)),
    ],
)
def test_a_word_says_on_how_many_nodes_to_train(text: str, expected: ScalingSpec) -> None:
    base = ScalingSpec(policy="deadline", deadline_s=5.0, hysteresis_s=7.0)
    assert parse_scaling(text, base, now=NOW) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("most", "not all, efficient or deadline=TIME"),
        ("deadline", "not all, efficient or deadline=TIME"),
        ("deadline=soon", "neither a duration"),
        ("deadline=0s", "has passed"),
        ("deadline=2026-03-01T11:00+00:00", "has passed"),
    ],
)
def test_anything_else_says_what_is_possible(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_scaling(text, ScalingSpec(), now=NOW)


def test_a_simulated_deadline_is_no_time_of_the_day() -> None:
    with pytest.raises(UsageError, match="2026-03-01T14:00"):
        parse_scaling("deadline=2026-03-01T14:00", ScalingSpec())
