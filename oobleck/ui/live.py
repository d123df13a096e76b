"""The tasks that keep a person informed during a run: a dashboard on a terminal, or plain lines.

Both poll a machine that others feed, so a slow terminal holds up neither of them. Writing to a terminal can block
for as long as its user likes (Ctrl-S), so it happens on a helper thread; this file is that adapter.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TextIO, TypeVar, cast

import trio
from rich.console import Console
from rich.live import Live

from oobleck.control import journal
from oobleck.host.streams import Output

from .dashboard import Dashboard
from .formatting import count_text, duration_text, one_line, seconds_text

T = TypeVar("T")

_REFRESH_INTERVAL_S = 0.25
_REST = 19
"""Seconds of rest for each second of drawing: with thousands of nodes the master has better things to do."""
_LINES_INTERVAL_S = 0.1
_LEAVE_TIMEOUT_S = 2.0
_MAX_LINES = 10_000


def console_on(output: Output) -> Console:
    return Console(file=cast("TextIO", output))


def wants_dashboard(console: Console, *, plain: bool = False) -> bool:
    """Whether the dashboard can be drawn here: a terminal that can move its cursor, and nobody asked for lines."""
    return console.is_terminal and not console.is_dumb_terminal and not plain


async def run_dashboard(
    view: journal.RunView,
    *,
    output: Output,
    now_s: Callable[[], float],
    refresh_interval_s: float = _REFRESH_INTERVAL_S,
) -> None:
    """Draw the run until its journal ends, the terminal is gone, or the task is cancelled.

    It draws on the alternate screen, which survives resizing and gives the terminal back as it was; the last
    state is then printed below what was there before. `now_s` is the time that the journal's entries count in.
    """
    console = console_on(output)
    live = Live(
        Dashboard(view.at(now_s())),
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=True,
        redirect_stderr=True,
    )
    await _in_thread(live.start)
    try:
        while not (view.has_ended or output.is_lost):
            began_s = time.thread_time()
            snapshot = view.at(now_s())
            spent_s = time.thread_time() - began_s
            spent_s += await _in_thread(partial(_draw, live, Dashboard(snapshot)))
            await trio.sleep(max(refresh_interval_s, spent_s * _REST))
    finally:
        # Leaving matters more than the task's own end, but a stuck terminal must not hold up the end of the run.
        with trio.CancelScope(deadline=trio.current_time() + _LEAVE_TIMEOUT_S, shield=True):
            await _in_thread(partial(_leave, live, console, Dashboard(view.at(now_s()), fill=False)))


def _draw(live: Live, dashboard: Dashboard) -> float:
    """Draw, and return the CPU seconds that it took: time in which a terminal does not read costs nobody."""
    began_s = time.thread_time()
    live.update(dashboard, refresh=True)
    return time.thread_time() - began_s


def _leave(live: Live, console: Console, last: Dashboard) -> None:
    live.stop()
    console.print(last)


class LineFormatter:
    """A run as plain lines of text, one an event: for log files, pipes, and readers who prefer them.

    Steps are thinned to `steps_per_s` lines a second of the journal's own time, so that short runs show every step and
    long ones stay readable; the first step, the last, and the first after an event are always printed.
    """

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
        text = entry.sentence
        if isinstance(entry, journal.JobEnded):
            text = text.partition("\n")[0]  # what follows, a traceback for one, the command itself prints at its end
        line = f"[{duration_text(entry.t_s)}] {prefix}{one_line(text)}"
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


class LineLog:
    """Keeps the lines that wait to be written: at most 10,000, and then the oldest are dropped and counted."""

    def __init__(self, formatter: LineFormatter | None = None) -> None:
        """What `formatter` has heard of already, under a master before, is known and not written again."""
        self._formatter = formatter or LineFormatter()
        self._waiting: deque[str] = deque(maxlen=_MAX_LINES)
        self._num_dropped = 0

    def apply(self, entry: journal.JournalEntry) -> None:
        for line in self._formatter.apply(entry):
            self._num_dropped += len(self._waiting) == _MAX_LINES
            self._waiting.append(line)

    def take(self) -> list[str]:
        lines = list(self._waiting)
        if self._num_dropped:
            lines.insert(0, f"({self._num_dropped} lines left out: the output was too slow)")
        self._waiting.clear()
        self._num_dropped = 0
        return lines


async def run_lines(log: LineLog, *, output: Output) -> None:
    """Write the lines of a log as they come, until cancelled; what waits then is still written."""
    try:
        while True:
            await _write(log, output)
            await trio.sleep(_LINES_INTERVAL_S)
    finally:
        with trio.CancelScope(deadline=trio.current_time() + _LEAVE_TIMEOUT_S, shield=True):
            await _write(log, output)


async def tell_of_lost_output(output: Output, tell: Callable[[str], None]) -> None:
    """Wait until output fails, and say why: once, though there may be room on a disk later."""
    while output.failure is None:  # noqa: ASYNC110  it fails in a helper thread
        await trio.sleep(_REFRESH_INTERVAL_S)
    tell(output.failure.strerror or str(output.failure))


def say(output: Output, text: str) -> None:
    """Write a line; waits for its reader, but not for long: one that never reads must not hold up a start."""
    writing = threading.Thread(target=_print_plain, args=(output, f"{text}\n"), daemon=True)
    writing.start()
    writing.join(_LEAVE_TIMEOUT_S)


async def _write(log: LineLog, output: Output) -> None:
    lines = log.take()
    if lines:
        text = "\n".join(lines) + "\n"
        await _in_thread(partial(_print_plain, output, text))


def _print_plain(output: Output, text: str) -> None:
    output.write(text)
    output.flush()


async def _in_thread(function: Callable[[], T]) -> T:
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
