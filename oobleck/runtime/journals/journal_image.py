"""An image of a journal up to a place, in a file next to it, which saves a reader everything before that place.

    journal.jsonl         | entry | entry | ... | entry | entry |
    .journal.jsonl.image    the image stands for these  ^ and a reader reads only these

The journal remains the truth: an image that is missing, torn, damaged, from another version or from another journal is
ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from oobleck.errors import PeerError
from oobleck.wire import decode_json, encode_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The part of the journal up to the image's place identifies the journal, so it must not have changed.
_COMPARED_BYTES = 1 << 16


def write_image(journal: Path, image: object, place: int) -> int:
    """Write a dataclass as the image of a journal's first `place` bytes; returns its size in bytes. Raises OSError."""
    body = encode_json(image)
    with journal.open("rb") as file:
        # No image may stand for entries that a crash could still take away.
        os.fsync(file.fileno())
        head = {"place": place, "before": _digest_before(file.fileno(), place), "digest": _digest(body)}
    path, new = _path(journal), _path(journal).with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())
    # A reader sees the old image or the new one, and never a part.
    new.replace(path)
    return len(body)


def read_image(journal: Path, expected: type[T]) -> tuple[T, int] | None:
    """Return a journal's image and its place, or None."""
    try:
        head_line, _, body = _path(journal).read_bytes().partition(b"\n")
    except OSError:
        return None
    try:
        head = json.loads(head_line)
        place = int(head["place"])
        if _digest(body) != head["digest"]:
            raise ValueError("it is torn or damaged")
        with journal.open("rb") as file:
            if place < 0 or _digest_before(file.fileno(), place) != head["before"]:
                raise ValueError("it is of another journal, or the journal was cut off since")
        return decode_json(expected, body), place
    except (OSError, ValueError, TypeError, LookupError, PeerError) as error:
        logger.warning("%s is not used: %s; the whole journal is read", _path(journal), error)
        return None


def remove_image(journal: Path) -> None:
    with suppress(OSError):
        _path(journal).unlink()


def _path(journal: Path) -> Path:
    return journal.with_name(f".{journal.name}.image")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_before(descriptor: int, place: int) -> str:
    """Return a digest of the bytes before a place. Raises ValueError if the file is shorter."""
    start = max(0, place - _COMPARED_BYTES)
    data = os.pread(descriptor, place - start, start)
    if len(data) != place - start:
        raise ValueError("the journal is shorter than it was")
    return _digest(data)
