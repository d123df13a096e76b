"""How a value of a declared type is written as builtins, and strictly read back.

A `Shape` is compiled once from a type annotation: scalars, enums, literals, optionals, tuples, string-keyed
mappings, dataclasses, and unions of those. Reading rejects whatever the annotation does not allow and names
the place ("Order.plan.pipelines[2]: field 'nodes' is missing"). Every field is always written and must be
there on reading, defaults notwithstanding: a peer that leaves one out speaks another protocol.

There are two notations. `BINARY` is what msgpack carries: bytes and floats as they are. `TEXT` is what JSON
carries: bytes as {"@bytes": base64}, and the floats that JSON lacks as {"@float": "nan"}, "inf" or "-inf".

msgspec's `convert` is not used: it skips unknown fields, fills missing ones from defaults, and knows no unions
of dataclasses.
"""

from __future__ import annotations

import base64
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Literal, Union, get_args, get_origin, get_type_hints

from oobleck.errors import OobleckError

__all__ = ["TYPE_KEY", "Mismatch", "Notation", "Shape", "shape_of", "tagged_shape_of"]

TYPE_KEY = "@type"
"""Holds the class's name where several classes are possible. No field can be called so."""

_BYTES_KEY = "@bytes"
_FLOAT_KEY = "@float"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SHOWN_CHARS = 80


class Notation(Enum):
    """What the builtins are to be carried by."""

    BINARY = "binary"
    TEXT = "text"


class Mismatch(Exception):
    """Builtins that are not of the shape they should have. Callers turn it into the error that fits the blame."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place: tuple[str, ...] = ()

    def within(self, part: str) -> Mismatch:
        """Prepend one part of the path. Built only when something is wrong, so that reading pays nothing for it."""
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


@cache
def shape_of(annotation: object, notation: Notation) -> Shape:
    """Compile a type annotation. Raises TypeError for one without a shape: our own bug, never a peer's."""
    if annotation is None or annotation is types.NoneType:
        return _exactly(types.NoneType, "null")
    if annotation is float:
        return _float(notation)
    if annotation is bytes:
        return _bytes(notation)
    if not isinstance(annotation, type):
        return _generic(annotation, notation)
    if annotation in (bool, int, str):
        return _exactly(annotation, annotation.__name__)
    if issubclass(annotation, StrEnum):
        return _enum(annotation)
    if is_dataclass(annotation):
        return _dataclass(annotation, notation)
    return _generic(annotation, notation)


@cache
def tagged_shape_of(classes: tuple[type, ...], notation: Notation) -> Shape:
    """The shape of one of several dataclasses, with the class's name beside its fields. Raises TypeError as above."""
    if not classes or not all(is_dataclass(cls) for cls in classes):
        raise TypeError(f"only dataclasses are told apart by their names, not {classes!r}")
    shapes = {cls.__name__: shape_of(cls, notation) for cls in classes}
    if len(shapes) != len(classes):
        raise TypeError(f"classes on the wire share a name: {', '.join(sorted(cls.__name__ for cls in classes))}")

    def write(value: object) -> object:
        name = type(value).__name__
        written = shapes[name].write(value)
        assert isinstance(written, dict)
        return {TYPE_KEY: name, **written}

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise _unexpected("a map", raw)
        name = raw.get(TYPE_KEY)
        shape = shapes.get(name) if type(name) is str else None
        if shape is None:
            raise Mismatch(f"unknown type {_shown(name)}; expected one of {', '.join(sorted(shapes))}")
        try:
            return shape.read({key: part for key, part in raw.items() if key != TYPE_KEY})
        except Mismatch as mismatch:
            raise mismatch.within("." + shape.name) from None

    return Shape(name=" | ".join(shapes), values=classes, builtins=(dict,), write=write, read=read)


def _generic(annotation: object, notation: Notation) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return _literal(arguments)
    if origin is tuple:
        return _tuple(arguments, notation)
    if origin in (Mapping, dict):
        return _mapping(arguments, notation)
    if origin in (Union, types.UnionType):
        return _union(arguments, notation)
    raise TypeError(f"{annotation!r} has no shape on the wire")


def _exactly(expected: type, name: str) -> Shape:
    def read(raw: object) -> object:
        # Not isinstance: to Python a bool is an int; to the protocol it is not.
        if type(raw) is not expected:
            raise _unexpected(name, raw)
        return raw

    return Shape(name=name, values=(expected,), builtins=(expected,), write=_unchanged, read=read)


