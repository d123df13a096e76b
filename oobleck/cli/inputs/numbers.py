"""Numbers on a command line: each option says between which bounds its own lies."""

from __future__ import annotations

import re
from collections.abc import Callable

import typer

_SHOWN_CHARS = 40
_WHOLE = re.compile(r"[-+]?[0-9]{1,40}")


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
