"""Numbers, durations and words on a command line, read within their bounds; a misspelled word gets a suggestion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches

import typer

from oobleck.errors import UsageError, shown
from oobleck.job import CheckpointSpec, ScalingSpec
from oobleck.job.bounds import MAX_SECONDS

_SHOWN_CHARS = 40
_WHOLE = re.compile(r"[-+]?[0-9]{1,40}")
_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|d|)")
_SHORT = 2
_STEPS = re.compile(r"[0-9]{1,15}")
_DEADLINE = "deadline="


def whole(least: int, most: int) -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `least` to `most`; any other is a usage error that names these bounds."""

    def number(text: str | int) -> int:
        if (isinstance(text, str) and not _WHOLE.fullmatch(text.strip())) or not least <= int(text) <= most:
            raise _out_of_bounds(text, f"a whole number from {least:,} to {most:,}")
        return int(text)

    return number


def real(least: float, most: float) -> Callable[[str | float], float]:
    """Return a parser of numbers from `least` to `most`; any other is a usage error that names these bounds."""

    def number(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            # No comparison with NaN holds, so other text is out of bounds.
            value = float("nan")
        if not least <= value <= most:
            raise _out_of_bounds(text, f"a number from {least:,g} to {most:,g}")
        return value

    return number


def _out_of_bounds(value: str | float, bounds: str) -> typer.BadParameter:
    text = str(value)
    cut = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return typer.BadParameter(f"{cut} is not possible; it must be {bounds}")


def parse_duration(text: str) -> float | None:
    """Return the seconds of `45s`, `10m`, `3.1h`, `54d` or a bare number of seconds; None for any other text."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _UNITS_S[match[2]] if match else None


def duration_s(text: str | float) -> float:
    """Return seconds; a bad duration is a usage error with examples of good ones."""
    if isinstance(text, int | float):  # typer parses defaults too
        return float(text)
    seconds = parse_duration(text)
    if seconds is None:
        raise typer.BadParameter(f"{shown(text)} is not a duration; write 45s, 10m, 3.1h or 54d")
    if seconds > MAX_SECONDS:
        raise typer.BadParameter(f"{shown(text)} is too long; it must be at most {MAX_SECONDS / 86_400:,.0f} days")
    return seconds


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word: it suggests the nearest known word, or lists all of them."""
    choices = sorted(known)
    match = nearest(word, choices)
    return f"did you mean {match}?" if match else f"known are {', '.join(choices)}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the most similar known word, if one is near; words of one or two letters are near nothing."""
    longer = [each for each in known if len(each) > _SHORT] if len(word) > _SHORT else []
    return next(iter(get_close_matches(word.lower(), longer, n=1)), None)


def with_save_every(spec: CheckpointSpec, text: str) -> CheckpointSpec:
    """Change when to save, to `50` (steps), `90s`, `5m`, `1h`, `auto` or `never`. Raises UsageError for other texts."""
    fresh = replace(spec, enabled=True, save_steps=None, save_interval_s=None, waits_for_disk=False)
    if text == "auto":
        return fresh
    if text == "never":
        return replace(fresh, enabled=False)
    if _STEPS.fullmatch(text) and int(text) > 0:
        return replace(fresh, save_steps=int(text), waits_for_disk=spec.waits_for_disk)
    # A bare number means steps here, so a time needs its unit.
    interval_s = parse_duration(text) if text[-1:].isalpha() else None
    if interval_s and interval_s <= MAX_SECONDS:
        return replace(fresh, save_interval_s=interval_s)
    raise UsageError(f"--save-every: {text!r} is neither steps (50) nor a time (90s, 5m, 1h), nor auto or never")


def parse_scaling(text: str, base: ScalingSpec, *, now: datetime | None = None) -> ScalingSpec:
    """Read `all`, `efficient`, `deadline=2h` or `deadline=2026-12-01T18:00`, a local time unless it says otherwise.

    `now` is when the run starts, with its time zone; without it, a deadline is a duration. The other values of `base`
    stay. Raises UsageError for anything else.
    """
    if text in ("all", "efficient"):
        return ScalingSpec(policy="all" if text == "all" else "efficient", hysteresis_s=base.hysteresis_s)
    if not text.startswith(_DEADLINE):
        raise UsageError(f"--scaling: {text!r} is not all, efficient or deadline=TIME, as in deadline=2h")
    seconds = _deadline_s(text.removeprefix(_DEADLINE), now)
    if seconds <= 0:
        raise UsageError(f"--scaling: {text} has passed; it must lie in the future")
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


def racks(num_nodes: int, num_domains: int | None) -> list[str]:
    """Return the failure domain of each node: `num_domains` of about equally many neighbours; none without a number.

    Raises UsageError.
    """
    if num_domains is None:
        return []
    if num_domains > num_nodes:
        raise UsageError(f"--domains is {num_domains}, and there are {num_nodes} nodes; a domain has at least one")
    return [f"rack{number * num_domains // num_nodes}" for number in range(num_nodes)]