def _float(notation: Notation) -> Shape:
    def read(raw: object) -> object:
        if type(raw) is float:
            return raw
        if type(raw) is not int:
            raise _unexpected("float", raw)
        try:
            return float(raw)
        except OverflowError:
            raise _unexpected("float", raw) from None

    def read_text(raw: object) -> object:
        if type(raw) is not dict:
            return read(raw)
        name = raw.get(_FLOAT_KEY)
        if len(raw) != 1 or type(name) is not str or name not in _NON_FINITE:
            raise _unexpected("float", raw)
        return _NON_FINITE[name]

    def write_text(value: object) -> object:
        assert isinstance(value, float | int)
        return value if math.isfinite(value) else {_FLOAT_KEY: str(value)}

    if notation is Notation.BINARY:
        return Shape(name="float", values=(float, int), builtins=(float, int), write=_unchanged, read=read)
    return Shape(name="float", values=(float, int), builtins=(float, int, dict), write=write_text, read=read_text)


def _bytes(notation: Notation) -> Shape:
    def write(value: object) -> object:
        assert isinstance(value, bytes)
        return {_BYTES_KEY: base64.b64encode(value).decode("ascii")}

    def read(raw: object) -> object:
        text = raw.get(_BYTES_KEY) if type(raw) is dict and len(raw) == 1 else None
        if type(text) is not str:
            raise _unexpected("bytes", raw)
        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise _unexpected("base64", text) from None

    if notation is Notation.BINARY:
        return _exactly(bytes, "bytes")
    return Shape(name="bytes", values=(bytes,), builtins=(dict,), write=write, read=read)


def _enum(enum: type[StrEnum]) -> Shape:
    members = {member.value: member for member in enum}
    expectation = f"one of {', '.join(members)}"

    def write(value: object) -> object:
        assert isinstance(value, enum)
        return value.value

    def read(raw: object) -> object:
        if type(raw) is not str or raw not in members:
            raise _unexpected(expectation, raw)
        return members[raw]

    return Shape(name=enum.__name__, values=(enum,), builtins=(str,), write=write, read=read)


def _literal(choices: tuple[object, ...]) -> Shape:
    expectation = f"one of {', '.join(map(repr, choices))}"
    classes = tuple(dict.fromkeys(type(choice) for choice in choices))

    def read(raw: object) -> object:
        if type(raw) not in classes or raw not in choices:
            raise _unexpected(expectation, raw)
        return raw

    return Shape(name=expectation, values=classes, builtins=classes, write=_unchanged, read=read)


def _tuple(arguments: tuple[object, ...], notation: Notation) -> Shape:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _sequence(shape_of(arguments[0], notation))
    parts = tuple(shape_of(argument, notation) for argument in arguments)
    name = f"a list of {len(parts)}"

    def write(value: object) -> object:
        assert isinstance(value, tuple)
        return [part.write(item) for part, item in zip(parts, value, strict=True)]

    def read(raw: object) -> object:
        if type(raw) is not list or len(raw) != len(parts):
            raise _unexpected(name, raw)
        items: list[object] = []
        try:
            for part, item in zip(parts, raw, strict=True):
                items.append(part.read(item))  # its length says where a mismatch is
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(items)}]") from None
        return tuple(items)

    return Shape(name=name, values=(tuple,), builtins=(list,), write=write, read=read)


def _sequence(part: Shape) -> Shape:
    name = f"a list of {part.name}"
    write_part, read_part = part.write, part.read

    def write(value: object) -> object:
        assert isinstance(value, tuple)
        return [write_part(item) for item in value]

    def read(raw: object) -> object:
        if type(raw) is not list:
            raise _unexpected(name, raw)
        items: list[object] = []
        try:
            for item in raw:
                items.append(read_part(item))  # noqa: PERF401 - its length says where a mismatch is
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(items)}]") from None
        return tuple(items)

    return Shape(name=name, values=(tuple,), builtins=(list,), write=write, read=read)


