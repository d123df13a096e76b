"""Reads the text of Hugging Face datasets: from the hub, from files here, or from what `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oobleck.errors import ConfigError
from oobleck.host.user_path import expand_user
from oobleck.job import DataSpec

from .columns import problem_with_columns

_ROWS_AT_ONCE = 1000
_TEXT_TYPES = ("string", "large_string", "string_view")
_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` writes, for one dataset and for several splits."""
_LOCAL_BEGINNINGS = ("/", "~", ".")


def read_rows(data: DataSpec, path: str) -> Iterator[bytes]:
    """Yield the text of a dataset's rows, in their order; rows without text are left out.

    Raises ConfigError where the package, the dataset, its split or its column of text is not there.
    """
    rows = load_rows(data, path)
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
        for text in batch[column]:
            if text:
                yield text.encode(errors="replace")


def load_rows(data: DataSpec, path: str) -> Any:
    """Return a dataset. Raises ConfigError as `read_rows` does."""
    datasets = _package()
    directory = expand_user(path)
    if path.startswith(_LOCAL_BEGINNINGS) and not directory.exists():
        raise ConfigError(
            f"data.dataset_path: {path} does not exist on this node; give a directory, or a name of the hub"
        )
    try:
        if any((directory / name).exists() for name in _SAVED):
            return _saved(datasets.load_from_disk(str(directory)), data.dataset_split, path)
        where = str(directory) if directory.exists() else path
        return datasets.load_dataset(where, data.dataset_name, split=data.dataset_split)
    except ConfigError:
        raise
    # What it raises is the affair of many loaders.
    except Exception as error:
        raise ConfigError(f"data.dataset_path: {path} cannot be loaded: {_said(error)}") from error


def _package() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "data.dataset_path: Hugging Face datasets are not installed here: pip install 'oobleck[datasets]'"
        ) from error
    datasets.disable_progress_bars()  # nobody watches; they would fill the agent's log
    return datasets


def _saved(loaded: Any, split: str, path: str) -> Any:
    """The split that is asked for, of what `save_to_disk` wrote."""
    if hasattr(loaded, "keys"):
        if split in loaded:
            return loaded[split]
        splits = ", ".join(loaded)
        raise ConfigError(f"data.dataset_split: {path} has no split {split!r}; it has {splits}, each as a whole")
    if split not in ("train", str(loaded.split)):
        raise ConfigError(f"data.dataset_split: {path} is one dataset without splits; leave {split!r} out")
    return loaded


def _said(error: BaseException) -> str:
    """An exception in words, with the one behind it, which often says more."""
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return words if error.__cause__ is None else f"{words} ({_said(error.__cause__)})"
