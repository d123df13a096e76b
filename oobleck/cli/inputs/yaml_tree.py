"""YAML as a tree of values that remember their lines. It does not know what the values are for.

Plain words follow YAML 1.2, where PyYAML follows 1.1: `3e-4` is a number, and `no`, `on`, `1:30` and `2024-01-01` are
text. Underscores within numbers are allowed, as in Python. Only the values below are ever constructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import yaml

_TAG = "tag:yaml.org,2002:"
_MAX_NUMBER_CHARS = 100


class _Value:
    @property
    def is_nothing(self) -> bool:
        """Whether the value was left out, or is null."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlScalar(_Value):
    """Text, a number, a truth value, or nothing."""

    value: bool | int | float | str | None
    text: str
    """As written, without quotes."""
    line: int
    """Counted from 1, here and below."""

    @property
    def is_nothing(self) -> bool:
        return self.value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlList(_Value):
    items: tuple[YamlValue, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlMapping(_Value):
    entries: tuple[tuple[YamlScalar, YamlValue], ...]
    """No two keys have the same text."""
    line: int


YamlValue = YamlScalar | YamlList | YamlMapping


class YamlError(Exception):
    """A problem of a text, with its line. Callers turn it into the error that fits the blame."""

    def __init__(self, problem: str, line: int) -> None:
        super().__init__(problem)
        self.line = line


def parse_yaml(text: str) -> YamlValue:
    """Read one YAML document; an empty one is None.

    Raises YamlError for text that is not YAML, for keys that are given twice or are not plain words, and for tags other
    than those of text, numbers, truth values, lists and mappings.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return YamlScalar(value=None, text="", line=1) if node is None else _Reader().read(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"not YAML: {error.problem or error.context}", mark.line + 1 if mark else 1) from error
    except yaml.reader.ReaderError as error:
        raise YamlError(f"not YAML: {error.reason}", text.count("\n", 0, error.position) + 1) from error
    except (ValueError, OverflowError) as error:
        # An escape beyond Unicode, such as "\\UFFFFFFFF"; PyYAML does not say where.
        raise YamlError(f"not YAML: {error}", 1) from error
    except RecursionError as error:
        raise YamlError("nested too deeply", 1) from error


# Rejected: ruamel.yaml, which knows YAML 1.2 and lines too. Its values have lines only within lists and mappings, it
# turns dates into objects, and it accepts unknown tags and aliases within themselves. Refusing these would need the
# same code on top of it. `tests/test_libraries.py` holds this.
class _Loader(yaml.SafeLoader):
    """PyYAML's own parser with the words of YAML 1.2's core schema; only its `get_single_node` is used."""

    # This replaces the base class's table, which follows YAML 1.1. PyYAML looks for patterns by a plain word's first
    # character.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - the base class's own type


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?[0-9](?:_?[0-9])*|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9](?:_?[0-9])*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))


class _Reader:
    """Turns PyYAML's nodes into ours; a node that several aliases share is turned once."""

    def __init__(self) -> None:
        self._read: dict[yaml.Node, YamlValue] = {}
        self._reading: set[yaml.Node] = set()

    def read(self, node: yaml.Node) -> YamlValue:
        if node in self._reading:
            raise YamlError("this alias lies within its own target", _line(node))
        if node not in self._read:
            self._reading.add(node)
            self._read[node] = self._convert(node)
            self._reading.discard(node)
        return self._read[node]

    def _convert(self, node: yaml.Node) -> YamlValue:
        match node:
            case yaml.ScalarNode():
                return _scalar(node)
            case yaml.SequenceNode(tag="tag:yaml.org,2002:seq"):
                return YamlList(items=tuple(map(self.read, node.value)), line=_line(node))
            case yaml.MappingNode(tag="tag:yaml.org,2002:map"):
                return self._mapping(node)
        raise YamlError(f"the tag {_shown_tag(node)} is not supported; leave it out", _line(node))

    def _mapping(self, node: yaml.MappingNode) -> YamlMapping:
        entries: dict[str, tuple[YamlScalar, YamlValue]] = {}
        for key_node, value_node in node.value:
            key = self.read(key_node)
            if not isinstance(key, YamlScalar) or not key.text:
                raise YamlError("a key must be a word", _line(key_node))
            if key.text in entries:
                before = entries[key.text][0].line
                raise YamlError(f"{key.text} is given twice, here and in line {before}; leave one out", key.line)
            entries[key.text] = (key, self.read(value_node))
        return YamlMapping(entries=tuple(entries.values()), line=_line(node))


def _scalar(node: yaml.ScalarNode) -> YamlScalar:
    parse = _PARSERS.get(node.tag.removeprefix(_TAG))
    if parse is None:
        raise YamlError(f"the tag {_shown_tag(node)} is not supported; leave it out", _line(node))
    try:
        value = parse(node.value)
    except (ValueError, OverflowError):
        raise YamlError(f"{node.value[:_MAX_NUMBER_CHARS]!r} does not fit its tag", _line(node)) from None
    return YamlScalar(value=value, text=node.value, line=_line(node))


def _integer(text: str) -> int:
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError
    # Base 0 would understand 0o17 and 0x1f, but refuse 007.
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _floating(text: str) -> float:
    return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text.lower()))


_PARSERS: dict[str, Callable[[str], bool | int | float | str | None]] = {
    "str": str,
    "null": lambda _: None,
    "bool": lambda text: ("false", "true").index(text.lower()) == 1,
    "int": _integer,
    "float": _floating,
}


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _shown_tag(node: yaml.Node) -> str:
    return node.tag.replace(_TAG, "!!")
