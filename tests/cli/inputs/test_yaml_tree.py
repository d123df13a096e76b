"""YAML: what plain words mean, where things stand, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.inputs.yaml_tree import YamlError, YamlList, YamlMapping, YamlScalar, YamlValue, parse_yaml
from tests.examples import examples


def plain(tree: YamlValue) -> object:
    """A tree without its lines."""
    match tree:
        case YamlScalar():
            return tree.value
        case YamlList():
            return [plain(item) for item in tree.items]
        case YamlMapping():
            return {key.text: plain(item) for key, item in tree.entries}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("3E+4", 3e4),
        ("1e5", 1e5),
        (".5", 0.5),
        ("-1.", -1.0),
        ("1_000.5", 1000.5),
        ("12", 12),
        ("-12", -12),
        ("+12", 12),
        ("007", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("8_000_000", 8_000_000),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("# only a comment", None),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_", "1_"),
        ("1__0", "1__0"),
        ("_1", "_1"),
        (".", "."),
        ("-", [None]),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("'3'", "3"),
        ('"true"', "true"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("!!int '3'", 3),
        ("[1, a, []]", [1, "a", []]),
        ("{a: 1, b: {c: x}}", {"a": 1, "b": {"c": "x"}}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("1: a", {"1": "a"}),
        ("<<: 1", {"<<": 1}),
    ],
)
def test_words_mean_what_yaml_1_2_says(text, value):
    read = plain(parse_yaml(text))
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_one():
    read = plain(parse_yaml(".nan"))
    assert isinstance(read, float)
    assert math.isnan(read)


def test_values_remember_lines_and_words():
    tree = parse_yaml("# x\na: 0x10\n\nb:\n  - 1\n  - 'q'\n")
    assert tree == YamlMapping(
        entries=(
            (YamlScalar(value="a", text="a", line=2), YamlScalar(value=16, text="0x10", line=2)),
            (
                YamlScalar(value="b", text="b", line=4),
                YamlList(
                    items=(YamlScalar(value=1, text="1", line=5), YamlScalar(value="q", text="q", line=6)), line=5
                ),
            ),
        ),
        line=2,
    )


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a: [1,\n", 2, "not YAML: "),
        ("a: b: c", 1, "not YAML: mapping values are not allowed here"),
        ("\n\ta: 1", 2, "not YAML: "),
        ("a: 1\n---\nb: 2", 2, "not YAML: but found another document"),
        ("*x", 1, "not YAML: found undefined alias"),
        ("a\n\x00", 2, "not YAML: special characters are not allowed"),
        ('a: "\\UFFFFFFFF"', 1, "not YAML: "),
        ('a: "\\U00110000"', 1, "not YAML: "),
        ("[" * 1000, 1, "nested too deeply"),
        ("a: 1\nb: 2\na: 3", 3, "a is given twice, here and in line 1; leave one out"),
        ("x: 1\n? [a]\n: 1", 2, "a key must be a word"),
        ("'': 1", 1, "a key must be a word"),
        ("a: 1\nb: &x [*x]", 2, "this alias lies within its own target"),
        ("a: !!python/object/apply:os.system [x]", 1, "the tag !!python/object/apply:os.system is not supported"),
        ("a: !!python/name:os.system", 1, "the tag !!python/name:os.system is not supported"),
        ("a: !!set {x}", 1, "the tag !!set is not supported"),
        ("a: !!binary AAAA", 1, "the tag !!binary is not supported; leave it out"),
        ("a: !mine 1", 1, "the tag !mine is not supported"),
        ("\n!!int a", 2, "'a' does not fit its tag"),
        ("!!float a", 1, "'a' does not fit its tag"),
        ("!!bool a", 1, "'a' does not fit its tag"),
        ("!!int 0xg", 1, "'0xg' does not fit its tag"),
        ("9" * 5000, 1, "does not fit its tag"),
    ],
)
def test_what_is_refused_and_where(text, line, problem):
    with pytest.raises(YamlError) as error:
        parse_yaml(text)
    assert problem in str(error.value)
    assert error.value.line == line


def test_aliases_of_aliases_cost_no_more_than_they_are_long():
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 200))]
    tree = parse_yaml("\n".join(lines))
    assert isinstance(tree, YamlMapping)
    assert len(tree.entries) == 200


TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"]), max_size=8)
"""Characters that YAML takes as they are; it knows no surrogate pairs."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT.filter(bool), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(value=JSON)
def test_json_is_yaml(value):
    assert plain(parse_yaml(json.dumps(value, ensure_ascii=False))) == value


PIECES = st.sampled_from(
    [*"ab019:-?[]{},&*!|>'\"%@`#~<=. \n\t\\\x00\x85\u2028", "a: ", "- ", "--- ", "!!int ", "!!", "\\U"]
)


@examples(500)
@given(text=st.text(max_size=50) | st.lists(PIECES, max_size=20).map("".join))
def test_any_text_gives_a_tree_or_an_error_with_a_line(text):
    try:
        plain(parse_yaml(text))
    except YamlError as error:
        raised = error
    else:
        return
    assert 1 <= raised.line <= len(text) + 1
    assert str(raised)
