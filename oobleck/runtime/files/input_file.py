"""Files that a user names, read within limits of size and of the time that a pipe may take.

A name may belong to anything: a directory, an endless device, a pipe without a writer. Each is a clear error, at once.
"""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user

MAX_TEXT_BYTES = 4 << 20
"""The limit for what people write: jobs, hostfiles, scripts. The longest valid hostfile takes half of it."""
MAX_DATA_BYTES = 64 << 20
"""The limit for what programs write: traces, profiles, models' configurations."""

_PATIENCE_S = 10.0
_CHUNK_BYTES = 1 << 20


def read_input(path: Path, what: str, *, most_bytes: int = MAX_TEXT_BYTES, patience_s: float = _PATIENCE_S) -> str:
    """Return the text of a file that the user named as `what`, with newlines as line ends and no byte order mark.

    Blocks for `patience_s` at most, if the file is a pipe or a terminal. Raises UsageError if the file does not exist,
    and ConfigError if it cannot be read as text or exceeds `most_bytes`.
    """
    place = f"{what} {str(path)!r}" if not str(path).isprintable() else f"{what} {path}"
    try:
        content = _read(path, place, most_bytes, patience_s)
    except FileNotFoundError as error:
        raise UsageError(f"{place}: {error.strerror}") from error
    except (OSError, ValueError, RuntimeError) as error:  # the name has a null character, or an unknown user's home
        raise ConfigError(f"{place}: {getattr(error, 'strerror', None) or error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path, place: str, most_bytes: int, patience_s: float) -> bytes:
    # Without O_NONBLOCK, opening a pipe that has no writer would block.
    descriptor = os.open(expand_user(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            # A directory can be opened, and `read` would fail with a message that says less.
            raise IsADirectoryError(0, "it is a directory; name a file")
        return _read_all(descriptor, place, most_bytes, time.monotonic() + patience_s)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, place: str, most_bytes: int, until_s: float) -> bytes:
    content = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1e3):
            raise ConfigError(f"{place}: nothing more came from it in time, and it has not ended")
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            continue
        if not chunk:
            return bytes(content)
        content += chunk
        if len(content) > most_bytes:
            raise ConfigError(
                f"{place}: longer than {most_bytes >> 20} MiB, the most that is read; is it the right file?"
            )
