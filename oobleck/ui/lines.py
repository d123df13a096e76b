"""A run as plain lines of text: for log files, pipes, and readers who prefer them.

One line an event. Steps are thinned to a few lines a second, so that short runs show every step and long
ones stay readable; the first step, the last, and the first after an event are always printed.
"""

from __future__ import annotations

from oobleck.control import journal

from .formatting import count_text, duration_text, one_line, seconds_text


class LineFormatter:
    """Turns journal entries into lines. `steps_per_s` bounds the lines about steps by the journal's own time."""

    def __init__(self, *, steps_per_s: float = 2.0) -> None:
        assert steps_per_s > 0
        self._interval_s = 1.0 / steps_per_s
        self._told_s = -self._interval_s
        self._tell_next = True
        self._max_steps = 0
        self._untold: journal.StepDone | None = None

    def apply(self, entry: journal.JournalEntry) -> tuple[str, ...]:
        """The lines that an entry is worth, none for a step that is left out."""
        if isinstance(entry, journal.StepDone):
            return self._step(entry)
        if isinstance(entry, journal.RecordsDealt):
            return ()
        if isinstance(entry, journal.JobStarted):
            self._max_steps = entry.job.max_steps
        self._tell_next = True
        level = entry.level
        prefix = "" if level == "info" else f"{level}: "
        line = f"[{duration_text(entry.t_s)}] {prefix}{one_line(entry.sentence)}"
        # The step before an event shows where the run stood when it came; the last one, where it ended.
        pending, self._untold = self._untold, None
        return (self._line(pending), line) if pending and isinstance(entry, journal.JobEnded) else (line,)

    def _step(self, entry: journal.StepDone) -> tuple[str, ...]:
        is_last = entry.record.step == self._max_steps
        if not (self._tell_next or is_last or entry.t_s - self._told_s >= self._interval_s):
            self._untold = entry
            return ()
        self._tell_next = False
        self._told_s = entry.t_s
        self._untold = None
        return (self._line(entry),)

    def _line(self, entry: journal.StepDone) -> str:
        record = entry.record
        speed = f"{count_text(entry.tokens / record.duration_s)} tokens/s, " if record.duration_s > 0 else ""
        return (
            f"[{duration_text(entry.t_s)}] step {record.step}/{self._max_steps}: loss {record.loss:.4f}, "
            f"{speed}{seconds_text(record.duration_s)}"
        )
