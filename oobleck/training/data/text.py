"""Reads the text to train on, document by document in a fixed order, up to a number of bytes.

A file is a document; of JSON lines each line is one, and of a Hugging Face dataset each row.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oobleck.errors import ConfigError
from oobleck.host.user_path import expand_user
from oobleck.job import DataSpec

from .columns import problem_with_columns
from .dataset_rows import load_rows, read_rows

_OTHER_PEOPLES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Directories of the standard library that are not its sources, or differ between installations."""
_JSON_LINES = (".jsonl", ".ndjson")


def read_documents(data: DataSpec) -> list[str]:
    """Return the documents to train on, in an order that depends on names alone.

    The last one is cut where `data.max_bytes` are reached. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        ConfigError: a source cannot be read, or there is no text.
    """
    documents: list[str] = []
    left = data.max_bytes
    for content in _contents(data):
        if left <= 0:
            break
        content = content[:left]
        left -= len(content)
        if content:
            documents.append(content.decode(errors="replace"))
    if not documents:
        source = data.dataset_path or ", ".join(data.paths) or "the standard library"
        raise ConfigError(f"data.paths: no text in {source}")
    return documents


def read_table(data: DataSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all rows of JSON lines, or of a dataset, each with its place for messages. Raises ConfigError."""
    if data.dataset_path is not None:
        for number, row in enumerate(load_rows(data, data.dataset_path)):
            yield f"data.dataset_path: {data.dataset_path}: row {number}", row
        return
    for name in data.paths:
        path = expand_user(name)
        if path.suffix not in _JSON_LINES:
            raise ConfigError(f"data.paths: {name} is no file of JSON lines (.jsonl), which data.format needs")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"data.paths: {name} cannot be read: {error.strerror}") from error
        for number, value in _json_lines(path, content):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}:{number}: it is no JSON object")
            yield f"{path}:{number}", value


def open_table(data: DataSpec) -> Sequence[Mapping[str, Any]]:
    """Return all rows of JSON lines, or a dataset, which reads them when they are asked for. Raises ConfigError."""
    if data.dataset_path is not None:
        dataset: Sequence[Mapping[str, Any]] = load_rows(data, data.dataset_path)
        return dataset
    return [row for _, row in read_table(data)]


def _contents(data: DataSpec) -> Iterator[bytes]:
    if data.dataset_path is not None:
        yield from read_rows(data, data.dataset_path)
        return
    for path in _files(data):
        try:
            content = _read(path, data.max_bytes)
        except OSError as error:
            raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error
        if path.suffix in _JSON_LINES:
            yield from _lines(path, content, data.text_column)
        else:
            yield content


def _read(path: Path, max_bytes: int) -> bytes:
    """As much of a file as can be used; all of JSON lines, which must not end within one."""
    if path.suffix in _JSON_LINES:
        return path.read_bytes()
    with path.open("rb") as file:
        return file.read(max_bytes)


def _json_lines(path: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error


def _lines(path: Path, content: bytes, column: str) -> Iterator[bytes]:
    for number, value in _json_lines(path, content):
        if not isinstance(value, Mapping) or not isinstance(value.get(column), str):
            raise ConfigError(f"{path}:{number}: has no text under {column!r}; name its key by data.text_column")
        problem = problem_with_columns(value, holds_list=lambda name, row=value: isinstance(row[name], list))  # type: ignore[misc]  # a default binds the row
        if problem is not None:
            raise ConfigError(f"{path}:{number}: {problem}")
        yield value[column].encode(errors="replace")


def _files(data: DataSpec) -> Iterator[Path]:
    if not data.paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from _walk(root, without=_OTHER_PEOPLES, suffix=".py")
    for name in data.paths:
        path = expand_user(name)
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"data.paths: {name} does not exist on this node; give a text file or a directory")


def _walk(root: Path, *, without: frozenset[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    """Yield the files below a directory whose names end in `suffix`, in an order that depends on names alone.

    Hidden files and directories, and directories named in `without`, are left out.
    """
    for directory, directories, files in os.walk(root):
        # In place: this is how os.walk learns what to visit next, and in which order.
        directories[:] = sorted(name for name in directories if name not in without and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(directory, name)
