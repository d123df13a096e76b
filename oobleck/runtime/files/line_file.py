"""An append-only file of lines that survives a full disk: lines that cannot be written now are written later.

They wait in memory in their order, up to `max_bytes`. If the file is removed, perhaps with its directory, `restore`
creates it again with its content.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MAX_WAITING_BYTES = 64 << 20
_RETRY_S = 1.0  # between attempts to write the kept lines
_COPY_BYTES = 1 << 20


class LineFile:
    """The file and the lines that wait for it. Writing raises nothing; `is_whole` tells whether it succeeded."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_WAITING_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Open or create the file, and remove a torn last line. Raises OSError."""
        self.path = path
        self.num_late = 0
        """Lines that had to wait before they were written."""
        self.num_lost = 0
        """Lines that were dropped because too many waited."""
        self.problem: OSError | None = None
        """Why lines wait, or None."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: deque[tuple[bytes, bool]] = deque()  # (line, is minor)
        self._kept_bytes = 0
        self._retry_s = 0.0
        self._is_torn = False  # a part of a line is at the end
        self._descriptor = _open(path)
        try:
            self.size_bytes = _whole_lines_bytes(self._descriptor)
            """The length of the file up to the end of its last whole line."""
            os.ftruncate(self._descriptor, self.size_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def num_missing(self) -> int:
        """Lines that are not in the file, because they wait or were dropped."""
        return len(self._kept) + self.num_lost

    @property
    def is_whole(self) -> bool:
        return not self._kept

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name; someone may have removed it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def write(self, line: bytes, *, is_minor: bool = False) -> None:
        """Append a line with its newline, now or as soon as possible; drops minor lines first. Costs O(size)."""
        # A line never passes those that wait, so the file keeps their order.
        if not self._kept and self.try_write(line):
            return
        if self._kept_bytes + len(line) > self._max_bytes:
            left = deque(kept for kept in self._kept if not kept[1])
            self.num_lost += len(self._kept) - len(left)
            self._kept, self._kept_bytes = left, sum(len(line) for line, _ in left)
        if self._kept_bytes + len(line) > self._max_bytes:
            self.num_lost += 1
        else:
            self._kept.append((line, is_minor))
            self._kept_bytes += len(line)
        if self._clock() >= self._retry_s:
            self.flush()

    def try_write(self, line: bytes) -> bool:
        """Append a line ahead of those that wait; returns whether that succeeded."""
        try:
            if self._is_torn:
                self._cut()
            _write_all(self._descriptor, line)
        except OSError as error:
            self.problem = error
            self._retry_s = self._clock() + _RETRY_S
            # Nothing may follow a part of a line, which readers ignore where it is the last.
            self._is_torn = True
            with suppress(OSError):
                self._cut()
            return False
        self.size_bytes += len(line)
        return True

    def _cut(self) -> None:
        """Leave the file with whole lines only. Raises OSError."""
        os.ftruncate(self._descriptor, self.size_bytes)
        self._is_torn = False

    def flush(self) -> bool:
        """Write waiting lines as far as possible; returns whether none are left."""
        while self._kept:
            line, _ = self._kept[0]
            if not self.try_write(line):
                return False
            self._kept.popleft()
            self.num_late += 1
            self._kept_bytes -= len(line)
        self.problem = None
        return True

    def restore(self) -> None:
        """Create a removed file again with its content; its directory must exist. Raises OSError."""
        if self.is_there:
            return
        descriptor = _open(self.path)
        try:
            start = 0
            os.ftruncate(descriptor, 0)
            # What follows the last whole line is left behind.
            while start < self.size_bytes:
                piece = os.pread(self._descriptor, min(_COPY_BYTES, self.size_bytes - start), start)
                if not piece:
                    break
                _write_all(descriptor, piece)
                start += len(piece)
        except OSError:
            os.close(descriptor)
            raise
        # A thread may be syncing the old number, so the new file takes it over.
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)

    def sync(self) -> None:
        """Force written lines to the disk; any thread may call it. Raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _whole_lines_bytes(descriptor: int) -> int:
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
