"""A file of lines that is only appended to, and that outlives a full disk: what cannot be written now is written later.

Lines are kept in memory meanwhile, as many as `max_bytes` allow, and in their order. The file ends with a whole line
at any time. One that was removed, with its directory maybe, is made again with all that it had.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

_MAX_BYTES = 64 << 20
_RETRY_S = 1.0  # between two attempts to write what is kept
_COPY_BYTES = 1 << 20


class LineFile:
    """The file and the lines that wait for it. Writing raises nothing; `is_whole` says how it went."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file, which need not exist; a torn last line is removed. Raises OSError."""
        self.path = path
        self.num_late = 0
        """Lines that had to wait and were written then."""
        self.num_lost = 0
        """Lines that were given up, for there were too many to keep."""
        self.problem: OSError | None = None
        """Why lines are kept; None while none are."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: deque[tuple[bytes, bool]] = deque()  # (line, whether it is of minor importance)
        self._kept_bytes = 0
        self._retry_s = 0.0
        self._descriptor = _open(path)
        try:
            self._size_bytes = _whole_lines_bytes(self._descriptor)
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def size_bytes(self) -> int:
        """How long the file is, up to the end of its last whole line."""
        return self._size_bytes

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def is_whole(self) -> bool:
        """Whether all that was to be written is, but for what was lost."""
        return not self._kept

    @property
    def is_there(self) -> bool:
        """Whether the file has its name: somebody may have removed it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False

    def write(self, line: bytes, *, is_minor: bool = False) -> None:
        """Append a line with its newline, now or as soon as that is possible. Costs O(size) at most."""
        if not self._kept and self.try_write(line):
            return
        self._keep(line, is_minor=is_minor)
        if self._clock() >= self._retry_s:
            self.flush()

    def try_write(self, line: bytes) -> bool:
        """Append a line before those that wait; returns whether it is in the file."""
        try:
            _write_all(self._descriptor, line)
        except OSError as error:
            self.problem = error
            self._retry_s = self._clock() + _RETRY_S
            self._cut()
            return False
        self._size_bytes += len(line)
        return True

    def flush(self) -> bool:
        """Write what waits, as far as that is possible; returns whether nothing waits any more."""
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
        """Make the file again where it was removed, with all that it had; its directory must be there.

        Raises OSError.
        """
        if self.is_there:
            return
        descriptor = _open(self.path)
        try:
            start = 0
            os.ftruncate(descriptor, 0)
            while start < self._size_bytes:
                piece = os.pread(self._descriptor, min(_COPY_BYTES, self._size_bytes - start), start)
                if not piece:
                    break
                _write_all(descriptor, piece)
                start += len(piece)
        except OSError:
            os.close(descriptor)
            raise
        os.dup2(descriptor, self._descriptor, inheritable=False)  # others may wait for the disk with the old number
        os.close(descriptor)

    def sync(self) -> None:
        """Force what is written to the disk; may be called by another thread. Raises OSError."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _keep(self, line: bytes, *, is_minor: bool) -> None:
        if self._kept_bytes + len(line) > self._max_bytes:
            self._drop_minor()
        if self._kept_bytes + len(line) > self._max_bytes:
            self.num_lost += 1
            return
        self._kept.append((line, is_minor))
        self._kept_bytes += len(line)

    def _drop_minor(self) -> None:
        left = deque(kept for kept in self._kept if not kept[1])
        self.num_lost += len(self._kept) - len(left)
        self._kept, self._kept_bytes = left, sum(len(line) for line, _ in left)

    def _cut(self) -> None:
        """Remove what a write that failed has left of its line."""
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError as error:
            self.problem = error  # readers leave a torn line out, and the next write tries again


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _whole_lines_bytes(descriptor: int) -> int:
    """The length of a file up to the end of its last whole line."""
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
