"""The tasks that show a run: a dashboard on a terminal, or plain lines.

Both poll values that others feed, so a slow terminal delays neither. Its user can block a write as long as he likes
(Ctrl-S), so writing happens on a helper thread; this file is that adapter.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TextIO, TypeVar, cast

import trio
from rich.console import Console
from rich.live import Live

from oobleck.control import journal
from oobleck.errors import OobleckError
from oobleck.host.streams import Output

from .controls import Controls, Quit, Wish, keys_in
from .dashboard import Dashboard
from .footer import living_nodes
from .formatting import count_text, duration_text, one_line, seconds_text
from .terminal import KeyReader

T = TypeVar("T")

_REFRESH_INTERVAL_S = 0.25
_REST = 19  # seconds of rest for each second of drawing, which the master lacks with thousands of nodes
_LINES_INTERVAL_S = 0.1
_LEAVE_TIMEOUT_S = 2.0
_MAX_LINES = 10_000
_TOLD_BY_ENTRIES = (journal.Phase.MEASURING, journal.Phase.TIMING, journal.Phase.PLANNING)


def console_on(output: Output) -> Console:
    return Console(file=cast("TextIO", output))


def wants_dashboard(console: Console, *, plain: bool = False) -> bool:
    """Return whether to draw the dashboard: on a terminal that can move its cursor, unless `plain`."""
    return console.is_terminal and not console.is_dumb_terminal and not plain


Act = Callable[[Wish], Awaitable[object]]
"""Asks the run for something. Raises OobleckError if it refuses."""


async def run_dashboard(
    take: Callable[[], journal.RunSnapshot],
    *,
    output: Output,
    act: Act | None = None,
    keys: KeyReader | None = None,
    refresh_interval_s: float = _REFRESH_INTERVAL_S,
) -> bool:
    """Draw the run until it ends, the terminal is gone, the user quits, or the task is cancelled.

    The last state is then printed below the previous output. `take` returns the run as it is; `act` carries out what
    `keys` ask for. Returns whether the user quit.
    """
    screen = _Screen(take, output, None if act is None or keys is None else keys, act)
    await screen.begin()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(screen.follow_keys)
            nursery.start_soon(screen.follow_suspension)
            while not (take().exit_code is not None or output.is_lost or screen.has_quit):
                spent_s = await screen.draw()
                with trio.move_on_after(max(refresh_interval_s, spent_s * _REST)):
                    await screen.pressed.wait()
            nursery.cancel_scope.cancel()
    finally:
        # Restoring the terminal matters more than a prompt end, but a stuck terminal must not delay the end of the run.
        with trio.CancelScope(deadline=trio.current_time() + _LEAVE_TIMEOUT_S, shield=True):
            await screen.leave()
    return screen.has_quit


class _Screen:
    """The terminal's alternate screen, with the dashboard and its keys."""

    def __init__(
        self, take: Callable[[], journal.RunSnapshot], output: Output, keys: KeyReader | None, act: Act | None
    ) -> None:
        self.pressed = trio.Event()
        self.has_quit = False
        self._take = take
        self._console = console_on(output)
        self._keys = keys
        self._act = act
        self._controls = None if keys is None else Controls()
        self._busy = trio.Lock()  # the screen is drawn, left and entered by one task at a time
        self._live = self._new_live()

    def _new_live(self) -> Live:
        return Live(
            Dashboard(self._take(), controls=self._controls),
            console=self._console,
            # The alternate screen survives resizing, and restores the terminal.
            screen=True,
            auto_refresh=False,
            redirect_stdout=True,
            redirect_stderr=True,
        )

    async def begin(self) -> None:
        if self._keys is not None:
            await _in_thread(self._keys.begin)
        await _in_thread(self._live.start)

    async def draw(self) -> float:
        """Draw, and return the CPU seconds that it took."""
        self.pressed = trio.Event()
        began_s = time.thread_time()
        dashboard = Dashboard(self._take(), controls=self._controls)
        spent_s = time.thread_time() - began_s
        async with self._busy:
            return spent_s + await _in_thread(partial(_draw, self._live, dashboard))

    async def leave(self, *, tells: bool = True) -> None:
        """Leave the screen with the terminal as it was."""
        async with self._busy:
            if self._keys is not None:
                self._keys.end()
            await _in_thread(self._live.stop)
            if tells:
                last = Dashboard(self._take(), fill=False)
                await _in_thread(partial(self._console.print, last))

    async def follow_keys(self) -> None:
        """Carry out what is typed, until the user quits."""
        if self._keys is None or self._controls is None:
            return
        async for text in self._keys.read():
            for key in keys_in(text):
                snapshot = self._take()
                wanted = self._controls.press(key, living_nodes(snapshot), len(snapshot.events))
                if isinstance(wanted, Quit):
                    self.has_quit = True
                elif wanted is not None:
                    self._controls.message = await self._ask(wanted)
            self.pressed.set()

    async def _ask(self, wish: Wish) -> str:
        assert self._act is not None
        try:
            await self._act(wish)
        except OobleckError as error:
            return str(error)
        match wish.what:
            case "kill":
                return f"killed {wish.node}"
            case "drain":
                return f"{wish.node} hands its state over, and leaves"
        return "the run stops after the step in flight"

    async def follow_suspension(self) -> None:
        """Leave the screen while the user suspends this process (Ctrl-Z)."""
        with trio.open_signal_receiver(signal.SIGTSTP) as signals:
            async for _ in signals:
                await self.leave(tells=False)
                os.kill(os.getpid(), signal.SIGSTOP)  # it returns once the process is continued
                async with self._busy:
                    while self._keys is not None and not self._keys.is_in_foreground:  # noqa: ASYNC110  none tells
                        await trio.sleep(_REFRESH_INTERVAL_S)
                    self._live = self._new_live()
                    await self.begin()


