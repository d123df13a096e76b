"""Numbers, durations and words on a command line: read within their bounds, and put right where one is misspelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches

import typer

from oobleck.errors import shown
from oobleck.job.bounds import MAX_SECONDS

_SHOWN_CHARS = 40
_WHOLE = re.compile(r"[-+]?[0-9]{1,40}")
_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|s|m|h|d|)")
_SHORT = 2


def whole(least: int, most: int) -> Callable[[str | int], int]:
    """Return what reads a whole number from `least` to `most`; any other is a usage error with these bounds."""

    def number(text: str | int) -> int:
        if isinstance(text, str) and not _WHOLE.fullmatch(text.strip()):
            raise typer.BadParameter(f"{_shown(text)} is not possible; it must be {bounds}")
        value = int(text)
        if not least <= value <= most:
            raise typer.BadParameter(f"{_shown(str(text))} is not possible; it must be {bounds}")
        return value

    bounds = f"a whole number from {least:,} to {most:,}"
    return number


def real(least: float, most: float) -> Callable[[str | float], float]:
    """Return what reads a number from `least` to `most`; any other is a usage error with these bounds."""

    def number(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise typer.BadParameter(
                f"{_shown(str(text))} is not possible; it must be a number from {least:,g} to {most:,g}"
            )
        return value

    return number


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def parse_duration(text: str) -> float | None:
    """Return the seconds of `45s`, `10m`, `3.1h` or `54d`; None for what is none. Without a unit they are seconds."""
    match = _DURATION.fullmatch(text.strip())
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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Say how an unknown word may be put right, as the end of a sentence: by the nearest known one, or by all."""
    choices = sorted(known)
    match = nearest(word, choices)
    return f"did you mean {match}?" if match else f"known are {', '.join(choices)}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is spelled most alike, if one is near; words of one or two letters are near to nothing."""
    longer = [each for each in known if len(each) > _SHORT] if len(word) > _SHORT else []
    return next(iter(get_close_matches(word.lower(), longer, n=1)), None)
