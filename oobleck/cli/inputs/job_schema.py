"""The JSON schema of job files: keys, types and bounds of `JobSpec`, and the other names of its keys."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Literal, Union, get_args, get_origin, get_type_hints

from oobleck.job import JobSpec, ModelSpec
from oobleck.job.bounds import bounds_of

from .job_aliases import ALIASES, OTHER_KEYS
from .job_file import NOT_IN_FILES

_TYPES: Mapping[object, str] = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
_ANY: Mapping[str, object] = {}


def job_schema() -> dict[str, object]:
    """Return a JSON schema (draft 2020-12) that each job file meets; it knows no rule between two keys."""
    schema = _section(JobSpec)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    properties |= {key: _at(properties, path) for key, path in ALIASES.items() if key not in properties}
    properties |= dict.fromkeys(OTHER_KEYS, _ANY)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A job of Oobleck", **schema}


def _section(cls: type) -> dict[str, object]:
    bounds = bounds_of(cls)
    properties: dict[str, object] = {}
    for name, hint in get_type_hints(cls).items():
        if name in NOT_IN_FILES:
            continue
        found = _value(hint)
        if (limits := bounds.get(name)) is not None:
            found |= {"minimum": limits.least, "maximum": limits.most}
        properties[name] = found
    # Other keys of a model belong to its configuration; a section without keys is nothing.
    schema: dict[str, object] = {"type": ["object", "null"], "properties": properties}
    return schema if cls is ModelSpec else {**schema, "additionalProperties": False}


def _value(hint: object) -> dict[str, object]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is ModelSpec:
        return {"anyOf": [{"type": "string"}, _section(ModelSpec)]}
    if isinstance(hint, type) and is_dataclass(hint):
        return _section(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is Mapping:
        return {"type": ["object", "null"], "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}
    if origin is tuple:
        return {"type": ["array", "null"], "items": _value(arguments[0])}
    if origin in (Union, types.UnionType):
        parts = [_value(each) for each in arguments]
        plain = [part["type"] for part in parts if list(part) == ["type"]]
        return {"type": plain} if len(plain) == len(parts) else {"anyOf": parts}
    # YAML 1.2 reads 1e-4 as a number, and 1.1 as text, by which some editors go.
    return {"type": ["number", "string"] if hint is float else _TYPES[hint]}


def _at(properties: object, path: tuple[str, ...]) -> object:
    """Return the schema of a key by its path."""
    for word in path:
        assert isinstance(properties, dict)
        found = properties[word]
        options = found.get("anyOf", [found])
        properties = next((each["properties"] for each in options if "properties" in each), _ANY)
    return found
