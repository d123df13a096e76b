"""Reads job files (YAML) and `--set KEY=VALUE` into a `JobSpec`.

    max_steps: 1000
    model: {type: llama, hidden_size: 512}    # other keys than `type` belong to the model's configuration
    optimizer:
      learning_rate: 3e-4

Keys and types come from the annotations of the dataclasses in `oobleck.job`. A key that is left out keeps its default.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from oobleck.errors import ConfigError, UsageError
from oobleck.job import JobSpec, ModelSpec

from .job_aliases import in_own_words
from .values import did_you_mean, nearest
from .yaml_tree import YamlError, YamlList, YamlMapping, YamlScalar, YamlValue, parse_yaml

Spec = TypeVar("Spec")

_INT_LIMIT = 2**63  # everywhere that they go, whole numbers have 64 bits
_SHOWN_CHARS = 60
NOT_IN_FILES = frozenset({"script"})
_KINDS: Mapping[object, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def default_job(num_nodes: int) -> JobSpec:
    """Return the job that is trained if none is named, with two pipelines on two nodes or more."""
    # The model is so small that the planner would make every node a pipeline; stages show more.
    return JobSpec(num_pipelines=2 if num_nodes > 1 else None)


def load_job(text: str, *, source: str, base: JobSpec | None = None, has_lines: bool = True) -> JobSpec:
    """Read a job file; a key that it leaves out keeps its value in `base`, or else its default.

    Raises ConfigError that names the key, the value and what to change. It begins with "source:line:", or with
    "source:" unless `has_lines`.
    """
    try:
        tree = in_own_words(parse_yaml(text))
        changes = _Reader(lenient=False).spec(JobSpec, tree, ())
    except YamlError as error:
        raise ConfigError(f"{source}{f':{error.line}' if has_lines else ''}: {error}") from error
    try:
        return _changed(base or JobSpec(), changes)
    except ConfigError as error:
        line = f":{_line_of(tree, _blamed(error))}" if has_lines else ""
        raise ConfigError(f"{source}{line}: {error}") from error


def apply_overrides(job: JobSpec, settings: Sequence[str]) -> JobSpec:
    """Change a job by `optimizer.learning_rate=3e-4`, `data.paths=[a.txt, b.txt]` and so on, all at once.

    The values are YAML; for the same key, the last one counts. Raises UsageError that names the setting, and what to
    change.
    """
    paths: dict[str, tuple[str, ...]] = {}
    changes: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        path = paths[setting] = tuple(word.strip() for word in key.split("."))
        if not equals or not all(path):
            raise UsageError(f"--set {setting}: not KEY=VALUE, as in optimizer.learning_rate=3e-4")
        try:
            tree = parse_yaml(value)
            for word in reversed(path):  # until it is what a file would hold
                tree = YamlMapping(entries=((YamlScalar(value=word, text=word, line=1), tree),), line=1)
            read = _Reader(lenient=True).spec(JobSpec, in_own_words(tree), ())
        except YamlError as error:
            raise UsageError(f"--set {setting}: {error}") from error
        changes = _merged(changes, read)
    try:
        return _changed(job, changes)
    except ConfigError as error:
        to_blame = [setting for setting in settings if paths[setting] == _blamed(error)] or settings
        raise UsageError(f"--set {' '.join(to_blame)}: {error}") from error


def changed_keys(before: object, after: object, prefix: str = "") -> list[str]:
    """Return the dotted keys in which two jobs differ, in the order of the job's fields."""
    changed: list[str] = []
    assert is_dataclass(before)
    for part in fields(before):
        old, new = getattr(before, part.name), getattr(after, part.name)
        if is_dataclass(old) and is_dataclass(new):
            changed += changed_keys(old, new, f"{prefix}{part.name}.")
        elif part.name == "env":
            names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
            changed += [f"{prefix}env.{name}" for name in names]
        elif old != new:
            changed.append(f"{prefix}{part.name}")
    return changed


