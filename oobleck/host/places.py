"""Places that a user names: a path here, or a URL of one of fsspec's file systems, with the methods of a path.

universal_pathlib gives URLs a path's methods: https://universal-pathlib.readthedocs.io
"""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from oobleck.errors import ConfigError
from oobleck.job.secrets import public_url

from .user_path import expand_user

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://.+")
_ALMOST_URL = re.compile(r"(s3a?|gc?s|az|abfs|hf|file):/?[^/].*")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def is_url(named: str | Path) -> bool:
    return isinstance(named, str) and _URL.fullmatch(named) is not None


def may_be_of_hub(named: str) -> bool:
    """Return whether this names a repository of the Hugging Face hub, if there is no such path here."""
    return _HUB_NAME.fullmatch(named) is not None


def place_of(named: str | Path, key: str) -> Path:
    """Return the place of a path or URL. Raises ConfigError that names `key`, and a package that is missing here.

    A place that is no path of this machine has a path's methods, but none of its files can be mapped or renamed.
    """
    found = _URL.fullmatch(str(named)) if isinstance(named, str) else None
    if found is None:
        if isinstance(named, str) and (almost := _ALMOST_URL.fullmatch(named)):
            raise ConfigError(f"{key}: {named}: a URL of {almost[1]} begins with {almost[1]}://")
        return expand_user(named)
    scheme = found[1].lower()
    if scheme == "file":
        return Path(unquote(urlsplit(str(named)).path))
    if scheme == "memory":
        raise ConfigError(f"{key}: {named} is in the memory of one process; name a path, or a URL that all nodes reach")
    try:
        from upath import UPath

        prepare_fsspec()
        place = UPath(named, use_listings_cache=False)
        place.fs  # noqa: B018  it looks for the package
    except ImportError as error:
        packages = " ".join(("universal_pathlib", *filter(None, (_PACKAGES.get(scheme),))))
        raise ConfigError(f"{key}: {public_url(str(named))}: {error}: pip install {packages}") from error
    except ValueError as error:
        raise ConfigError(f"{key}: {public_url(str(named))} is no URL that fsspec knows: {error}") from error
    return cast("Path", place)  # it has all methods of one that are used here


def prepare_fsspec() -> None:
    """Give fsspec the event loop that it would make itself: with trio-asyncio imported, it would be one of trio's.

    No thread of fsspec would run that loop, so every request would hang.
    """
    from fsspec import asyn  # type: ignore[import-untyped]  # it has no types

    with asyn.get_lock():
        if asyn.loop[0] is None:
            loop = asyncio.SelectorEventLoop()
            thread = threading.Thread(target=loop.run_forever, name="fsspecIO", daemon=True)
            thread.start()
            asyn.loop[0], asyn.iothread[0] = loop, thread
