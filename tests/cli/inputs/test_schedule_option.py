"""`--schedule` takes what a job takes, and both what there is."""

from __future__ import annotations

import pytest

from oobleck.cli.inputs import parse_schedule_name
from oobleck.errors import UsageError
from oobleck.schedule import ScheduleKind


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_every_kind_that_templates_can_have_is_a_name(kind: ScheduleKind) -> None:
    assert ScheduleKind(parse_schedule_name(kind.value)) is kind


@pytest.mark.parametrize("name", ["dualpipe", "", "1F1B"])
def test_another_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(UsageError, match="one of 1f1b, gpipe, interleaved, zero-bubble, auto"):
        parse_schedule_name(name)
