"""Reads the text to train on, document by document in a fixed order, up to a number of bytes.

A document is a file, a line of a file of JSON lines, or a row of a Hugging Face dataset, which may come from the hub,
from local files, or from `save_to_disk`.
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
from oobleck.training.fetched import file_of

from .columns import problem_with_columns

# Directories of the standard library that are not its sources, or differ between installations.
_OTHER_PEOPLES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
JSON_LINES = (".jsonl", ".ndjson")
_ROWS_AT_ONCE = 1000
_TEXT_TYPES = ("string", "large_string", "string_view")
_SAVED = ("state.json", "dataset_dict.json")  # the files of `save_to_disk`, for a dataset and for several splits
_LOCAL_BEGINNINGS = ("/", "~", ".")


def read_documents(data: DataSpec) -> list[str]:
    """Return the documents to train on, in an order that depends on names alone.

    The last one is cut at `data.max_bytes`. Bytes that are not UTF-8 become U+FFFD. Raises ConfigError if a source
    cannot be read, or there is no text.
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
    """Yield all rows of JSON lines or of a dataset, each with its place for messages. Raises ConfigError."""
    if data.dataset_path is not None:
        for number, row in enumerate(_load_rows(data, data.dataset_path)):
            yield f"data.dataset_path: {data.dataset_path}: row {number}", row
        return
    for name in data.paths:
        path = file_of(name, "data.paths")
        if path.suffix not in JSON_LINES:
            raise ConfigError(f"data.paths: {name} is no file of JSON lines (.jsonl), which data.format needs")
        for number, value in _json_lines(path):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}:{number}: it is no JSON object")
            yield f"{path}:{number}", value


def open_table(data: DataSpec) -> Sequence[Mapping[str, Any]]:
    """Return all rows of JSON lines, or a dataset, which reads its rows on demand. Raises ConfigError."""
    if data.dataset_path is not None:
        dataset: Sequence[Mapping[str, Any]] = _load_rows(data, data.dataset_path)
        return dataset
    return [row for _, row in read_table(data)]


# --- files -------------------------------------------------------------------------------------------------------


def _contents(data: DataSpec) -> Iterator[bytes]:
    if data.dataset_path is not None:
        yield from _texts_of_rows(data, data.dataset_path)
        return
    for path in _files(data):
        if path.suffix in JSON_LINES:
            yield from _texts_of_lines(path, data.text_column)
        else:
            yield _read(path, data.max_bytes)


def _read(path: Path, max_bytes: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error


def _texts_of_lines(path: Path, column: str) -> Iterator[bytes]:
    for number, value in _json_lines(path):
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
        path = file_of(name, "data.paths")
        if path.is_dir():
            yield from _walk(path)
        elif path.is_file():
            yield path
        else:
            where = "" if path.is_absolute() else f", where it would be {path.absolute()}"
            raise ConfigError(
                f"data.paths: {name} does not exist on this node{where}; name a file or a directory that every "
                "node has, or have --workdir copy it there"
            )


def _walk(root: Path, *, without: frozenset[str] = frozenset(), suffix: str = "") -> Iterator[Path]:
    """Yield the files below a directory, without hidden ones, in an order that depends on names alone."""
    for directory, directories, files in os.walk(root):
        # In place, since os.walk reads from this list what to visit next, and in which order.
        directories[:] = sorted(name for name in directories if name not in without and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(directory, name)


# --- Hugging Face datasets ---------------------------------------------------------------------------------------


def _texts_of_rows(data: DataSpec, path: str) -> Iterator[bytes]:
    rows = _load_rows(data, path)
    column = data.text_column
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise ConfigError(f"data.text_column: {path} has no column {column!r}; it has {columns}")
    kind = getattr(rows.features[column], "dtype", "several values a row")
    if kind not in _TEXT_TYPES:
        raise ConfigError(f"data.text_column: {column!r} of {path} holds {kind}; name a column that holds text")
    others = (name for name in rows.column_names if name != column)
    problem = problem_with_columns(others, holds_list=lambda name: not hasattr(rows.features[name], "dtype"))
    if problem is not None:
        raise ConfigError(f"data.dataset_path: {path}: {problem}")
    for batch in rows.select_columns([column]).iter(batch_size=_ROWS_AT_ONCE):
        yield from (text.encode(errors="replace") for text in batch[column] if text)


def _load_rows(data: DataSpec, path: str) -> Any:
    """Return a dataset. Raises ConfigError if the package, the dataset or its split is missing."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data.dataset_path: Hugging Face datasets are not installed here: pip install datasets"
        ) from error
    datasets.disable_progress_bars()  # they would only fill the agent's log
    directory = expand_user(path)
    if path.startswith(_LOCAL_BEGINNINGS) and not directory.exists():
        raise ConfigError(
            f"data.dataset_path: {path} does not exist on this node; give a directory, or a name of the hub"
        )
    try:
        if any((directory / name).exists() for name in _SAVED):
            return _split_of(datasets.load_from_disk(str(directory)), data.dataset_split, path)
        where = str(directory) if directory.exists() else path
        return datasets.load_dataset(where, data.dataset_name, split=data.dataset_split)
    except ConfigError:
        raise
    # Many kinds of loaders raise many kinds of errors.
    except Exception as error:
        raise ConfigError(f"data.dataset_path: {path} cannot be loaded: {_described(error)}") from error


def _split_of(saved: Any, split: str, path: str) -> Any:
    if hasattr(saved, "keys"):
        if split in saved:
            return saved[split]
        splits = ", ".join(saved)
        raise ConfigError(f"data.dataset_split: {path} has no split {split!r}; it has {splits}, each as a whole")
    if split not in ("train", str(saved.split)):
        raise ConfigError(f"data.dataset_split: {path} is one dataset without splits; leave {split!r} out")
    return saved


def _described(error: BaseException) -> str:
    """Describe an exception, and its cause, which is often more precise."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if error.__cause__ is None else f"{text} ({_described(error.__cause__)})"
