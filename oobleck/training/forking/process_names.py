"""What `ps`, `top` and `pgrep` show of a process that was forked and did not execute its program itself. Linux."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")
_ARGUMENTS = slice(45, 47)
"""Where the arguments begin and end in memory, among what `stat` has after the name (`proc(5)`, fields 48 and 49)."""


def set_name(name: str) -> None:
    """Have the process shown by this name, of which 15 characters count."""
    with suppress(OSError):
        (_SELF / "comm").write_text(name, encoding="utf-8")


def set_command_line(words: list[str]) -> None:
    """Have the process shown with this command line, cut where the one that it was started with had no room for it."""
    with suppress(OSError, ValueError):
        fields = (_SELF / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS])
        room = end - start - 1
        if start and room > 0:
            text = " ".join(words).encode(errors="surrogateescape").replace(b"\0", b" ")[: room - 1]
            # By a last byte that is not zero the kernel knows that the text ends with its first zero.
            ctypes.memmove(start, text.ljust(room, b"\0") + b" ", room + 1)