def _mapping(arguments: tuple[object, ...], notation: Notation) -> Shape:
    if arguments[0] is not str:
        raise TypeError(f"the keys of a mapping on the wire must be str, not {arguments[0]!r}")
    part = shape_of(arguments[1], notation)
    name = f"a map of {part.name}"

    def write(value: object) -> object:
        assert isinstance(value, Mapping)
        return {key: part.write(item) for key, item in value.items()}

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise _unexpected(name, raw)
        items: dict[str, object] = {}
        for key, item in raw.items():
            if type(key) is not str:
                raise _unexpected("a key that is a str", key)
            try:
                items[key] = part.read(item)
            except Mismatch as mismatch:
                raise mismatch.within(f"[{_shown(key)}]") from None
        return items

    return Shape(name=name, values=(Mapping,), builtins=(dict,), write=write, read=read)


def _union(arguments: tuple[object, ...], notation: Notation) -> Shape:
    classes = tuple(argument for argument in arguments if isinstance(argument, type) and is_dataclass(argument))
    if len(classes) == len(arguments):
        return tagged_shape_of(classes, notation)
    shapes = [shape_of(argument, notation) for argument in arguments if argument not in classes]
    if classes:
        shapes.append(shape_of(classes[0], notation) if len(classes) == 1 else tagged_shape_of(classes, notation))
    # float takes ints too, but where int is allowed beside it, an int stays an int.
    shapes.sort(key=lambda shape: shape.name == "float")
    return _choice(tuple(shapes))


def _choice(shapes: tuple[Shape, ...]) -> Shape:
    name = " or ".join(shape.name for shape in shapes)
    readers: dict[type, Callable[[object], object]] = {}
    for shape in shapes:
        for builtin in shape.builtins:
            if readers.setdefault(builtin, shape.read) is not shape.read and builtin is not int:
                raise TypeError(f"{name}: more than one of these is written as {builtin.__name__}")

    def write(value: object) -> object:
        # By exact class first, for a bool is also an int; a Mapping may be of any class.
        for shape in shapes:
            if type(value) in shape.values:
                return shape.write(value)
        return next(shape for shape in shapes if isinstance(value, shape.values)).write(value)

    def read(raw: object) -> object:
        read_one = readers.get(type(raw))
        if read_one is None:
            raise _unexpected(name, raw)
        return read_one(raw)

    values = tuple(value for shape in shapes for value in shape.values)
    return Shape(name=name, values=values, builtins=tuple(readers), write=write, read=read)


def _dataclass(cls: type, notation: Notation) -> Shape:
    hints = get_type_hints(cls)
    shapes = {field.name: shape_of(hints[field.name], notation) for field in fields(cls)}
    writers = tuple((name, None if shape.write is _unchanged else shape.write) for name, shape in shapes.items())
    readers = tuple((name, shape.read) for name, shape in shapes.items())

    def write(value: object) -> object:
        return {
            name: getattr(value, name) if write_field is None else write_field(getattr(value, name))
            for name, write_field in writers
        }

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise _unexpected(f"a map with the fields of {cls.__name__}", raw)
        if raw.keys() != shapes.keys():
            raise _wrong_fields(cls, frozenset(raw), frozenset(shapes))
        values: dict[str, object] = {}
        try:
            for name, read_field in readers:
                values[name] = read_field(raw[name])
        except Mismatch as mismatch:
            raise mismatch.within(f".{readers[len(values)][0]}") from None
        return _construct(cls, values)

    return Shape(name=cls.__name__, values=(cls,), builtins=(dict,), write=write, read=read)


def _construct(cls: type, values: dict[str, object]) -> object:
    try:
        return cls(**values)
    except (OobleckError, ValueError, ArithmeticError) as error:
        raise Mismatch(str(error)) from error


def _wrong_fields(cls: type, actual: frozenset[object], expected: frozenset[str]) -> Mismatch:
    problems = [f"field {name!r} is missing" for name in sorted(expected - actual)]
    problems += [f"there is no field {name}" for name in sorted(_shown(name) for name in actual - expected)]
    return Mismatch(f"{', '.join(problems)} in {cls.__name__}")


def _unexpected(expectation: str, raw: object) -> Mismatch:
    return Mismatch(f"expected {expectation}, got {_shown(raw)}")


def _shown(raw: object) -> str:
    if isinstance(raw, list | dict):
        return f"a {'list' if isinstance(raw, list) else 'map'} of {len(raw)}"
    text = repr(raw[:_SHOWN_CHARS]) if isinstance(raw, str | bytes) else repr(raw)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _unchanged(value: object) -> object:
    return value
