"""Strict JSON for the whole package, without NaN and infinity, which JSON lacks.

A `JsonTable` reads files that people write: each value has the expected type, or an error names it. Messages between
our own processes go through `oobleck.wire`, which uses this module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from .errors import ConfigError, shown


def load_json(text: str | bytes) -> object:
    """Read JSON. Raises ValueError for a text that is not JSON, repeats a key, or is nested too deeply."""
    try:
        document: object = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return document


def parse_json(text: str, *, of_others: bool = False) -> object:
    """Read a JSON file. Raises ConfigError.

    `of_others`: another program wrote the file, such as a model's configuration, and it may hold Python's NaN and
    Infinity.
    """
    try:
        return json.loads(text) if of_others else load_json(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from None
    except RecursionError:
        raise ConfigError("not JSON: it is nested too deeply") from None


def to_json(value: object, *, indent: int | None = None) -> str:
    """Write plain values as JSON, for other programs to read; a number that is none, or is infinite, becomes null."""
    separators = None if indent else (",", ":")
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def unique_keys(pairs: Iterable[tuple[object, object]]) -> dict[object, object]:
    """Build a map. Raises ValueError for a key that is given twice: which of the two would count?"""
    listed = list(pairs)  # msgpack without its C extension gives a generator
    built = dict(listed)
    if len(built) != len(listed):
        raise ValueError("a map has a key twice")
    return built


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


class JsonTable:
    """A JSON object whose methods return values of one type, or raise ConfigError that names the place."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be an object, not {type(value).__name__}")
        self.where = where
        self.items: dict[str, object] = value

    def check_keys(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Raise ConfigError for a key that is missing or unknown; an unknown one suggests the nearest known."""
        known = [*required, *optional]
        for key in self.items:
            if key not in known:
                # With this cutoff there is always a match.
                near = get_close_matches(key, known, n=1, cutoff=0.0)
                raise ConfigError(f"{self.where}: unknown key {shown(key)}; did you mean {near[0]!r}?")
        for key in required:
            if key not in self.items:
                raise ConfigError(f"{self.where}: {key} is missing")

    def text(self, key: str) -> str:
        value = self._item(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be text")
        return _whole(value, f"{self.where}: {key}")

    def flag(self, key: str) -> bool:
        """Return a truth value; one that is missing is false."""
        value = self.items.get(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be true or false")
        return value

    def integer(self, key: str) -> int:
        value = self._item(key)
        # A truth value is an `int` to Python.
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be a whole number")
        return value

    def number(self, key: str) -> float:
        """Return a number; one that is too large for a float is infinite."""
        value = self._item(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be a number")
        try:
            return float(value)
        except OverflowError:
            return math.inf

    def list(self, key: str) -> list[object]:
        value = self._item(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self._place_of(key)} must be a list, not {type(value).__name__}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list whose members are all text."""
        found: list[str] = []
        for value in self.list(key):
            if not isinstance(value, str):
                raise ConfigError(f"{self._place_of(key)} holds {shown(value)}; it must be text")
            found.append(_whole(value, self._place_of(key)))
        return tuple(found)

    def table(self, key: str) -> JsonTable:
        return JsonTable(self._item(key), self._place_of(key))

    def _item(self, key: str) -> object:
        if key not in self.items:
            raise ConfigError(f"{self.where}: {key} is missing")
        return self.items[key]

    def _place_of(self, key: str) -> str:
        return f"{self.where}: {key}" if self.where != "the file" else key


def _whole(text: str, place: str) -> str:
    """Return the text. Raises ConfigError for halves of characters."""
    # JSON can spell lone surrogates, but no file can hold them.
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{place} is {shown(text)}; it must be whole Unicode characters")
    return text
