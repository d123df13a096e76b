"""What follows from a journal up to a place, in a file beside it: a reader that has it need not read what is before.

    journal.jsonl         | entry | entry | ... | entry | entry |
    .journal.jsonl.image    what all of these come to   ^ and only these are read

It is worth what the journal is: where it is missing, torn, damaged, of another version, or of another journal, it is
as if there were none. It is written beside its name and then renamed, and only once what it stands for is on the disk.
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

_COMPARED_BYTES = 1 << 16
"""So much of the journal, up to the image's place, has to be what it was: no other journal has the same there."""


def write_image(journal: Path, image: object, place: int) -> int:
    """Keep what the first `place` bytes of a journal come to, a dataclass; returns the image's size in bytes.

    Raises OSError.
    """
    body = encode_json(image)
    with journal.open("rb") as file:
        os.fsync(file.fileno())
        head = {"place": place, "before": _digest_before(file.fileno(), place), "digest": _digest(body)}
    path, new = _path(journal), _path(journal).with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + body)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    return len(body)


def read_image(journal: Path, expected: type[T]) -> tuple[T, int] | None:
    """Return a journal's image, and the place up to which it stands for the journal; None where there is none."""
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
    """Forget a journal's image, if it has one."""
    with suppress(OSError):
        _path(journal).unlink()


def _path(journal: Path) -> Path:
    return journal.with_name(f".{journal.name}.image")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest_before(descriptor: int, place: int) -> str:
    """A digest of what ends at a place. Raises ValueError for a file that is shorter."""
    start = max(0, place - _COMPARED_BYTES)
    data = os.pread(descriptor, place - start, start)
    if len(data) != place - start:
        raise ValueError("the journal is shorter than it was")
    return _digest(data)
