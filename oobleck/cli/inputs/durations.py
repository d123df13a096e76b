"""Durations on a command line: `90`, `45s`, `10m`, `3.1h`, `54d`."""

from __future__ import annotations

import re

import typer

from oobleck.errors import shown
from oobleck.job.bounds import MAX_SECONDS

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|d|)")


def parse_duration(text: str) -> float | None:
    """Return the seconds that a duration says; None for what is none. Without a unit they are seconds."""
    match = _PATTERN.fullmatch(text.strip())
    return float(match[1]) * _UNITS_S[match[2]] if match else None


def duration_s(text: str | float) -> float:
    """Return seconds; a bad duration is a usage error that shows what one looks like."""
    if isinstance(text, int | float):  # an option's default
        return float(text)
    seconds = parse_duration(text)
    if seconds is None:
        raise typer.BadParameter(f"{shown(text)} is not a duration; write 45s, 10m, 3.1h or 54d")
    if seconds > MAX_SECONDS:
        raise typer.BadParameter(f"{shown(text)} is too long; it must be at most {MAX_SECONDS / 86_400:,.0f} days")
    return seconds
