"""A job's script in two processes next to the master: one describes the job, the other runs its callbacks."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio

from oobleck.control.journal import JournalEntry
from oobleck.errors import ConfigError, ResourceLost, UnbuiltModel, UsageError, UserError
from oobleck.host.process_group import signal_group
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.files import read_input
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json

_log = logging.getLogger(__name__)

_HOST = module_command("oobleck.training.process.script_host")
_TRIAL_S = 120.0  # nodes try what takes longer
_PATIENT_S = 20.0
_POLL_S = 1.0
_ENDS_WITHIN_S = 5.0  # for a script that has returned its job
_MAX_ENTRIES = 10_000  # callbacks that are further behind miss entries
_CALLBACKS_END_WITHIN_S = 30.0
_LAST_WORDS_S = 1.0
_FAILED = b"failed "


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedScript:
    """A script, and the settings that it returned."""

    spec: ScriptSpec
    settings: str
    """JSON with the keys of a job file."""

    @classmethod
    def of(cls, spec: ScriptSpec, answer: Any) -> DescribedScript:
        return cls(spec=replace(spec, provides=tuple(answer["provides"])), settings=json.dumps(answer["settings"]))


def read_script(path: Path, arguments: tuple[str, ...]) -> ScriptSpec:
    """Read a script without running it. Raises UserError."""
    source = read_input(path, "script")
    return ScriptSpec(name=path.name, source=source, arguments=arguments, directory=str(path.parent.absolute()))


def describe_script(path: Path, arguments: tuple[str, ...]) -> DescribedScript:
    """Run a script until it returns its job. Takes as long as, and raises like, `ScriptProcess`."""
    with closing(ScriptProcess(path, arguments)) as process:
        return process.described


class ScriptProcess:
    """A script that has returned its job, which the same process can then try out."""

    def __init__(self, path: Path, arguments: tuple[str, ...]) -> None:
        """Run it until it returns its job; takes as long as the script does, which is said after a while.

        Its output goes to stderr. Raises UsageError for wrong arguments, ConfigError if the script fails.
        """
        spec = read_script(path, arguments)
        self._path = path
        self._process = subprocess.Popen(
            [*_HOST, "describe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=as_no_rank(),
            start_new_session=True,  # a process group that can be killed as a whole
        )
        try:
            answer = self._ask(encode_json(spec))
            if answer is None:
                raise ConfigError(f"script {path} ended by itself, with the exit code {self._process.wait()}")
        except BaseException:
            signal_group(self._process.pid)
            self.close()
            raise
        self.described = DescribedScript.of(spec, answer)

    def try_out(self, job: JobSpec) -> str:
        """Try the model, the loss and the optimizer of a job; returns a note about them for people.

        Takes as long as building the model without memory. Raises ConfigError if the job cannot be trained,
        UnbuiltModel or ResourceLost if that is unknown.
        """
        try:
            answer = self._ask(encode_json(job), limit_s=_TRIAL_S)
        except KeyboardInterrupt:
            signal_group(self._process.pid)  # a terminal's Ctrl-C reaches only this process
            raise
        if answer is None:
            raise ResourceLost(f"script {self._path} ended, with the exit code {self._process.wait()}, as it was tried")
        note: str = answer["note"]
        return note

    def close(self) -> None:
        """Let the process end, or kill it and what it has started after some seconds."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            with suppress(BrokenPipeError):
                stdin.close()  # at the end of its input, the script ends
            with suppress(subprocess.TimeoutExpired):
                # The end of its output tells nothing: processes that it has forked hold that pipe as well.
                self._process.wait(_ENDS_WITHIN_S)
        finally:
            if self._process.returncode is None:
                signal_group(self._process.pid)
                self._process.wait()
            stdout.close()

    def _ask(self, line: bytes, *, limit_s: float = math.inf) -> Any:
        """Send a line and return the answer; None if the process ends without one. Raises ResourceLost at the limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # its exit status tells more
            self._process.stdin.write(line)
            self._process.stdin.flush()
        since_s, is_told, received = time.monotonic(), False, b""
        while not received.endswith(b"\n"):
            # A process that the script has forked may hold the pipe open, so its end shows here first.
            has_ended = self._process.poll() is not None
            # `readline` has no time limit, so this collects a line by itself.
            ready, _, _ = select.select([self._process.stdout], [], [], _POLL_S)
            if not ready:
                if has_ended:
                    return None
                waited_s = time.monotonic() - since_s
                if waited_s >= limit_s:
                    raise ResourceLost(f"script {self._path} took more than {limit_s:g} s to be tried")
                if waited_s >= _PATIENT_S and not is_told:
                    _log.warning("script %s has taken %g s so far; waiting for it", self._path, _PATIENT_S)
                    is_told = True
                continue
            if not (piece := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            received += piece
        answer = json.loads(received)
        if "problem" in answer:
            raise problem_of(answer)
        return answer


def problem_of(answer: Any) -> UserError:
    kind = UsageError if answer["is_usage"] else UnbuiltModel if answer.get("is_unbuilt") else ConfigError
    return kind(answer["problem"])


class EntryFeed:
    """Passes entries of the journal to a process, which may be slow, or gone."""

    def __init__(self, report: Callable[[str], None] = _log.warning) -> None:
        self._send, self._entries = trio.open_memory_channel[JournalEntry](_MAX_ENTRIES)
        self._report = report
        self._is_behind = False

    def tell(self, entry: JournalEntry) -> None:
        """Pass an entry on, without waiting."""
        try:
            self._send.send_nowait(entry)
            self._is_behind = False
        except trio.WouldBlock:
            if not self._is_behind:
                # This comes before the report, which may itself become an entry and lead here again.
                self._is_behind = True
                self._report(f"callbacks are too slow: {type(entry).__name__} and others are not passed on to them")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the process is gone, which was reported


class CallbackProcess(EntryFeed):
    """The process that runs a script's callbacks; its failures never affect the run."""

    def __init__(
        self, job: JobSpec, *, log: Path, on_stop: Callable[[], None], report: Callable[[str], None] = _log.warning
    ) -> None:
        """`on_stop` is called when a callback asks training to stop, `report` with texts for people.

        The script's output goes to `log`.
        """
        super().__init__(report)
        self._job = job
        self._log = log
        self._on_stop = on_stop
        self._scope = trio.CancelScope()
        self._closed = trio.Event()

    async def finish(self) -> None:
        """Let the callbacks receive the waiting entries and end; kill them after 30 s."""
        self._send.close()
        with trio.move_on_after(_CALLBACKS_END_WITHIN_S):
            await self._closed.wait()
        self._scope.cancel()
        # `run` still has to reap the process after the cancellation.
        await self._closed.wait()

    async def run(self) -> None:
        """Feed the process until `finish`."""
        try:
            with self._scope, self._log.open("ab") as output:
                process = await trio.lowlevel.open_process(
                    [*_HOST, "callbacks"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    # Without buffers, what the script prints is in the log when it happens, and survives a kill.
                    env={
                        # Not beside the run's own: TensorBoard takes a directory for the file of one writer.
                        "TENSORBOARD_LOGGING_DIR": str(self._log.with_name("tensorboard") / "report_to"),
                        **as_no_rank(),
                        "PYTHONUNBUFFERED": "1",
                    },
                    start_new_session=True,  # the terminal's end and Ctrl-C must reach only the master
                )
                await self._converse(process)
        except OSError as error:
            self._report(f"the script's callbacks cannot run: {error}")
        finally:
            self._entries.close()
            self._closed.set()

    async def _converse(self, process: trio.Process) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._listen, process)
                await self._feed(process)
                # What it has said is in its pipe by now, which a process that it has forked may hold.
                nursery.cancel_scope.deadline = trio.current_time() + _LAST_WORDS_S
        finally:
            # What a script has started may go on where the script itself has ended.
            if process.returncode is None:
                signal_group(process.pid)
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _feed(self, process: trio.Process) -> None:
        assert process.stdin is not None
        try:
            await process.stdin.send_all(encode_json(self._job))
            async for entry in self._entries:
                await process.stdin.send_all(encode_json(entry))
            await process.stdin.aclose()
        except trio.BrokenResourceError:
            self._report(f"the script's callbacks have ended; see {self._log}")
        await process.wait()

    async def _listen(self, process: trio.Process) -> None:
        assert process.stdout is not None
        rest = b""
        async for data in process.stdout:
            *lines, rest = (rest + bytes(data)).split(b"\n")
            for line in lines:
                if line == b"stop":
                    self._on_stop()
                elif line.startswith(_FAILED):
                    self._report(f"{json.loads(line.removeprefix(_FAILED))}; see {self._log}")
