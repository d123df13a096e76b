"""The bounds of the numbers and texts of specifications."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from oobleck.errors import ConfigError, shown

MAX_SECONDS = 5e8
"""The longest duration: fifteen years, 1.5 times the longest published failure trace."""
_MAX_TEXT_CHARS = 1 << 20

_Number = TypeVar("_Number", int, float, int | None, float | None, int | str)


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `least` to `most`, both included, but without `excluded`; `note` is for people."""

    least: float
    most: float
    excluded: tuple[float, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        without = f", but not {' or '.join(map(_written, self.excluded))}" if self.excluded else ""
        return f"from {_written(self.least)} to {_written(self.most)}{without}{f' ({self.note})' if self.note else ''}"

    def hold(self, value: float) -> bool:
        """Return whether a number is within; nan never is."""
        return self.least <= value <= self.most and value not in self.excluded


def _written(number: float) -> str:
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.0f}" if number.is_integer() and abs(number) < 1e12 else f"{number:g}"


def bounded(
    default: _Number, least: float, most: float, *, excluded: tuple[float, ...] = (), note: str = ""
) -> _Number:
    """Declare a field with a default and the bounds of its numbers; None and words are always allowed."""
    declared: _Number = field(default=default, metadata={"bounds": Bounds(least, most, excluded, note)})
    return declared


def bounds_of(spec: object) -> dict[str, Bounds]:
    """Return the bounds of a specification's numbers, keyed by field; `spec` is an instance or the class."""
    return {part.name: part.metadata["bounds"] for part in fields(spec) if "bounds" in part.metadata}  # type: ignore[arg-type]  # a dataclass


def check_spec(spec: object, section: str = "") -> Callable[[str, bool, str], None]:
    """Check a specification's numbers and texts. Raises ConfigError.

    Returns a function that checks more: it takes a field's name, a condition and the expectation.
    """
    for name, bounds in bounds_of(spec).items():
        value = getattr(spec, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(not is_number or bounds.hold(value), section + name, value, str(bounds))
    for part in fields(spec):  # type: ignore[arg-type]  # a dataclass
        for text in _texts(getattr(spec, part.name)):
            check_text(section + part.name, text)

    def must(field_name: str, condition: bool, expectation: str) -> None:
        require(condition, section + field_name, getattr(spec, field_name), expectation)

    return must


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case tuple():
            for item in value:
                yield from _texts(item)
        case Mapping():
            for key, item in value.items():
                yield from _texts(key)
                yield from _texts(item)


def check_text(field_name: str, text: str) -> None:
    """Raise ConfigError for a text that no file name, command or message can hold."""
    require(len(text) <= _MAX_TEXT_CHARS, field_name, f"{text[:40]}…", f"at most {_MAX_TEXT_CHARS:,} characters")
    whole = "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
    require(whole, field_name, text[:40], "text of whole characters, and without null characters")


def require(condition: bool, field_name: str, value: object, expectation: str) -> None:
    """Raise ConfigError with the field, its value and the expectation, unless the condition holds."""
    if not condition:
        raise ConfigError(f"{field_name}: {shown(value)} is not possible; it must be {expectation}")


def check_pattern(field_name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field_name}: {pattern!r} is not a valid regular expression: {error}") from error
