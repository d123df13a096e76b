"""Where a node keeps files outside a run's directory, by one rule for Python and for shell commands.

A shared directory may have anything under our names, so nothing there is entered, changed or removed unless it is ours.
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
"""Sets $temporary in a POSIX shell like `temporary_directory`."""


def temporary_directory() -> Path:
    """Return the directory for short-lived files: $TMPDIR if it is absolute and writable, else /tmp."""
    # Rejected: `tempfile.gettempdir`, which tries more names, in a way that a shell cannot follow.
    named = os.environ.get("TMPDIR", "")
    usable = named.startswith("/") and os.path.isdir(named) and os.access(named, os.W_OK | os.X_OK)
    return Path(named if usable else _FALLBACK)


def private_directory(path: Path) -> None:
    """Make sure that a directory exists, is ours, and that no other user can enter it.

    Raises ConfigError if it belongs to another user, is a link, is where all users write, or cannot be created.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a directory"))
            kind = next((words for is_kind, words in kinds if is_kind(status.st_mode)), "a file")
            raise ConfigError(
                f"{path} must be a directory that belongs to you, and not a link; it is {kind} of user "
                f"{status.st_uid}: remove it, or choose another place"
            )
        if status.st_mode & stat.S_ISVTX:  # to root belong /tmp and /dev/shm too
            raise ConfigError(f"{path} is where all users write; choose a directory of your own in it")
        if stat.S_IMODE(status.st_mode) & 0o077:
            _make_private(path)
    except OSError as error:
        raise ConfigError(f"directory {path}: {error.strerror}") from error


def _make_private(path: Path) -> None:
    # By a descriptor, because others may be able to put a link in the directory's place.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
