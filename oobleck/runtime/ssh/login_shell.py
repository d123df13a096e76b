"""Tells what a node's login shell prints from what our command prints: start files greet on the same stream.

sshd hands every command to the user's login shell, which may be any, and reads its start files first. So a command
begins by printing a mark, in words that all shells understand, and what comes before the mark is not the command's.
"""

from __future__ import annotations

from typing import Final

_MARK: Final = b"oobleck-begins-here\n"
_KEPT_BYTES: Final = 4096


def marked(command: str) -> str:
    """Return a command that prints the mark first. Its own text does not contain the mark, which a shell may repeat."""
    return f"echo oobleck-'begins'-here; {command}"


class Preamble:
    """Takes the output of a marked command, and keeps the end of what came before the mark."""

    def __init__(self) -> None:
        self._before = bytearray()
        self.has_ended = False
        """Whether the mark has come: the command has begun."""

    @property
    def text(self) -> str:
        """What was printed before the command."""
        return self._before.decode(errors="replace").strip()

    def strip(self, data: bytes) -> bytes:
        """Return what of the next bytes is the command's own."""
        if self.has_ended:
            return data
        self._before += data
        at = self._before.find(_MARK)
        if at < 0:
            del self._before[:-_KEPT_BYTES]
            return b""
        self.has_ended = True
        output = bytes(self._before[at + len(_MARK) :])
        del self._before[at:]
        return output

    def as_cause(self) -> str:
        """What people are told of it where something went wrong: its last line, or nothing."""
        return f"; its login shell printed {self.text.splitlines()[-1]!r}" if self.text else ""
