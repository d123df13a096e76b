"""Logs what the first ranks of a script import, so that another process imports it ahead of later ranks.

rank ── ImportLog ──> a file in memory ── LogReader ──> a warm process's modules, and so those of later ranks
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType


def make_log() -> int:
    """Make an empty log; returns its descriptor."""
    # In memory: the log holds values of the script's environment, which may be secret and must reach no disk.
    return os.memfd_create("oobleck-imports")


class ImportLog:
    """A finder that finds nothing, and logs each module that is not loaded yet."""

    def __init__(self, file: int) -> None:
        self._file = os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._identity = _identity(self._file)
        self._pid = os.getpid()
        self._environment = dict(os.environ)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Log the name, with the script's changes to its environment; returns None, so that other finders proceed."""
        # Processes that the script has forked log nothing, and nothing is written to another file that got the number
        # of the descriptor after the script closed it.
        if os.getpid() == self._pid and _identity(self._file) == self._identity:
            changes = {key: value for key, value in os.environ.items() if self._environment.get(key) != value}
            line = json.dumps({"name": name, "environment": changes}) + "\n"
            with suppress(OSError):  # the script's import continues, and later ranks import the module themselves
                os.write(self._file, line.encode())
        return None


def _identity(file: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A module that a rank has imported, and the changes that the script had made to its environment before."""

    name: str
    environment: Mapping[str, str]


class LogReader:
    """Reads a log, each time from where it stopped before."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.read_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The size of the whole log."""
        return os.fstat(self._file).st_size

    def read(self, limit_bytes: int) -> Iterator[Lookup]:
        """Read the whole lines that begin and end before `limit_bytes`."""
        data = os.pread(self._file, max(0, limit_bytes - self.read_bytes), self.read_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self.read_bytes += len(whole)
        for line in whole.splitlines():
            yield Lookup(**json.loads(line))
