"""A run that this program has started: its events, its state, its end, and requests to it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from oobleck.control import journal
from oobleck.errors import ConfigError, ExitCode, OobleckError, PeerError, RunFailed, UsageError
from oobleck.runtime import control_client
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import follow_journal, read_journal
from oobleck.wire import from_builtins

from .display import Display, snapshot_html
from .master import MasterProcess

_POLL_S = 0.1
# After these the run has ended as a person wanted, and its newest state is on disk.
_ENDS_WELL = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)


class Run:
    """A run that `oobleck.launch` has started::

        for event in run: print(event)     # every event, until the run ends
        summary = run.wait()               # the closing summary; raises if the run failed

    It is a run like any other: `oobleck status TAG` and other commands reach it from any terminal. If the program that
    launched it ends or is killed, the run finishes its step, saves its state and ends too. In a `with` statement it
    ends with the block. An interrupt (Ctrl-C, a notebook's stop button) during `wait` or between two events finishes
    the step, saves and stops the run, and is then raised; a second one stops at once.
    """

    def __init__(self, master: MasterProcess, directory: RunDirectory) -> None:
        self._master = master
        self._directory = directory

    @property
    def tag(self) -> str:
        """The run's name."""
        return self._directory.tag

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints on this machine, unless `checkpoint.directory` names another."""
        return self._directory.path / "checkpoints"

    @property
    def is_active(self) -> bool:
        """Whether its master lives."""
        return not self._master.has_ended

    def __iter__(self) -> Iterator[Event]:
        """Yield each event as it happens, until the run ends. Each iteration begins with the run's first event.

        Raises KeyboardInterrupt after the end if there was an interrupt. Only `wait` raises the run's own failure.
        """
        with Interrupts(self._master.interrupt) as interrupts, Display(self, changes=self.is_active) as display:
            for entry in self._entries():
                if entry is not None:
                    interrupts.is_waiting = False
                    yield Event(entry)
                    interrupts.is_waiting = True
                display.update()
        interrupts.raise_late()

    def wait(self, timeout_s: float | None = None) -> journal.Summary:
        """Wait for the end and return the closing summary, as `summary=FILE` writes it.

        A run that was stopped or interrupted has one too. Raises RunFailed with the reason, and the traceback of the
        worker that failed; ConfigError or UsageError if the job is at fault; TimeoutError after `timeout_s` seconds,
        while the run continues.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with Interrupts(self._master.interrupt) as interrupts, Display(self, changes=self.is_active) as display:
            while not self._master.wait(_POLL_S):
                display.update()
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise TimeoutError(f"run {self.tag} is still active after {timeout_s:g} s")
        interrupts.raise_late()
        code = self._master.exit_code
        if code != ExitCode.DONE and not (code in _ENDS_WELL and self._has_journal):
            raise self._failure()
        return journal.summarize(read_journal(self._directory.journal))

    def status(self) -> journal.RunSnapshot:
        """Return the state of the run now, or at its end, as `oobleck status --json` prints it."""
        try:
            answer = control_client.request(self._directory.control_socket, control_client.StatusRequest())
        except control_client.NoActiveRun:  # it does not listen yet, or any more
            return self._snapshot_of_journal()
        try:
            return from_builtins(journal.RunSnapshot, answer)
        except PeerError as error:
            raise PeerError(f"run {self.tag} is of another version of Oobleck: {error}") from error

    def metrics(self) -> list[dict[str, object]]:
        """Return a row of numbers for each committed step so far, for `pandas.DataFrame` and the like: O(entries).

        The columns are the keys of metrics.jsonl: step, loss, learning_rate, tokens_per_s and so on, with one for each
        part of its downtime.
        """
        return journal.metric_rows(read_journal(self._directory.journal)) if self._has_journal else []

    def kill(self, node: str) -> None:
        """Kill a node's agent and workers at once, as if its power had failed. The run recovers from it."""
        self._ask(control_client.KillRequest(node=node))

    def drain(self, node: str) -> None:
        """Let a node finish the step, give away what only it holds, and leave the run."""
        self._ask(control_client.DrainRequest(node=node))

    def add(self, node: str) -> None:
        """Take a node into the run, by a name that it knows or by a line as in a hostfile."""
        self._ask(control_client.AddRequest(node=node))

    def stop(self, *, now: bool = False) -> None:
        """Ask the run to end after the step in flight, or at once; `wait` waits for that."""
        if not self._has_journal:  # it does not listen yet: it may still wait for nodes
            self._master.interrupt()
            return
        with suppress(control_client.NoActiveRun):
            self._ask(control_client.StopRequest(now=now))

    def allow(self, *, step: int, through: int) -> None:
        """Say that this program has heard of a step, and that those up to `through` may begin.

        Runs with `control.waits_for_script` wait for that.
        """
        with suppress(control_client.NoActiveRun, PeerError):  # it may end meanwhile
            self._ask(control_client.AllowRequest(step=step, through=through))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        """End the run after its step, and wait for that; an interrupt ends it at once."""
        self.stop()
        with Interrupts(partial(self.stop, now=True)) as interrupts:
            self._master.wait()
        interrupts.raise_late()

    def __repr__(self) -> str:
        seen = self.status()
        return f"<oobleck run {self.tag}: {seen.state}, step {seen.step} of {seen.max_steps}>"

    def _repr_html_(self) -> str:
        return snapshot_html(self.status())

    def _ask(self, asked: control_client.ControlRequest) -> Mapping[str, object]:
        """Ask the master as soon as it listens. Raises NoActiveRun once it has ended."""
        while True:
            has_ended = self._master.has_ended
            try:
                return control_client.request(self._directory.control_socket, asked)
            except control_client.NoActiveRun:
                if has_ended:
                    raise control_client.NoActiveRun(f"the run {self.tag} has ended") from None
            time.sleep(_POLL_S)

    def _entries(self) -> Iterator[journal.JournalEntry | None]:
        """Yield the journal's entries as they come, until the run ends, and None in between."""
        while not self._has_journal:
            # The journal may have come between the two questions, so the second is asked again.
            if self._master.has_ended and not self._has_journal:
                return
            yield None
            time.sleep(_POLL_S)
        was_ended = False
        for entry in follow_journal(self._directory.journal):
            yield entry
            if entry is None:
                if was_ended:
                    return
                # The master may have written its last entries since the journal was read, so it is read once more.
                was_ended = self._master.has_ended

    @property
    def _has_journal(self) -> bool:
        """Whether the journal is this run's, written since the lock was taken, and not a previous one's."""
        try:
            taken_ns = (self._directory.path / "lock").stat().st_mtime_ns
            return self._directory.journal.stat().st_mtime_ns >= taken_ns
        except OSError:
            return False

    def _snapshot_of_journal(self) -> journal.RunSnapshot:
        if not self._has_journal:
            return journal.RunSnapshot(tag=self.tag)
        view, t_s = journal.RunView(), 0.0
        for entry in read_journal(self._directory.journal):
            view.apply(entry)
            t_s = entry.t_s
        return view.at(t_s)

    def _failure(self) -> OobleckError:
        code = self._master.exit_code
        assert code is not None
        end = None
        if self._has_journal:
            end = next(
                (entry for entry in read_journal(self._directory.journal) if isinstance(entry, journal.JobEnded)), None
            )
        if end is None:
            return failure_without_journal(self._master)
        text = end.error.end.traceback if end.error is not None else ""
        if code == ExitCode.CONFIG:
            return ConfigError(f"{end.reason}\n\n{text}".strip())
        return RunFailed(end.reason, exit_code=code, traceback=text)


def failure_without_journal(master: MasterProcess) -> OobleckError:
    """Return the error of a master that has failed, by its last words."""
    code, reason = master.exit_code, master.last_error()
    assert code is not None
    if code == ExitCode.CONFIG:
        return ConfigError(reason)
    if code == ExitCode.USAGE:
        return UsageError(reason)
    if code == ExitCode.INTERRUPTED:
        reason = reason or "the run was ended before it had begun"
    if code < 0:
        reason = (
            f"the master was killed by signal {-code}; its agents train on for a while without it. {reason}".strip()
        )
    return RunFailed(reason, exit_code=code)


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of a run's journal; `str(event)` is the sentence that people read."""

    entry: journal.JournalEntry
    """`StepDone`, `NodeLost`, `RecoveryDone` and so on, from `oobleck.control.journal`."""

    @property
    def kind(self) -> str:
        """The name of the entry's class."""
        return type(self.entry).__name__

    @property
    def t_s(self) -> float:
        """Seconds since the run's start."""
        return self.entry.t_s

    @property
    def level(self) -> str:
        """info, warning or error."""
        return self.entry.level

    def __str__(self) -> str:
        return self.entry.sentence


class Interrupts:
    """Passes interrupts on to a run while the context lasts; afterwards they raise KeyboardInterrupt again.


    Nothing changes outside the main thread, or if the program has a handler of its own.
    """

    def __init__(self, pass_on: Callable[[], None]) -> None:
        self.is_waiting = True
        self.num = 0
        self._pass_on = pass_on
        self._is_ours = False

    def __enter__(self) -> Interrupts:
        self._is_ours = _is_main() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ours and _is_main() and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def raise_late(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt."""
        if self.num:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.num += 1
        self._pass_on()
        # While we wait, an interrupt raises nothing, so that the caller still sees the run finish its step. In the
        # caller's own code, between two events, it must stop that code as well.
        if not self.is_waiting:
            raise KeyboardInterrupt


def _is_main() -> bool:
    # Only the main thread may set handlers, and any thread may close an abandoned loop.
    return threading.current_thread() is threading.main_thread()
