"""Models and files that a job names by a URL, or by a name of the hub, as files of this node.

Each node fetches what it needs, once: `ORG/NAME` into the hub's own cache, URLs into ~/.cache/oobleck.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from oobleck.errors import ConfigError
from oobleck.host.places import is_url, may_be_of_hub, place_of
from oobleck.host.user_path import expand_user
from oobleck.job.secrets import public_url
from oobleck.storage import remote

_OF_MODELS = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def model_directory(named: str, key: str) -> Path:
    """Return the directory of a model or a tokenizer: as named, of the hub, or of a URL.

    Raises ConfigError that names `key`, and the places where it is not.
    """
    if is_url(named):
        return file_of(named, key)
    path = expand_user(named)
    if path.exists() or not may_be_of_hub(named):
        return path
    return _of_hub(named, key)


def file_of(named: str, key: str) -> Path:
    """Return a file or a directory of files, fetched if it is at a URL and has changed there. Raises ConfigError."""
    place = place_of(named, key)
    if remote.is_here(place):
        return place
    shown = public_url(named)
    try:
        files = remote.listed(place)
        if not files:
            raise ConfigError(f"{key}: there is nothing at {shown}")
        # What has changed there has another size, time or tag, and so another directory here.
        digest = hashlib.sha256(repr((shown, sorted(files.items()))).encode()).hexdigest()[:16]
        target = expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "oobleck" / digest
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_file = set(files) == {""}
        for name in files:
            own = target / (name or place.name)
            if not own.is_file():
                own.parent.mkdir(parents=True, exist_ok=True)
                part = own.with_name(f".{own.name}.{os.getpid()}")
                remote.fetch(place / name if name else place, part)
                part.rename(own)  # several workers of a machine may fetch at the same time
    except OSError as error:
        raise ConfigError(f"{key}: {shown} cannot be read: {error}") from error
    return target / place.name if is_file else target


def _of_hub(named: str, key: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # Without a question to the hub if the cache has it: workers start in recoveries too.
        return Path(snapshot_download(named, local_files_only=True, allow_patterns=list(_OF_MODELS)))
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        return Path(snapshot_download(named, allow_patterns=list(_OF_MODELS)))
    # Clients of several libraries, each with errors of its own.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{key}: {named} is no directory on this node, is not in the hub's cache ({constants.HF_HUB_CACHE}), and "
            f"cannot be had from {constants.ENDPOINT}: {type(error).__name__}: {reason[:200]}; where nodes have no "
            f"network, run `hf download {named}` elsewhere and copy the cache, or name a directory"
        ) from error
