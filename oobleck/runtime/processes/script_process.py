"""A job's script, in processes of its own beside the master: one that describes it, one that runs its callbacks."""

from __future__ import annotations

import json
import logging
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
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.files import read_input
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json

_log = logging.getLogger(__name__)

_HOST = module_command("oobleck.training.process.script_host")
_TIMEOUT_S = 120.0
_LAST_LINES_S = 5.0  # how long a script may take to end once it has said what its job is
_ENTRIES_BUFFERED = 10_000  # callbacks that are so far behind miss what comes then
_LAST_WORDS_S = 30.0  # how long callbacks may take to come to an end once the run has


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedScript:
    """A script, and the settings that it returned."""

    spec: ScriptSpec
    settings: str
    """As JSON, by the keys of a job file."""

    @classmethod
    def of(cls, spec: ScriptSpec, answer: Any) -> DescribedScript:
        """Read what its process said of it."""
        return cls(spec=replace(spec, provides=tuple(answer["provides"])), settings=json.dumps(answer["settings"]))


def read_script(path: Path, arguments: tuple[str, ...]) -> ScriptSpec:
    """Return a script, which is not run. Raises UserError where it cannot be read."""
    source = read_input(path, "script")
    return ScriptSpec(name=path.name, source=source, arguments=arguments, directory=str(path.parent.absolute()))


def describe_script(path: Path, arguments: tuple[str, ...]) -> DescribedScript:
    """Run a script for what it says; takes as long as what it imports. Its words go to stderr. Raises as below."""
    with closing(ScriptProcess(path, arguments)) as process:
        return process.described


class ScriptProcess:
    """A script that has said what its job is, and whose job can be tried where it is."""

    def __init__(self, path: Path, arguments: tuple[str, ...]) -> None:
        """Run it for what it says; takes as long as what it imports. Its words go to stderr.

        Raises UsageError where its arguments are wrong, ConfigError where it fails, ResourceLost where it does not come
        back within two minutes.
        """
        spec = read_script(path, arguments)
        self._path = path
        self._process = subprocess.Popen(
            [*_HOST, "describe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=as_no_rank()
        )
        try:
            answer = self._ask(encode_json(spec), "to return its job")
            if answer is None:
                raise ConfigError(f"script {path} ended by itself, with the exit code {self._process.wait()}")
        except BaseException:
            self._process.kill()
            self.close()
            raise
        self.described = DescribedScript.of(spec, answer)

    def try_out(self, job: JobSpec) -> str:
        """Try the model, the loss and the optimizer of a job; returns what people should know of them.

        Takes as long as it takes to build the model without memory. Raises ConfigError for what cannot be trained,
        UnbuiltModel and ResourceLost where that cannot be known here.
        """
        answer = self._ask(encode_json(job), "to be tried")
        if answer is None:
            raise ResourceLost(f"script {self._path} ended, with the exit code {self._process.wait()}, as it was tried")
        note: str = answer["note"]
        return note

    def close(self) -> None:
        """Have the process end, if it has not ended: within a few seconds by itself."""
        try:
            self._process.communicate(timeout=_LAST_LINES_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, line: bytes, what: str) -> Any:
        """The answer to a line; None where the process ends without one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # its exit status says more
            self._process.stdin.write(line)
            self._process.stdin.flush()
        until_s, said = time.monotonic() + _TIMEOUT_S, b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until_s - time.monotonic()))
            if not ready:
                raise ResourceLost(f"script {self._path} took more than {_TIMEOUT_S:g} s {what}")
            if not (piece := os.read(self._process.stdout.fileno(), 1 << 16)):
                return None
            said += piece
        answer = json.loads(said)
        if "problem" in answer:
            raise _problem_of(answer)
        return answer


def _problem_of(answer: Any) -> UserError:
    kind = UsageError if answer["is_usage"] else UnbuiltModel if answer.get("is_unbuilt") else ConfigError
    return kind(answer["problem"])


_FAILED = b"failed "


class EntryFeed:
    """Entries of the journal on their way to a process, which may be slow, or gone."""

    def __init__(self, report: Callable[[str], None] = _log.warning) -> None:
        """`report` is called with what people should know."""
        self._send, self._entries = trio.open_memory_channel[JournalEntry](_ENTRIES_BUFFERED)
        self._report = report
        self._is_behind = False

    def tell(self, entry: JournalEntry) -> None:
        """Hand an entry on; never waits."""
        try:
            self._send.send_nowait(entry)
            self._is_behind = False
        except trio.WouldBlock:
            if not self._is_behind:  # once until they are not: what is reported may become an entry itself
                self._is_behind = True
                self._report(f"callbacks are too slow: {type(entry).__name__} and others are not passed on to them")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the process is gone, which was said


class CallbackProcess(EntryFeed):
    """The process that runs a script's callbacks. What goes wrong with it never touches the run."""

    def __init__(
        self, job: JobSpec, *, log: Path, on_stop: Callable[[], None], report: Callable[[str], None] = _log.warning
    ) -> None:
        """`on_stop` is called when a callback wants training to stop, `report` with what people should know; what the
        script prints goes to `log`.
        """
        self._job = job
        self._log = log
        self._on_stop = on_stop
        super().__init__(report)
        self._scope = trio.CancelScope()
        self._closed = trio.Event()

    async def finish(self) -> None:
        """Let the callbacks hear what waits for them, and come to an end; after 30 s they are ended."""
        self._send.close()
        with trio.move_on_after(_LAST_WORDS_S):
            await self._closed.wait()
        self._scope.cancel()
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
                    env={**as_no_rank(), "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # the terminal's end, or its Ctrl-C, is for the master alone
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
        finally:
            process.kill()
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
        said = b""
        async for words in process.stdout:
            *lines, said = (said + bytes(words)).split(b"\n")
            for line in lines:
                if line == b"stop":
                    self._on_stop()
                elif line.startswith(_FAILED):
                    self._report(f"{json.loads(line.removeprefix(_FAILED))}; see {self._log}")
