"""Options of one word that change a job: `--save-every` (how often to save) and `--scaling` (on how many nodes)."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime

import typer

from oobleck.errors import UsageError
from oobleck.job import CheckpointSpec, ScalingSpec
from oobleck.job.bounds import MAX_SECONDS

from .values import duration_s, parse_duration

_STEPS = re.compile(r"[0-9]{1,15}")
_DEADLINE = "deadline="


def with_save_every(spec: CheckpointSpec, text: str) -> CheckpointSpec:
    """Change when to save: `50` (steps), `90s`, `5m`, `1h`, `auto` or `never`.

    Raises UsageError for anything else.
    """
    fresh = replace(spec, enabled=True, save_steps=None, save_interval_s=None)
    if text == "auto":
        return fresh
    if text == "never":
        return replace(fresh, enabled=False)
    if _STEPS.fullmatch(text) and int(text) > 0:
        return replace(fresh, save_steps=int(text))
    interval_s = parse_duration(text) if text[-1:].isalpha() else None
    if interval_s and interval_s <= MAX_SECONDS:
        return replace(fresh, save_interval_s=interval_s)
    raise UsageError(f"--save-every: {text!r} is neither steps (50) nor a time (90s, 5m, 1h), nor auto or never")


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
