"""Writes files: all but those with a protocol of their own.

A failed write to a full disk does not name its file; here every OSError does. A caller either continues without the
file, with a notice, or lets the error end the command: `oobleck` shows it as a message.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make each OSError of the block name this file, unless it names one already."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that only its user may read; readers see all of it or nothing. Text is UTF-8.

    Raises OSError that names the file, and leaves nothing behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        # The directory may be shared, and a link under this name would lead the write elsewhere.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(_as_bytes(content))
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_in_place(path: Path, content: str | bytes) -> None:
    """Write a file that may be a pipe, a device or a link. Text is UTF-8. Raises OSError that names it."""
    with naming(path):
        path.write_bytes(_as_bytes(content))


def _as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode("utf-8", errors="surrogateescape")
