"""The files that a rank's output goes to, and where it goes while they take nothing: to the agent, which shows it."""

from __future__ import annotations

import io
import os
import socket
from contextlib import suppress

from oobleck.control.protocol import OVERFLOW_HEAD

_NAMES = {1: "<stdout>", 2: "<stderr>"}
_CHUNK_BYTES = 1 << 12


class RankLog(io.FileIO):
    """One of a rank's standard streams, whose bytes never fail to be written: a full disk is no fault of the script's.

    What libraries in other languages and the processes of a script write does not come through here.
    """

    def __init__(self, number: int, path: str, overflow: socket.socket) -> None:
        """`number` becomes the descriptor of the file; `overflow` is a socket of messages."""
        self._path = path
        self._overflow = overflow
        self._is_open = False
        with suppress(OSError):
            os.dup2(null := os.open(os.devnull, os.O_WRONLY), number)
            os.close(null)
        super().__init__(number, "w", closefd=False)
        self.name = _NAMES[number]
        with suppress(OSError):
            self._open()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]  # all that is given it
        view = memoryview(data).cast("B")
        written = 0
        try:
            if not self._is_open:
                self._open()
            while written < len(view):
                written += super().write(view[written:]) or 0
        except OSError as error:
            self._hand_over(error.errno or 0, bytes(view[written:]))
        return len(view)

    def _open(self) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, self.fileno())
        os.close(file)
        self._is_open = True

    def _hand_over(self, problem: int, data: bytes) -> None:
        """Give the agent what could not be written, and why; what it has no room for is lost."""
        for start in range(0, len(data), _CHUNK_BYTES):
            with suppress(OSError):
                head = OVERFLOW_HEAD.pack(self.fileno(), problem, os.fstat(self.fileno()).st_size)
                self._overflow.send(head + data[start : start + _CHUNK_BYTES], socket.MSG_DONTWAIT)
