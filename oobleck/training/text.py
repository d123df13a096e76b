"""Reads the text to train on: files and directories in a fixed order, up to a number of bytes."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from oobleck.errors import ConfigError
from oobleck.job import DataSpec

__all__ = ["read_documents"]

_OTHER_PEOPLES = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Directories of the standard library that are not its sources, or differ between installations."""


def read_documents(data: DataSpec) -> list[str]:
    """Return the documents to train on, one a file, in an order that depends on names alone.

    The last one is cut where `data.max_bytes` are reached. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        ConfigError: a path cannot be read, or there is no text.
    """
    documents: list[str] = []
    left = data.max_bytes
    for path in _files(data):
        if left <= 0:
            break
        try:
            content = path.read_bytes()[:left]
        except OSError as error:
            raise ConfigError(f"data.paths: {path} cannot be read: {error.strerror}") from error
        left -= len(content)
        if content:
            documents.append(content.decode(errors="replace"))
    if not documents:
        raise ConfigError(f"data.paths: no text in {', '.join(data.paths) or 'the standard library'}")
    return documents


def _files(data: DataSpec) -> Iterator[Path]:
    if not data.paths:
        root = Path(sysconfig.get_paths()["stdlib"])
        yield from _walk(root, without=_OTHER_PEOPLES, suffix=".py")
    for name in data.paths:
        path = Path(name).expanduser()
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
        # In place: this is how os.walk is told what to visit next, and in which order.
        directories[:] = sorted(name for name in directories if name not in without and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(suffix) and not name.startswith("."):
                yield Path(directory, name)
