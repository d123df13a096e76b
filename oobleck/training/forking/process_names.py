"""The names that `ps`, `top` and `pgrep` show for a process that was forked without executing a program. Linux only."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")
# The fields of `stat`, after the name, with the begin and end of the arguments (`proc(5)`, fields 48 and 49).
_ARGUMENTS = slice(45, 47)


def set_name(name: str) -> None:
    """Set the process's name, of which 15 characters count."""
    with suppress(OSError):
        (_SELF / "comm").write_text(name, encoding="utf-8")


def set_command_line(words: list[str]) -> None:
    """Set the process's command line, truncated to the length of its original one."""
    with suppress(OSError, ValueError):
        fields = (_SELF / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = (int(field) for field in fields[_ARGUMENTS])
        room = end - start - 1
        if start and room > 0:
            text = " ".join(words).encode(errors="surrogateescape").replace(b"\0", b" ")[: room - 1]
            # If the last byte is not zero, the kernel ends the text at its first zero.
            ctypes.memmove(start, text.ljust(room, b"\0") + b" ", room + 1)
