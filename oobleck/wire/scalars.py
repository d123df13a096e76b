"""The shapes of single values: numbers, text, bytes, enums and literals."""

from __future__ import annotations

import base64
import math
from enum import StrEnum

from .shape import Notation, Shape, unchanged, unexpected

_BYTES_KEY = "@bytes"
_FLOAT_KEY = "@float"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
        if type(raw) not in classes or raw not in choices:
            raise unexpected(expectation, raw)
        return raw

    return Shape(name=expectation, values=classes, builtins=classes, write=unchanged, read=read)
