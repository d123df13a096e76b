"""Where a node has what is not of one run's directory, by one rule for Python and for a shell's commands.

A directory that all users share may hold anything under our names: nothing in it is entered, changed or removed
that is not ours.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from oobleck.errors import ConfigError

_FALLBACK = "/tmp"  # noqa: S108 - the directory in it is checked to be ours alone

TEMPORARY_DIRECTORY_SHELL = (
    f"temporary=${{TMPDIR:-{_FALLBACK}}}; case $temporary in /*) ;; *) temporary={_FALLBACK} ;; esac; "
    '[ -d "$temporary" ] && [ -w "$temporary" ] && [ -x "$temporary" ] || '
    f"temporary={_FALLBACK}"
)
"""Sets $temporary, in a POSIX shell, to what `temporary_directory` returns there."""


def temporary_directory() -> Path:
    """The directory for short-lived files: $TMPDIR where that is absolute and can be written to, else /tmp.

    `tempfile.gettempdir` knows more names and tries them out, which a shell cannot do in the same way.
    """
    named = os.environ.get("TMPDIR", "")
    usable = named.startswith("/") and os.path.isdir(named) and os.access(named, os.W_OK | os.X_OK)
    return Path(named if usable else _FALLBACK)


def private_directory(path: Path) -> None:
    """Make sure that a directory exists, is ours, and that nobody else can enter it.

    Raises ConfigError where it is somebody else's, a link, or cannot be made.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                f"{path} must be a directory that belongs to you, and not a link; it is {_in_words(found)}: "
                "remove it, or choose another place"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            _make_private(path)
    except OSError as error:
        raise ConfigError(f"directory {path}: {error.strerror}") from error


def _make_private(path: Path) -> None:
    """By a descriptor: where others may rename, there may be a link under that name by now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _in_words(found: os.stat_result) -> str:
    kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a directory"))
    kind = next((words for is_kind, words in kinds if is_kind(found.st_mode)), "a file")
    return f"{kind} of user {found.st_uid}"
