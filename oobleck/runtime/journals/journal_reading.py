"""Journals of runs, finished or not: found by their tag, read whole, or followed while they grow."""

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
    """The journal of a run: by its tag, its directory, or a file; the newest of all when nothing is named.

    Raises UsageError where there is none.
    """
    if run is None:
        found = sorted(base_dir.glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise UsageError(f"no run has left a journal in {base_dir}; name another --base-dir")
        return found[-1]
    named = expand_user(run)
    candidates = [RunDirectory(base_dir=base_dir, tag=run).journal] if "/" not in run else []
    candidates += [named, named / "journal.jsonl"]
    for path in candidates:
        if path.is_file():
            return path
    known = ", ".join(sorted(path.parent.name for path in base_dir.glob("*/journal.jsonl"))) or "none"
    raise UsageError(f"no journal of {run!r}; runs in {base_dir}: {known}")


def has_end(path: Path) -> bool:
    """Whether the last entry of a journal is the end of its run; False where that cannot be read. O(1)."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return False
    return bool(lines) and lines[-1].startswith(_END)


def follow_journal(path: Path) -> Iterator[JournalEntry | None]:
    """Yield entries as they are written, until the run ends; None whenever there is nothing new for a moment.

    Raises ConfigError for a file that cannot be read, or a broken line, with its number.
    """
    try:
        with path.open("rb") as lines:
            number, start, plans = 0, 0, PlanUnpacker()
            while True:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    lines.seek(start)  # a line that a full disk has torn is cut off, and written again later
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