# --- from trees to changes ---------------------------------------------------------------------------------
# Changes hold the checked and converted values of some fields; for a field that is a dataclass, they hold its changes.


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads trees into changes. Raises YamlError."""

    lenient: bool

    def spec(self, cls: type, value: YamlValue, path: tuple[str, ...]) -> dict[str, object]:
        annotations = {name: hint for name, hint in get_type_hints(cls).items() if name not in NOT_IN_FILES}
        changes: dict[str, object] = {}
        for key, item in _entries(value, path):
            if key.text not in annotations:
                raise YamlError(_unknown_key(key.text, cls, path), key.line)
            changes[key.text] = self._read(annotations[key.text], item, (*path, key.text))
        return changes

    def _read(self, annotation: object, value: YamlValue, path: tuple[str, ...]) -> object:
        if annotation is ModelSpec:
            return self._model(value, path)
        if isinstance(annotation, type) and is_dataclass(annotation):
            return self.spec(annotation, value, path)
        origin, arguments = get_origin(annotation), get_args(annotation)
        if origin is Literal:
            if not isinstance(value, YamlScalar) or value.text not in arguments:
                raise _unexpected(f"one of {', '.join(map(str, arguments))}", value, path)
            return value.text
        if origin is Mapping and arguments[1] is str:
            return {key.text: self._text(item, (*path, key.text)) for key, item in _entries(value, path)}
        if origin is Mapping:
            return {key.text: _read_any(item, (*path, key.text)) for key, item in _entries(value, path)}
        if origin is tuple:
            if not isinstance(value, YamlList) and not value.is_nothing:
                raise _unexpected("a list", value, path)
            items = value.items if isinstance(value, YamlList) else ()
            return tuple(self._read(arguments[0], item, path) for item in items)
        if origin in (Union, types.UnionType):
            return self._union(arguments, value, path)
        return self._scalar(annotation, value, path)

    def _union(self, arguments: tuple[object, ...], value: YamlValue, path: tuple[str, ...]) -> object:
        """Read a value of one type, or, if the union has them, nothing or one of some words."""
        if types.NoneType in arguments and value.is_nothing:
            return None
        words = [word for each in arguments if get_origin(each) is Literal for word in get_args(each)]
        if isinstance(value, YamlScalar) and value.text in words:
            return value.text
        others = [each for each in arguments if each is not types.NoneType and get_origin(each) is not Literal]
        if not others:
            raise _unexpected(f"one of {', '.join(words)}", value, path)
        (annotation,) = others
        if words and (not isinstance(value, YamlScalar) or type(value.value) is not annotation):
            raise _unexpected(f"{_KINDS[annotation]}, or {' or '.join(words)}", value, path)
        return self._read(annotation, value, path)

    def _model(self, value: YamlValue, path: tuple[str, ...]) -> dict[str, object]:
        """Read `llama`, or a mapping of the section's own keys and of the configuration's, which `config` may hold."""
        if isinstance(value, YamlScalar) and value.value is not None:
            return {"type": self._scalar(str, value, path)}
        annotations = get_type_hints(ModelSpec)
        changes: dict[str, object] = {}
        config: dict[str, object] = {}
        for key, item in _entries(value, path):
            if key.text in annotations and key.text != "config":
                changes[key.text] = self._read(annotations[key.text], item, (*path, key.text))
                continue
            for inner, part in _entries(item, path) if key.text == "config" else ((key, item),):
                if inner.text in config:
                    raise YamlError(f"{'.'.join((*path, inner.text))} is given twice, once within config", inner.line)
                config[inner.text] = _read_any(part, (*path, inner.text))
        return changes | ({"config": config} if config else {})

    def _text(self, value: YamlValue, path: tuple[str, ...]) -> str:
        """Read a scalar as it is written: 1 and 1.10 are texts too."""
        if not isinstance(value, YamlScalar) or value.value is None:
            raise _unexpected(_KINDS[str], value, path)
        return value.text

    def _scalar(self, annotation: object, value: YamlValue, path: tuple[str, ...]) -> object:
        kind = _KINDS[annotation]
        if not isinstance(value, YamlScalar) or value.value is None:
            raise _unexpected(kind, value, path)
        # On a command line the shell has removed the quotes, so anything may be text.
        if annotation is str and self.lenient:
            return value.text
        if annotation is float and type(value.value) is int:
            return float(value.value)
        # `isinstance` would take a truth value for a whole number.
        if type(value.value) is not annotation:
            raise _unexpected(kind, value, path)
        return _within_range(value, path)


def _entries(value: YamlValue, path: tuple[str, ...]) -> tuple[tuple[YamlScalar, YamlValue], ...]:
    """Return the entries of a mapping; none for a key without a value, as when all below it is commented out."""
    if isinstance(value, YamlMapping):
        return value.entries
    if value.is_nothing:
        return ()
    raise _unexpected("keys with values", value, path)


def _read_any(value: YamlValue, path: tuple[str, ...]) -> object:
    """Read a scalar of any type: only the model knows the types of its configuration."""
    if not isinstance(value, YamlScalar):
        raise _unexpected("text, a number, true or false", value, path)
    return _within_range(value, path)


def _within_range(value: YamlScalar, path: tuple[str, ...]) -> object:
    if type(value.value) is float and not math.isfinite(value.value):
        raise _unexpected("a finite number", value, path)
    if type(value.value) is int and not -_INT_LIMIT <= value.value < _INT_LIMIT:
        raise _unexpected("a whole number of at most 64 bits", value, path)
    return value.value


# --- from changes to specs ---------------------------------------------------------------------------------


def _changed(spec: Spec, changes: Mapping[str, object]) -> Spec:
    """Return a dataclass with changes made. Raises ConfigError for impossible ones."""
    values: dict[str, object] = {}
    for name, change in changes.items():
        current = getattr(spec, name)
        if isinstance(change, dict) and is_dataclass(type(current)):
            change = _changed(current, change)
        values[name] = change
    if isinstance(spec, ModelSpec):
        # The configuration of one type means nothing to another, and naming a type asks for its own defaults.
        kept = {} if changes.keys() & {"type", "path"} else spec.config
        own = changes.get("config", {})
        assert isinstance(own, dict)
        values["config"] = {**kept, **own}
    if isinstance(spec, JobSpec) and isinstance(own := changes.get("env"), dict):
        values["env"] = {**spec.env, **own}
    return replace(spec, **values)  # type: ignore[type-var]  # specs are dataclasses all


def _merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    merged = dict(first)
    for name, change in second.items():
        before = merged.get(name)
        merged[name] = _merged(before, change) if isinstance(before, dict) and isinstance(change, dict) else change
    return merged


# --- error messages ----------------------------------------------------------------------------------------


def _blamed(error: ConfigError) -> tuple[str, ...]:
    """Return the path of the field that an error of `oobleck.job` begins with."""
    return tuple(str(error).partition(":")[0].split("."))


def _line_of(tree: YamlValue, path: tuple[str, ...]) -> int:
    """Return the line of a key, or of the innermost mapping that would hold it."""
    line = tree.line
    for word in path:
        entries = tree.entries if isinstance(tree, YamlMapping) else ()
        found = next(((key, item) for key, item in entries if key.text == word), None)
        if found is None:
            break
        line, tree = found[0].line, found[1]
    return line


def _unknown_key(key: str, cls: type, path: tuple[str, ...]) -> str:
    place = f" in {'.'.join(path)}" if path else ""
    own = [field.name for field in fields(cls) if field.name not in NOT_IN_FILES]
    elsewhere = {known.rpartition(".")[2]: known for known in all_keys(JobSpec)}
    suggestion = elsewhere.get(key) or nearest(key, own) or elsewhere.get(nearest(key, elsewhere) or "")
    return f"unknown key {key!r}{place}; " + (f"did you mean {suggestion}?" if suggestion else did_you_mean(key, own))


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield all keys of a job and of its sections, outer ones last."""
    for name, annotation in get_type_hints(cls).items():
        if name in NOT_IN_FILES:
            continue
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from all_keys(annotation, f"{prefix}{name}.")
        yield prefix + name


def _unexpected(expectation: str, value: YamlValue, path: tuple[str, ...]) -> YamlError:
    name = f"{'.'.join(path)}: " if path else ""
    return YamlError(f"{name}expected {expectation}, got {_shown(value)}{_hint(expectation, value)}", value.line)


def _shown(value: YamlValue) -> str:
    if not isinstance(value, YamlScalar):
        return "a list" if isinstance(value, YamlList) else "keys with values"
    if value.value is None:
        return "nothing"
    text = value.text if len(value.text) <= _SHOWN_CHARS else f"{value.text[:_SHOWN_CHARS]}…"
    return repr(text) if isinstance(value.value, str) else text


def _hint(expectation: str, value: YamlValue) -> str:
    if not isinstance(value, YamlScalar) or value.value is None:
        return ""
    if expectation == _KINDS[str]:
        return "; put it in quotes"
    if expectation == "a list":
        return f"; write [{value.text[:_SHOWN_CHARS]}]"
    if expectation == _KINDS[int] and isinstance(value.value, float) and value.value.is_integer():
        return f"; write {int(value.value)}"
    return ""
