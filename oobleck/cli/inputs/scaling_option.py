"""`--scaling`: on how many nodes to train, as one word."""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from oobleck.errors import UsageError
from oobleck.job import ScalingSpec

from .durations import duration_s

_DEADLINE = "deadline="


def parse_scaling(text: str, base: ScalingSpec, *, now: datetime | None = None) -> ScalingSpec:
    """Read `all`, `efficient`, `deadline=2h` or `deadline=2026-12-01T18:00`, a local time unless it says otherwise.

    `now` is when the run starts, with its time zone; without one, a deadline is a duration. What `base` says of other
    things is kept. Raises UsageError for anything else.
    """
    match text:
        case "all":
            return ScalingSpec(hysteresis_s=base.hysteresis_s)
        case "efficient":
            return ScalingSpec(policy="efficient", hysteresis_s=base.hysteresis_s)
    if not text.startswith(_DEADLINE):
        raise UsageError(f"--scaling: {text!r} is not all, efficient or deadline=TIME, as in deadline=2h")
    seconds = _deadline_s(text.removeprefix(_DEADLINE), now)
    if seconds <= 0:
        raise UsageError(f"--scaling: {text} is over; it must be a time to come")
    return ScalingSpec(policy="deadline", deadline_s=seconds, hysteresis_s=base.hysteresis_s)


def _deadline_s(text: str, now: datetime | None) -> float:
    try:
        return duration_s(text)
    except typer.BadParameter as error:
        if now is None:
            raise UsageError(f"--scaling: deadline={text}: {error}") from error
    try:
        return (datetime.fromisoformat(text).astimezone(UTC) - now).total_seconds()
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"--scaling: {text!r} is neither a duration (90m, 2h) nor a time (2026-12-01T18:00)"
        ) from error
