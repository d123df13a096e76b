"""Finds journals of runs, and follows them while they grow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from oobleck.control.journal import JobEnded, JournalEntry, PlanUnpacker
from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.runtime.files import RunDirectory

from .journal_file import decode_line

_POLL_S = 0.2
_END = f'{{"@type":"{JobEnded.__name__}"'.encode()
_LAST_BYTES = 1 << 16


def find_journal(base_dir: Path, run: str | None) -> Path:
    """Return the journal of a run, named by its tag, directory or file; None names the newest. Raises UsageError."""
    journals = list(base_dir.glob("*/journal.jsonl"))
    if run is None:
        if not journals:
            raise UsageError(f"no run has left a journal in {base_dir}; name another --base-dir")
        return max(journals, key=lambda path: path.stat().st_mtime)
    named = expand_user(run)
    candidates = [RunDirectory(base_dir=base_dir, tag=run).journal] if "/" not in run else []
    candidates += [named, named / "journal.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    known = ", ".join(sorted(path.parent.name for path in journals)) or "none"
    raise UsageError(f"no journal of {run!r}; runs in {base_dir}: {known}")


def has_end(path: Path) -> bool:
    """Whether a journal's last entry is the end of its run; False if it cannot be read. O(1)."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return False
    return bool(lines) and lines[-1].startswith(_END)


def follow_journal(path: Path) -> Iterator[JournalEntry | None]:
    """Yield entries as they are written, until the run ends; yields None while there are none.

    Raises ConfigError for an unreadable file, or a broken line with its number.
    """
    try:
        with path.open("rb") as lines:
            number, start, plans = 0, 0, PlanUnpacker()
            while True:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    lines.seek(start)  # a line torn by a full disk is cut off and written again later
                    yield None
                    time.sleep(_POLL_S)
                    continue
                number, start = number + 1, start + len(line)
                entry = decode_line(line, plans, where=f"journal {path}, line {number}")
                yield entry
                if isinstance(entry, JobEnded):
                    return
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from error
