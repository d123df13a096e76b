"""The base of all shapes: how one type is written as builtins, and strictly read back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from oobleck.errors import shown


class Notation(Enum):
    """What carries the builtins."""

    BINARY = "binary"
    TEXT = "text"


class Mismatch(Exception):
    """Builtins do not have the expected shape. Callers turn it into the error that fits the blame."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place: tuple[str, ...] = ()

    def within(self, part: str) -> Mismatch:
        """Prepend one part of the path."""
        # The path is only built when something is wrong, so that reading pays nothing for it.
        self.place = (part, *self.place)
        return self

    def __str__(self) -> str:
        return f"{''.join(self.place).lstrip('.') or 'message'}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one type is written and read."""

    name: str
    values: tuple[type, ...]
    """The classes of the values that it writes."""
    builtins: tuple[type, ...]
    """The classes of the builtins that it reads."""
    write: Callable[[object], object]
    read: Callable[[object], object]
    """Raises Mismatch."""


def unexpected(expectation: str, raw: object) -> Mismatch:
    return Mismatch(f"expected {expectation}, got {described(raw)}")


def described(raw: object) -> str:
    """Describe a value for an error; a list or a map by its size."""
    if isinstance(raw, list | dict):
        return f"a {'list' if isinstance(raw, list) else 'map'} of {len(raw)}"
    return shown(raw)


def unchanged(value: object) -> object:
    return value
