"""The shapes of values that hold others: tuples, collections, mappings, unions and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oobleck.errors import OobleckError

from .shape import Mismatch, Shape, described, unchanged, unexpected

TYPE_KEY = "@type"
"""The key of the class's name where several classes are possible. No field can have this name."""

_SHOWN_PROBLEMS = 5

_Collection = list[object] | set[object] | frozenset[object] | dict[object, object]


def sequence(part: Shape) -> Shape:
    """A tuple of any length, whose items are all of one shape."""
    name = f"a list of {part.name}"
    # Looked up once and not for each item, because lists may have thousands.
    write_part, read_part = part.write, part.read

    def write(value: object) -> object:
        assert isinstance(value, tuple)
        return [write_part(item) for item in value]

    def read(raw: object) -> object:
        if type(raw) is not list:
            raise unexpected(name, raw)
        items: list[object] = []
        try:
            for item in raw:
                items.append(read_part(item))  # noqa: PERF401 - its length says where a mismatch is
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(items)}]") from None
        return tuple(items)

    return Shape(name=name, values=(tuple,), builtins=(list,), write=write, read=read)


def fixed_tuple(parts: tuple[Shape, ...]) -> Shape:
    """A tuple of a fixed length, whose items have a shape each."""
    name = f"a list of {len(parts)}"

    def write(value: object) -> object:
        assert isinstance(value, tuple)
        return [part.write(item) for part, item in zip(parts, value, strict=True)]

    def read(raw: object) -> object:
        if type(raw) is not list or len(raw) != len(parts):
            raise unexpected(name, raw)
        items: list[object] = []
        try:
            for part, item in zip(parts, raw, strict=True):
                items.append(part.read(item))  # its length says where a mismatch is
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(items)}]") from None
        return tuple(items)

    return Shape(name=name, values=(tuple,), builtins=(list,), write=write, read=read)


def collection(cls: type[_Collection], items: Shape) -> Shape:
    """A list, a set or a dict, written as the tuple of its items, whose shape is `items`."""

    def write(value: object) -> object:
        assert isinstance(value, list | set | frozenset | dict)
        ordered = sorted(value) if isinstance(value, set | frozenset) else value  # equal sets are written alike
        return items.write(tuple(ordered.items() if isinstance(ordered, dict) else ordered))

    def read(raw: object) -> object:
        parts = items.read(raw)
        assert isinstance(parts, tuple)
        value = cls(parts)
        if len(value) != len(parts):
            raise unexpected(f"{items.name} without repetitions", raw)
        return value

    return Shape(name=items.name, values=(cls,), builtins=items.builtins, write=write, read=read)


def mapping(part: Shape) -> Shape:
    """A mapping from text, whose values are all of one shape; read as a dict."""
    name = f"a map of {part.name}"

    def write(value: object) -> object:
        assert isinstance(value, Mapping)
        return {key: part.write(item) for key, item in value.items()}

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise unexpected(name, raw)
        items: dict[str, object] = {}
        for key, item in raw.items():
            if type(key) is not str:
                raise unexpected("a key that is a str", key)
            try:
                items[key] = part.read(item)
            except Mismatch as mismatch:
                raise mismatch.within(f"[{described(key)}]") from None
        return items

    return Shape(name=name, values=(Mapping,), builtins=(dict,), write=write, read=read)


def record(cls: type, shapes: Mapping[str, Shape]) -> Shape:
    """A dataclass, by the shapes of all its fields. What its constructor refuses is a mismatch too."""
    # Most fields are builtins already, and are written without the cost of a call.
    writers = tuple((name, None if shape.write is unchanged else shape.write) for name, shape in shapes.items())
    readers = tuple((name, shape.read) for name, shape in shapes.items())

    def write(value: object) -> object:
        return {
            name: getattr(value, name) if write_field is None else write_field(getattr(value, name))
            for name, write_field in writers
        }

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise unexpected(f"a map with the fields of {cls.__name__}", raw)
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
    # A constructor may compute with a peer's values, and divide by its zero, before it refuses them.
    except (OobleckError, ValueError, ArithmeticError) as error:
        raise Mismatch(str(error)) from error


def _wrong_fields(cls: type, actual: frozenset[object], expected: frozenset[str]) -> Mismatch:
    problems = [f"field {name!r} is missing" for name in sorted(expected - actual)]
    problems += [f"there is no field {name}" for name in sorted(described(name) for name in actual - expected)]
    more = f" and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
    return Mismatch(f"{', '.join(problems[:_SHOWN_PROBLEMS])}{more} in {cls.__name__}")


def tagged(classes: tuple[type, ...], shapes: Mapping[str, Shape]) -> Shape:
    """One of several dataclasses, whose name is written next to the fields."""

    def write(value: object) -> object:
        name = type(value).__name__
        written = shapes[name].write(value)
        assert isinstance(written, dict)
        return {TYPE_KEY: name, **written}

    def read(raw: object) -> object:
        if type(raw) is not dict:
            raise unexpected("a map", raw)
        name = raw.get(TYPE_KEY)
        shape = shapes.get(name) if type(name) is str else None
        if shape is None:
            raise Mismatch(f"unknown type {described(name)}; expected one of {', '.join(sorted(shapes))}")
        try:
            # A record refuses every key that is not a field.
            return shape.read({key: part for key, part in raw.items() if key != TYPE_KEY})
        except Mismatch as mismatch:
            raise mismatch.within("." + shape.name) from None

    return Shape(name=" | ".join(shapes), values=classes, builtins=(dict,), write=write, read=read)


def choice(shapes: tuple[Shape, ...]) -> Shape:
    """One of several shapes that are written as different builtins; of two that read int, the first is used.

    Raises TypeError where the builtin would not tell which shape it is.
    """
    name = " or ".join(shape.name for shape in shapes)
    readers: dict[type, Callable[[object], object]] = {}
    for shape in shapes:
        for builtin in shape.builtins:
            if readers.setdefault(builtin, shape.read) is not shape.read and builtin is not int:
                raise TypeError(f"{name}: more than one of these is written as {builtin.__name__}")

    def write(value: object) -> object:
        # By exact class first, because a bool is also an int; a Mapping may be of any class.
        for shape in shapes:
            if type(value) in shape.values:
                return shape.write(value)
        return next(shape for shape in shapes if isinstance(value, shape.values)).write(value)

    def read(raw: object) -> object:
        read_one = readers.get(type(raw))
        if read_one is None:
            raise unexpected(name, raw)
        return read_one(raw)

    values = tuple(value for shape in shapes for value in shape.values)
    return Shape(name=name, values=values, builtins=tuple(readers), write=write, read=read)
