"""The journal on disk: an append-only file with one JSON line per entry. A plan is written as its changes.

Every entry reaches the system before `append` returns, so it survives the death of the master. A crash of the machine
can tear the last line; readers ignore it, and the next writer removes it. While the disk is full, entries wait in
memory, and the journal says so as soon as it can.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from oobleck.control import journal
from oobleck.errors import ConfigError, PeerError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.runtime.files import MAX_WAITING_BYTES, LineFile, RunDirectory
from oobleck.wire import decode_json, encode_json

from .journal_image import remove_image

logger = logging.getLogger(__name__)

_RESERVE_BYTES = 8192
_STEP_DONE = b'{"@type":"StepDone",'
_JOB_ENDED = b'{"@type":"JobEnded"'
_LAST_BYTES = 1 << 16
_POLL_S = 0.2
_LEAST_POLL_S, _POLL_SHARE = 0.002, 0.05


class JournalWriter(LineFile):
    """Appends entries to a file, or later if the disk is full (`LineFile`); the port `Journal`, for one thread."""

    def __init__(
        self,
        path: Path,
        *,
        tell: Callable[[journal.JournalGap], None] = lambda _: None,
        max_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Open or create the journal, and remove a torn last line. Raises ConfigError.

        `tell` receives gaps; `max_bytes` limits the memory for waiting entries.
        """
        try:
            super().__init__(path, max_bytes=max_bytes)
        except OSError as error:
            raise ConfigError(f"journal {path}: {error.strerror}") from error
        self._tell = tell
        self._gap: journal.JournalGap | None = None
        self._late_before = 0
        self._last_s = 0.0
        self._plans = journal.PlanPacker()
        self._make_reserve()
        self._wake = threading.Event()
        self._closing = False
        # A thread forces entries to the disk, because a slow disk must not hold up the master's loop.
        self._syncer = threading.Thread(target=self._sync_when_woken, name="journal-sync", daemon=True)
        self._syncer.start()

    def append(self, entry: journal.JournalEntry) -> None:
        """Write an entry, now or once the disk has room. O(size)."""
        # A restarted master does not need these, so they are not forced to the disk, and are the first to be dropped.
        is_minor = isinstance(entry, journal.StepDone | journal.StepsSaved | journal.LayersArriving | journal.Notice)
        self._last_s = entry.t_s
        num_lost = self.num_lost
        self.write(encode_json(self._plans.line(entry)), is_minor=is_minor)
        # A plan is written as changes of the one before, and that may be among the lost entries.
        if self.num_lost != num_lost:
            self._plans.forget()
        if self.is_whole:
            self._end_gap()
        elif self._gap is None:
            self._begin_gap(entry.t_s)
        if not is_minor:
            self._wake.set()

    def restore(self) -> None:
        """Create a removed journal again with its content. Raises OSError."""
        super().restore()
        self._make_reserve()

    def close(self) -> None:
        """Write waiting entries, force everything to the disk, and close."""
        if self._closing:
            return
        if self.flush():
            self._end_gap()
        self._closing = True
        self._wake.set()
        self._syncer.join()
        super().close()
        with suppress(OSError):
            self._reserve.unlink()
        if self.num_missing:
            logger.error("journal %s: %d entries are missing from it", self.path, self.num_missing)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def _reserve(self) -> Path:
        return self.path.with_name(f".{self.path.name}.reserve")

    def _make_reserve(self) -> None:
        with suppress(OSError):  # best effort: without it, the gap may go unrecorded while the disk is full
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def _begin_gap(self, since_s: float) -> None:
        what = (self.problem and self.problem.strerror) or "it cannot be written"
        self._late_before = self.num_late
        self._gap = journal.JournalGap(t_s=since_s, since_s=since_s, until_s=None, problem=what)
        with suppress(OSError):
            self._reserve.unlink()
        # The reserve's space is for this entry: while it is in the file, no reader takes the journal for complete.
        self.try_write(encode_json(self._gap))
        logger.error("journal %s: %s; entries are kept in memory until there is room", self.path, what)
        self._tell(self._gap)

    def _end_gap(self) -> None:
        # The gap is over before its last entry is written: if that fails, the next entry begins another one.
        gap, self._gap = self._gap, None
        if gap is None:
            return
        self._make_reserve()
        over = replace(
            gap,
            t_s=self._last_s,
            until_s=self._last_s,
            num_late=self.num_late - self._late_before,
            num_lost=self.num_lost,
        )
        self.write(encode_json(over))
        logger.warning("journal %s: %s", self.path, over.sentence)
        self._tell(over)

    def _sync_when_woken(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            # This comes before the sync, so that an entry that is written during it leads to another one.
            self._wake.clear()
            is_last = self._closing  # read before the sync, which then covers the last entries
            try:
                self.sync()
            except OSError as error:
                logger.error("journal %s cannot be forced to the disk: %s", self.path, error.strerror)  # noqa: TRY400 - no traceback for people


def read_journal(path: Path) -> Iterator[journal.JournalEntry]:
    """Read the entries of a journal one at a time, without a torn last line.

    Raises ConfigError for an unreadable file, or for any other broken line with its number.
    """
    return (entry for _, entry in read_entries(path))


def read_entries(
    path: Path, *, start: int = 0, base: journal.PlanAdopted | None = None
) -> Iterator[tuple[int, journal.JournalEntry]]:
    """Read entries from byte `start` on, each with the end of its line; `base` is the newest plan before `start`.

    Raises ConfigError like `read_journal`.
    """
    plans = journal.PlanUnpacker(base)
    place = start
    try:
        with path.open("rb") as lines:
            lines.seek(start)
            for number, line in enumerate(lines, start=1):
                # Only the last line can be torn, because a writer removes a torn one before it appends.
                if not line.endswith(b"\n"):
                    return
                place += len(line)
                where = f"journal {path}, line {number}{f' after byte {start}' if start else ''}"
                yield place, _decode_line(line, plans, where=where)
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from error


def _decode_line(line: bytes, plans: journal.PlanUnpacker, *, where: str) -> journal.JournalEntry:
    """Decode a line. Raises ConfigError, which begins with `where`."""
    try:
        return plans.entry(decode_json(journal.JournalLine, line))
    except PeerError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_losses(path: Path) -> tuple[float, ...]:
    """Read the loss of each committed step, in order, as far as possible; 4 us per step."""
    tally = journal.LossTally()
    try:
        with path.open("rb") as lines:
            for line in lines:
                if line.startswith(_STEP_DONE) and line.endswith(b"\n"):
                    record = json.loads(line)["record"]
                    loss = record["loss"]  # strict decoding would take six times as long, for millions of steps
                    tally.add_loss(record["step"], float(loss["@float"] if isinstance(loss, dict) else loss))
    except (OSError, ValueError, TypeError, LookupError) as error:
        logger.warning("journal %s: not all losses can be read: %s", path, error)
    return tally.losses


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
    return bool(lines) and lines[-1].startswith(_JOB_ENDED)


def follow_journal(path: Path) -> Iterator[journal.JournalEntry | None]:
    """Yield entries as they are written, until the run ends; yields None while there are none.

    Raises ConfigError for an unreadable file, or a broken line with its number.
    """
    try:
        with path.open("rb") as lines:
            number, start, plans, newest_s = 0, 0, journal.PlanUnpacker(), time.monotonic()
            while True:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    lines.seek(start)  # a line torn by a full disk is cut off and written again later
                    yield None
                    # Steps may wait for the reader's answer, and it is late by a share of a step's time at most.
                    idle_s = time.monotonic() - newest_s
                    time.sleep(min(_POLL_S, max(_LEAST_POLL_S, _POLL_SHARE * idle_s)))
                    continue
                newest_s = time.monotonic()
                number, start = number + 1, start + len(line)
                entry = _decode_line(line, plans, where=f"journal {path}, line {number}")
                yield entry
                if isinstance(entry, journal.JobEnded):
                    return
    except OSError as error:
        raise ConfigError(f"journal {path}: {error.strerror}") from error


def set_aside(path: Path) -> Path | None:
    """Rename an older run's file (`journal.jsonl` to `journal.<n>.jsonl`, the next free n), if there is one."""
    if not path.exists():
        return None
    remove_image(path)
    aside = path.with_name(f"{path.stem}.{max(map(_number, aside_of(path)), default=0) + 1}{path.suffix}")
    path.rename(aside)
    return aside


def aside_of(path: Path) -> frozenset[Path]:
    """Return the older runs' files that `set_aside` has renamed."""
    others = path.parent.glob(f"{path.stem}.*{path.suffix}")
    return frozenset(other for other in others if other.name.split(".")[1].isdecimal())


def put_back(path: Path, before: frozenset[Path]) -> None:
    """Undo `set_aside` for a run that did nothing; `before` is what `aside_of` returned before it."""
    new = aside_of(path) - before
    if new:
        max(new, key=_number).replace(path)


def _number(path: Path) -> int:
    return int(path.name.split(".")[1])
