"""The journal on disk: one JSON line an entry, only ever appended to.

Every entry reaches the system before `append` returns, so it survives the death of the master. Those that a
restarted master cannot do without are also forced to the disk, from a helper thread, because a slow disk must
not hold up the master's loop. A crash can tear the last line; a reader leaves it out, and the next writer
removes it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from oobleck.control.journal import JournalEntry, LayersArriving, Notice, StepDone
from oobleck.errors import ConfigError, PeerError
from oobleck.wire import decode_json, encode_json

__all__ = ["JournalWriter", "read_journal", "set_aside"]

logger = logging.getLogger(__name__)


class JournalWriter:
    """Appends entries to a file; the port `Journal`, for one thread.

    After an error of the disk nothing more is written: what is there stays a true beginning of the run, and
    training goes on. `failure` says why.
    """

    def __init__(self, path: Path) -> None:
        """Open the journal, which need not exist; a torn last line is removed. Raises ConfigError."""
        self.path = path
        self.failure: OSError | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._size_bytes = _whole_lines_bytes(self._descriptor)
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError as error:
            raise ConfigError(f"journal {path}: {error.strerror}") from error
        self._wake = threading.Event()
        self._closing = False
        self._syncer = threading.Thread(target=self._sync_when_woken, name="journal-sync", daemon=True)
        self._syncer.start()

    def append(self, entry: JournalEntry) -> None:
        """Write one entry; it is with the system when this returns. Costs O(size)."""
        if self.failure is not None:
            return
        line = encode_json(entry)
        try:
            _write_all(self._descriptor, line)
        except OSError as error:
            self._fail(error)
            return
        self._size_bytes += len(line)
        if not isinstance(entry, StepDone | LayersArriving | Notice):
            self._wake.set()

    def close(self) -> None:
        """Force everything to the disk and close; waits for the disk."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._syncer.join()
        os.close(self._descriptor)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _fail(self, error: OSError) -> None:
        self.failure = error
        logger.error("journal %s: %s; the run goes on without it", self.path, error.strerror)
        try:
            os.ftruncate(self._descriptor, self._size_bytes)
        except OSError:
            logger.debug("the torn line stays; readers leave it out")

    def _sync_when_woken(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._closing  # asked before the disk is: what was written until then is on it after
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                logger.error("journal %s cannot be forced to the disk: %s", self.path, error.strerror)  # noqa: TRY400 - no traceback for people


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """Read the entries of a journal, one at a time; a torn last line is left out.

    Raises ConfigError for a file that cannot be read, or a broken line anywhere else, with its number.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    yield decode_json(JournalEntry, line)
                except PeerError as error:
                    raise ConfigError(f"journal {path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from error


def set_aside(path: Path) -> Path | None:
    """Rename an older run's file (`journal.jsonl` to `journal.<n>.jsonl`, the next free n); None without one."""
    if not path.exists():
        return None
    taken = (
        int(other.name.split(".")[1])
        for other in path.parent.glob(f"{path.stem}.*{path.suffix}")
        if _is_numbered(other)
    )
    aside = path.with_name(f"{path.stem}.{max(taken, default=0) + 1}{path.suffix}")
    path.rename(aside)
    return aside


def _is_numbered(path: Path) -> bool:
    return path.name.split(".")[1].isdecimal()


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
