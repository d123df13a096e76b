"""Shapes: how one type is written as builtins, and strictly read back; and those of numbers, text, bytes and enums."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum

from oobleck.errors import shown

_BYTES_KEY = "@bytes"
_FLOAT_KEY = "@float"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Notation(Enum):
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


def exactly(expected: type, name: str) -> Shape:
    """A value that is already a builtin."""

    def read(raw: object) -> object:
        # Not isinstance, because a bool is an int in Python, but not in the protocol.
        if type(raw) is not expected:
            raise unexpected(name, raw)
        return raw

    return Shape(name=name, values=(expected,), builtins=(expected,), write=unchanged, read=read)


def floating(notation: Notation) -> Shape:
    """A float; a whole number may be written as an int."""

    def read(raw: object) -> float:
        if type(raw) is float:
            return raw
        if type(raw) is not int:
            raise unexpected("float", raw)
        try:
            return float(raw)
        except OverflowError:
            raise unexpected("float", raw) from None

    def read_text(raw: object) -> float:
        if type(raw) is not dict:
            number = read(raw)
            if not math.isfinite(number):  # JSON's 1e999, which `write_text` never makes
                raise unexpected("float", raw)
            return number
        name = raw.get(_FLOAT_KEY)
        if len(raw) != 1 or type(name) is not str or name not in _NON_FINITE:
            raise unexpected("float", raw)
        return _NON_FINITE[name]

    def write_text(value: object) -> object:
        assert isinstance(value, float | int)
        return value if math.isfinite(value) else {_FLOAT_KEY: str(value)}

    if notation is Notation.BINARY:
        return Shape(name="float", values=(float, int), builtins=(float, int), write=unchanged, read=read)
    return Shape(name="float", values=(float, int), builtins=(float, int, dict), write=write_text, read=read_text)


def binary(notation: Notation) -> Shape:

    def write(value: object) -> object:
        assert isinstance(value, bytes)
        return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}

    def read(raw: object) -> object:
        text = raw.get(_BYTES_KEY) if type(raw) is dict and len(raw) == 1 else None
        if type(text) is not str:
            raise unexpected("bytes", raw)
        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise unexpected("base64", text) from None

    if notation is Notation.BINARY:
        return exactly(bytes, "bytes")
    return Shape(name="bytes", values=(bytes,), builtins=(dict,), write=write, read=read)


def enumerated(enum: type[StrEnum]) -> Shape:
    """A member of an enum, written as its value."""
    members = {member.value: member for member in enum}
    expectation = f"one of {', '.join(members)}"

    def write(value: object) -> object:
        assert isinstance(value, enum)
        return value.value

    def read(raw: object) -> object:
        if type(raw) is not str or raw not in members:
            raise unexpected(expectation, raw)
        return members[raw]

    return Shape(name=enum.__name__, values=(enum,), builtins=(str,), write=write, read=read)


def literal(choices: tuple[object, ...]) -> Shape:
    """One of a few builtins."""
    expectation = f"one of {', '.join(map(repr, choices))}"
    classes = tuple(dict.fromkeys(type(choice) for choice in choices))

    def read(raw: object) -> object:
        # The class is compared as well, because True equals 1.
        if type(raw) not in classes or raw not in choices:
            raise unexpected(expectation, raw)
        return raw

    return Shape(name=expectation, values=classes, builtins=classes, write=unchanged, read=read)
