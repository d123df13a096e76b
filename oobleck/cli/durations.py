"""Durations on a command line: `90`, `45s`, `10m`, `3.1h`, `54d`."""

from __future__ import annotations

import math
import re

import typer

__all__ = ["duration_s"]

_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|h|d|)")


def duration_s(text: str | float) -> float:
    """Return seconds; a bad duration is a usage error that shows what one looks like."""
    if isinstance(text, int | float):  # an option's default
        return float(text)
    match = _PATTERN.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else math.inf
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{text!r} is not a duration; write 45s, 10m, 3.1h or 54d")
    return seconds
