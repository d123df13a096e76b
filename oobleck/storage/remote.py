"""Files at URLs. Each operation is tried again for some seconds: a store that throttles, or whose credentials are being
renewed, answers soon. Every try reads the credentials again.
"""

from __future__ import annotations

import errno
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from oobleck.errors import CorruptCheckpoint

Answer = TypeVar("Answer")

_waits_s: ContextVar[tuple[float, ...]] = ContextVar("_waits_s", default=(0.2, 1.0, 3.0, 9.0))
_WRITE_BYTES = 8 << 20
# Errors of clients that are no OSErrors, and of which fsspec lets some through.
_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
)


class StoreError(OSError):
    """A store that refuses, however often it is asked; `filename` is the URL without its password."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def is_here(place: Path) -> bool:
    """Whether a place is a path of this machine, and no URL with a path's methods (`oobleck.host.places`)."""
    return isinstance(place, Path)


def is_directory(place: Path) -> bool:
    """Whether there is a directory, here or at a URL. Raises StoreError."""
    return place.is_dir() if is_here(place) else _try(place, lambda url: bool(url.is_dir()))


def write(path: Path, parts: Sequence[memoryview]) -> tuple[int, str]:
    """Write a file; return its size and SHA-256. Raises OSError."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    size = sum(map(len, parts))

    def once(place: Any) -> None:
        with place.open("wb") as file:
            for part in parts:
                for start in range(0, len(part), _WRITE_BYTES):
                    file.write(part[start : start + _WRITE_BYTES])
        # A store may have taken a part of it only.
        if (there := place.stat().st_size) != size:
            raise OSError(f"{place}: {there} of {size} bytes have been written")

    _try(path, once)
    return size, digest.hexdigest()


def read(path: Path) -> bytearray:
    """Raises OSError; FileNotFoundError at once."""
    return _try(path, lambda place: bytearray(place.read_bytes()))


def listed(path: Path) -> dict[str, str]:
    """Return the files at a URL, however deep, by their paths below it, each with what changes when it does.

    A file alone has the path "". Raises OSError.
    """

    def once(place: Any) -> dict[str, str]:
        found = place.fs.find(place.path, detail=True)
        root = place.path.rstrip("/")
        return {name.removeprefix(root).strip("/"): _version(info) for name, info in found.items()}

    return _try(path, once)


def _version(info: dict[str, Any]) -> str:
    return repr([info.get(key) for key in ("size", "ETag", "etag", "LastModified", "mtime", "updated")])


def fetch(path: Path, target: Path) -> None:
    """Copy a file to this machine. Raises OSError."""
    _try(path, lambda place: place.fs.get_file(place.path, str(target)))


def sizes(directory: Path) -> dict[str, int]:
    """Return the files of a directory with their sizes in bytes, in one request; none if it does not exist."""

    def once(place: Any) -> dict[str, int]:
        with suppress(FileNotFoundError):
            listed = place.fs.ls(place.path, detail=True)
            return {each["name"].rpartition("/")[2]: int(each["size"]) for each in listed if each["type"] == "file"}
        return {}

    return _try(directory, once)


def directories(directory: Path) -> list[str]:
    """Return the names of a directory's directories; none if it does not exist."""

    def once(place: Any) -> list[str]:
        with suppress(FileNotFoundError):
            listed = place.fs.ls(place.path, detail=True)
            return [each["name"].rstrip("/").rpartition("/")[2] for each in listed if each["type"] == "directory"]
        return []

    return _try(directory, once)


def remove(directory: Path, *, first: str) -> None:
    """Remove a directory with all that is in it, beginning with one file, if it is there. Raises OSError."""

    def once(place: Any) -> None:
        with suppress(FileNotFoundError):
            (place / first).unlink()
        with suppress(FileNotFoundError):
            place.fs.rm(place.path, recursive=True)

    _try(directory, once)


@contextmanager
def patience(*waits_s: float) -> Iterator[None]:
    """Within the block, ask a store that fails again after each of these waits, in seconds."""
    token = _waits_s.set(waits_s)
    try:
        yield
    finally:
        _waits_s.reset(token)


def _try(path: Path, act: Callable[[Any], Answer]) -> Answer:
    place: Any = path
    for wait_s in (*_waits_s.get(), None):
        try:
            return act(place)
        except FileNotFoundError:
            raise
        except _errors() as error:
            if wait_s is None:
                raise _failure(path, error) from error
            time.sleep(wait_s)
            # The next one has a client of its own, which reads its credentials again.
            type(place.fs).clear_instance_cache()
            place = type(place)(str(path), **place.storage_options)
    raise AssertionError("the last try returns or raises")


def _failure(path: Path, error: Exception) -> StoreError:
    login, _, _ = urlsplit(str(path)).netloc.rpartition("@")
    url, why = (text.replace(login, "***") if login else text for text in (str(path), " ".join(str(error).split())))
    return StoreError(errno.EIO, f"{type(error).__name__}: {why}", url)


def _errors() -> tuple[type[Exception], ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _FOREIGN)
    return (OSError, *(cast("type[Exception]", error) for error in found if error is not None))


def read_whole(path: Path) -> memoryview:
    """Return a file's bytes, which may be written to. Raises CorruptCheckpoint if it is missing, and StoreError."""
    try:
        return memoryview(read(path))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path}: missing") from None
