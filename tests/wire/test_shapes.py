"""Shapes: which annotations have one, and what each reads and refuses in both notations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Literal, Optional, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.wire.shape import Mismatch, Notation
from oobleck.wire.shapes import shape_of, tagged_shape_of
from tests.examples import examples
from tests.wire.strategies import values_of


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 0


@dataclass(frozen=True)
class Circle:
    radius: float


@dataclass(frozen=True)
class Square:
    side: float
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Ratio:
    share: float

    def __post_init__(self) -> None:
        if 1 / self.share < 0:  # raises ZeroDivisionError for 0
            raise ValueError("a share is positive")


@dataclass(frozen=True)
class Drawing:
    shapes: tuple[Circle | Square, ...]
    title: str | None
    frame: Square | None
    corner: tuple[int, float, str]
    background: Circle | Square | Colour | None
    numbers: Mapping[str, int | float | bool | str | None]
    grid: Mapping[str, tuple[tuple[bytes, ...], ...]]
    mode: Literal["fast", "exact", 3]


ANNOTATIONS = [
    Drawing,
    Circle | Square,
    Circle | None,
    Optional[Circle],  # noqa: UP045 - both ways to write it
    Union[Circle, Square, None],  # noqa: UP007
    int | float,
    float | int | bool | str | None,
    tuple[()],
    tuple[int, ...],
    tuple[int, str],
    Mapping[str, Mapping[str, float]],
    Colour | int,
    Literal["a", 1, True, None],
]


@pytest.mark.parametrize("notation", Notation)
@pytest.mark.parametrize("annotation", ANNOTATIONS, ids=str)
@examples(40)
@given(data=st.data())
def test_what_a_shape_writes_it_reads(annotation, notation, data):
    value = data.draw(values_of(annotation))
    shape = shape_of(annotation, notation)
    read = shape.read(shape.write(value))
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("notation", Notation)
@pytest.mark.parametrize(
    ("annotation", "raw", "problem"),
    [
        (int, True, "expected int, got True"),
        (int, 1.0, "expected int, got 1.0"),
        (bool, 1, "expected bool, got 1"),
        (str, b"a", "expected str, got b'a'"),
        (float, "1", "expected float, got '1'"),
        (float, True, "expected float, got True"),
        (None, 0, "expected null, got 0"),
        (Colour, "green", "expected one of red, blue, got 'green'"),
        (Colour, ["red"], "expected one of red, blue, got a list of 1"),
        (Literal["a", 1], True, "expected one of 'a', 1, got True"),
        (Literal["a", 1], 2, "expected one of 'a', 1, got 2"),
        (tuple[int, ...], (1,), "expected a list of int, got (1,)"),
        (tuple[int, ...], [1, "x"], "[1]: expected int, got 'x'"),
        (tuple[int, str], [1], "expected a list of 2, got a list of 1"),
        (tuple[int, str], {}, "expected a list of 2, got a map of 0"),
        (tuple[int, str], [1, 2], "[1]: expected str, got 2"),
        (tuple[()], [1], "expected a list of 0, got a list of 1"),
        (Mapping[str, int], [], "expected a map of int, got a list of 0"),
        (Mapping[str, int], {1: 1}, "expected a key that is a str, got 1"),
        (Mapping[str, int], {"a": "b"}, "['a']: expected int, got 'b'"),
        (Mapping[str, tuple[int, ...]], {"a": [None]}, "['a'][0]: expected int, got None"),
        (int | None, "x", "expected int or null, got 'x'"),
        (Circle | None, [], "expected Circle or null, got a list of 0"),
        (Circle | Square, {"@type": "Line"}, "unknown type 'Line'; expected one of Circle, Square"),
        (Circle | Square, {"@type": ["Circle"]}, "unknown type a list of 1; expected one of Circle, Square"),
        (Circle | Square, {"@type": "Circle", "radius": "r"}, "Circle.radius: expected float, got 'r'"),
        (Circle, 5, "expected a map with the fields of Circle, got 5"),
        (Circle, {}, "field 'radius' is missing in Circle"),
        (Circle, {"radius": 1, "x": 1, 5: 1}, "there is no field 'x', there is no field 5 in Circle"),
        (Square, {"side": 1.0}, "field 'colour' is missing in Square"),
        (Ratio, {"share": 0}, "float division by zero"),
        (Ratio, {"share": -1}, "a share is positive"),
    ],
)
def test_what_a_shape_refuses_and_how_it_says_so(annotation, raw, problem, notation):
    with pytest.raises(Mismatch) as mismatch:
        shape_of(annotation, notation).read(raw)
    assert str(mismatch.value).removeprefix("message: ") == problem


def test_an_int_beside_a_float_stays_an_int():
    for annotation in (int | float, float | int, float | bool | int):
        assert type(shape_of(annotation, Notation.TEXT).read(1)) is int
        assert type(shape_of(annotation, Notation.TEXT).read(1.0)) is float


def test_a_mapping_of_any_class_is_written():
    shape = shape_of(Mapping[str, int] | None, Notation.BINARY)
    assert shape.write(MappingProxyType({"a": 1})) == {"a": 1}


def test_a_single_class_of_a_union_is_written_without_its_name():
    assert shape_of(Circle | None, Notation.TEXT).write(Circle(radius=1.0)) == {"radius": 1.0}
    assert shape_of(Circle | Square | None, Notation.TEXT).write(Circle(radius=1.0)) == {
        "@type": "Circle",
        "radius": 1.0,
    }


def test_notations_differ_in_bytes_and_in_the_floats_that_json_lacks():
    assert shape_of(bytes, Notation.BINARY).write(b"\x00") == b"\x00"
    assert shape_of(bytes, Notation.TEXT).write(b"\x00") == {"@bytes": "AA=="}
    assert shape_of(float, Notation.BINARY).write(float("inf")) == float("inf")
    assert shape_of(float, Notation.TEXT).write(float("-inf")) == {"@float": "-inf"}


@pytest.mark.parametrize(
    "annotation",
    [
        object,
        list,
        dict,
        dict[str, complex],
        Mapping[int, int],
        set,
        set[object],
        complex,
        Level,
        Colour | str,  # nothing would say which it is
        tuple[int, ...] | tuple[str, ...],
        Circle | Mapping[str, int],
        Literal["a"] | str,
    ],
    ids=str,
)
def test_annotations_without_a_shape_are_our_own_mistake(annotation):
    with pytest.raises(TypeError):
        shape_of(annotation, Notation.TEXT)


@dataclass(kw_only=True)
class Tally:
    """State that changes, as it is saved."""

    rows: list[Circle] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    ages: dict[str, int] = field(default_factory=dict)
    counts: dict[float, int] = field(default_factory=dict)
    planned: set[int] | None = None
    ended: frozenset[int] = frozenset()
    total: int = field(default=0, init=False)


@pytest.mark.parametrize("notation", Notation)
def test_state_is_written_whole_but_for_what_its_constructor_does_not_take(notation):
    shape = shape_of(Tally, notation)
    tally = Tally(
        rows=[Circle(1.0)], names={"b", "a"}, ages={"x": 1}, counts={0.5: 2}, planned={3, 1}, ended=frozenset({5, 4})
    )
    tally.total = 7
    written = {
        "rows": [{"radius": 1.0}],
        "names": ["a", "b"],
        "ages": {"x": 1},
        "counts": [[0.5, 2]],
        "planned": [1, 3],
        "ended": [4, 5],
    }
    assert shape.write(tally) == written
    again = shape.read(written)
    assert again == replace(tally)  # its total is what it begins with
    assert again.total == 0


@pytest.mark.parametrize(
    ("annotation", "raw"),
    [(set[str], ["a", "a"]), (dict[int, str], [[1, "a"], [1, "b"]]), (dict[int, str], [[1]]), (list[int], ["a"])],
    ids=str,
)
def test_collections_that_repeat_a_key_or_hold_something_else_are_refused(annotation, raw):
    with pytest.raises(Mismatch):
        shape_of(annotation, Notation.TEXT).read(raw)


def test_a_float_beside_a_map_cannot_be_told_apart_in_text():
    annotation = float | Circle
    assert shape_of(annotation, Notation.BINARY).read(1.5) == 1.5
    with pytest.raises(TypeError, match="more than one of these is written as dict"):
        shape_of(annotation, Notation.TEXT)


@pytest.mark.parametrize("classes", [(), (int,), (Circle, None), (Circle, Colour)])
def test_only_dataclasses_are_told_apart_by_name(classes):
    with pytest.raises(TypeError, match="only dataclasses"):
        tagged_shape_of(classes, Notation.BINARY)


def test_classes_of_one_name_are_refused():
    @dataclass
    class Other:
        pass

    Other.__name__ = "Circle"
    with pytest.raises(TypeError, match="share a name: Circle, Circle"):
        tagged_shape_of((Circle, Other), Notation.BINARY)
