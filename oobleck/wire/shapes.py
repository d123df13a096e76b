"""Compiles a type annotation into the `Shape` by which its values are written as builtins, and strictly read back.

Annotations may be scalars, enums, literals, optionals, tuples, string-keyed mappings, dataclasses, named tuples, and
unions of those. Lists, sets and dicts are for saved state; messages hold none. Reading rejects everything that the
annotation does not allow, and names the place ("Order.plan.pipelines[2]: field 'nodes' is missing"). Every field is
always written and required, defaults notwithstanding: a peer that leaves one out speaks another protocol. Fields that
the constructor does not take are left out.

There are two notations. `BINARY`, for msgpack, has bytes and floats as they are. `TEXT`, for JSON, has bytes as
{"@bytes": base64}, and the floats that JSON lacks as {"@float": "nan"}, "inf" or "-inf".

msgspec is not used, though it is twenty times as fast: it writes a NaN to JSON as null, which it then cannot read as a
float; it refuses the lone surrogates of a traceback; it fills missing fields from defaults and takes the last of two
keys; and it knows no unions of dataclasses, so that jobs and plans would have to be its own Structs.
`tests/test_libraries.py` holds each of these.
"""

from __future__ import annotations

import types
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Literal, Union, get_args, get_origin, get_type_hints

import msgpack

from oobleck.json_table import unique_keys

from . import containers
from . import shape as single
from .shape import Notation, Shape, unexpected


@cache
def shape_of(annotation: object, notation: Notation) -> Shape:
    """Compile a type annotation. Raises TypeError for one without a shape, which is a bug."""
    if annotation is None or annotation is types.NoneType:
        return single.exactly(types.NoneType, "null")
    if annotation is float:
        return single.floating(notation)
    if annotation is bytes:
        return single.binary(notation)
    if not isinstance(annotation, type):
        return _generic(annotation, notation)
    if annotation in (bool, int, str):
        return single.exactly(annotation, annotation.__name__)
    if issubclass(annotation, StrEnum):
        return single.enumerated(annotation)
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        hints = get_type_hints(annotation)
        return containers.record(annotation, {name: shape_of(hints[name], notation) for name in hints})
    if is_dataclass(annotation):
        hints = get_type_hints(annotation)
        written = [field.name for field in fields(annotation) if field.init]
        shape = containers.record(annotation, {name: shape_of(hints[name], notation) for name in written})
        is_encoded_once = notation is Notation.BINARY and getattr(annotation, "is_encoded_once", False)
        return encoded_once(shape) if is_encoded_once else shape
    return _generic(annotation, notation)


@cache
def tagged_shape_of(classes: tuple[type, ...], notation: Notation) -> Shape:
    """The shape of one of several dataclasses, with the class's name next to its fields. Raises TypeError as above."""
    if not classes or not all(is_dataclass(cls) for cls in classes):
        raise TypeError(f"only dataclasses are told apart by their names, not {classes!r}")
    shapes = {cls.__name__: shape_of(cls, notation) for cls in classes}
    if len(shapes) != len(classes):
        raise TypeError(f"classes on the wire share a name: {', '.join(sorted(cls.__name__ for cls in classes))}")
    return containers.tagged(classes, shapes)


def _generic(annotation: object, notation: Notation) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return single.literal(arguments)
    if origin is tuple:
        return _tuple(arguments, notation)
    if origin in (Mapping, dict) and arguments[0] is str:
        return containers.mapping(shape_of(arguments[1], notation))
    if origin is dict:
        return containers.collection(dict, containers.sequence(_tuple(arguments, notation)))
    if origin in (list, set, frozenset):
        return containers.collection(origin, containers.sequence(shape_of(arguments[0], notation)))
    if origin in (Union, types.UnionType):
        return _union(arguments, notation)
    raise TypeError(f"{annotation!r} has no shape on the wire")


def _tuple(arguments: tuple[object, ...], notation: Notation) -> Shape:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return containers.sequence(shape_of(arguments[0], notation))
    return containers.fixed_tuple(tuple(shape_of(argument, notation) for argument in arguments))


def _union(arguments: tuple[object, ...], notation: Notation) -> Shape:
    classes = tuple(argument for argument in arguments if isinstance(argument, type) and is_dataclass(argument))
    if len(classes) == len(arguments):
        return tagged_shape_of(classes, notation)
    shapes = [shape_of(argument, notation) for argument in arguments if argument not in classes]
    if classes:
        shapes.insert(0, shape_of(classes[0], notation) if len(classes) == 1 else tagged_shape_of(classes, notation))
    # float takes ints too, but an int stays an int in a union with int.
    shapes.sort(key=lambda shape: shape.name == "float")
    return containers.choice(tuple(shapes))


MOST_BYTES = 16 * 1024 * 1024
"""The most bytes of an unpacked value."""
# Few values are sent at the same time: one for each plan that workers have.
_KEPT = 4
_BROKEN_TEXT = "surrogatepass"


def encoded_once(part: Shape) -> Shape:
    """A dataclass that `is_encoded_once`: as deflated msgpack, whose bytes are kept for thousands of equal messages."""
    # Keyed by identity. The value is kept too, so that no other one has its identity.
    kept: OrderedDict[int, tuple[object, bytes]] = OrderedDict()

    def write(value: object) -> object:
        if id(value) not in kept:
            packed: bytes = msgpack.packb(part.write(value), unicode_errors=_BROKEN_TEXT)
            kept[id(value)] = (value, zlib.compress(packed))
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        return kept[id(value)][1]

    def read(raw: object) -> object:
        if type(raw) is not bytes:
            raise unexpected(f"a deflated {part.name}", raw)
        return part.read(_unpacked(raw, part.name))

    return Shape(name=part.name, values=part.values, builtins=(bytes,), write=write, read=read)


def _unpacked(raw: bytes, name: str) -> object:
    inflater = zlib.decompressobj()
    try:
        # The limit holds while it inflates, so that a small frame cannot fill the memory.
        packed = inflater.decompress(raw, MOST_BYTES)
        if not inflater.eof or inflater.unused_data:
            raise unexpected(f"a deflated {name} of at most {MOST_BYTES} bytes", raw)
        return msgpack.unpackb(packed, object_pairs_hook=unique_keys, unicode_errors=_BROKEN_TEXT)
    except (ValueError, TypeError, zlib.error) as error:
        raise unexpected(f"a deflated {name} ({str(error) or type(error).__name__})", raw) from error