def _draw(live: Live, dashboard: Dashboard) -> float:
    """Draw, and return the CPU seconds that it took; waiting for the terminal costs nothing."""
    began_s = time.thread_time()
    live.update(dashboard, refresh=True)
    return time.thread_time() - began_s


class LineFormatter:
    """Formats a run as plain lines of text, one for each event.

    Steps are thinned to `steps_per_s` lines a second of the journal's own time, so that short runs show every step and
    long ones stay readable. The first step, the last, and the first after an event always appear.
    """

    def __init__(self, *, steps_per_s: float = 2.0) -> None:
        assert steps_per_s > 0
        self._interval_s = 1.0 / steps_per_s
        self._shown_s = -self._interval_s
        self._shows_next = True
        self._max_steps = 0
        self._held_back: journal.StepDone | None = None
        self._phases = journal.StartupPhases()

    def apply(self, entry: journal.JournalEntry) -> tuple[str, ...]:
        """Return the lines for an entry, none for a step that is left out."""
        if isinstance(entry, journal.StepDone):
            self._phases.apply(entry)
            return self._step(entry)
        if isinstance(entry, journal.RecordsDealt | journal.StepsSaved):
            return ()
        if isinstance(entry, journal.JobStarted):
            self._max_steps = entry.job.max_steps
        self._shows_next = True
        prefix = "" if entry.level == "info" else f"{entry.level}: "
        text = entry.sentence
        if isinstance(entry, journal.JobEnded):
            text = text.partition("\n")[0]  # the command itself prints the rest, such as a traceback, at its end
        line = f"[{duration_text(entry.t_s)}] {prefix}{one_line(text)}"
        if (phase := self._new_phase(entry)) is not None:
            return line, f"[{duration_text(entry.t_s)}] {phase} …"
        # A run's last step shows where it ended.
        pending, self._held_back = self._held_back, None
        return (self._line(pending), line) if pending and isinstance(entry, journal.JobEnded) else (line,)

    def _new_phase(self, entry: journal.JournalEntry) -> str | None:
        """Return the words for a phase that begins with an entry, unless its own sentence has them."""
        before = self._phases.phase
        self._phases.apply(entry)
        view = self._phases.at(entry.t_s)
        return None if view is None or self._phases.phase in (before, *_TOLD_BY_ENTRIES) else view.text

    def _step(self, entry: journal.StepDone) -> tuple[str, ...]:
        is_last = entry.record.step == self._max_steps
        if not (self._shows_next or is_last or entry.t_s - self._shown_s >= self._interval_s):
            self._held_back = entry
            return ()
        self._shows_next, self._shown_s, self._held_back = False, entry.t_s, None
        return (self._line(entry),)

    def _line(self, entry: journal.StepDone) -> str:
        record = entry.record
        speed = f"{count_text(entry.tokens / record.duration_s)} tokens/s, " if record.duration_s > 0 else ""
        return (
            f"[{duration_text(entry.t_s)}] step {record.step}/{self._max_steps}: loss {record.loss:.4f}, "
            f"{speed}{seconds_text(record.duration_s)}"
        )


class LineLog:
    """Keeps up to 10,000 lines that wait for their output, and counts the older ones that it drops."""

    def __init__(self, formatter: LineFormatter | None = None) -> None:
        """`formatter` may have received the entries of a previous master, which are not written again."""
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
    """Write the lines of a log as they come, until cancelled, and then those that still wait."""
    try:
        while True:
            await _write(log, output)
            await trio.sleep(_LINES_INTERVAL_S)
    finally:
        with trio.CancelScope(deadline=trio.current_time() + _LEAVE_TIMEOUT_S, shield=True):
            await _write(log, output)


async def tell_of_lost_output(output: Output, tell: Callable[[str], None]) -> None:
    """Wait until output fails, and report why, once: a full disk may have room again later."""
    while output.failure is None:  # noqa: ASYNC110  it fails in a helper thread
        await trio.sleep(_REFRESH_INTERVAL_S)
    tell(output.failure.strerror or str(output.failure))


def say(output: Output, text: str) -> None:
    """Write a line, and wait for its reader, but only for two seconds: one that never reads must not delay a start."""
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
    # A write to a stuck terminal may never return.
    return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
