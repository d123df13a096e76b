"""JSON objects of files that people write: each value is read as the type asked for, or named in an error."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from difflib import get_close_matches

from .errors import ConfigError

__all__ = ["JsonTable", "parse_json", "shown"]

_SHOWN_CHARS = 200


def parse_json(text: str) -> object:
    """Read JSON. Raises ConfigError for what is none, or is nested deeper than this program follows."""
    try:
        document: object = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from None
    except RecursionError:
        raise ConfigError("not JSON that can be read: it is nested too deeply") from None
    return document


def shown(value: object) -> str:
    """A value as it may stand in an error: cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


class JsonTable:
    """A JSON object that answers with the type asked for, or raises ConfigError that names the place."""

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
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {key} is {shown(value)}; it must be a whole number")
        return value

    def number(self, key: str) -> float:
        """Return a number, which may be infinite or none at all: JSON's reader knows `Infinity` and `NaN`."""
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
    """Text that can be written anywhere. JSON can spell halves of characters, which no terminal and no file takes."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{place} is {shown(text)}; it must be whole Unicode characters")
    return text
