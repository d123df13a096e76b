"""The process of a script that calls `train()`: it names the job, waits while that is trained, and continues.

Unlike the scripts of `script_process` it is an ordinary program of the terminal, with the same input, output and Ctrl-C
except while its `train()` waits.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from oobleck.control.events import ScriptAnswered, ScriptEnded
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.python_process import as_no_rank, module_command
from oobleck.wire import encode_json

from .script_process import DescribedScript, EntryFeed, problem_of

_log = logging.getLogger(__name__)

_HOST = module_command("oobleck.training.process.trainer_host")
_LAST_ENTRIES_S = 30.0  # how long callbacks may take for the remaining entries once the run has ended
_MOST_BYTES = 1 << 24


class TrainerProcess(EntryFeed):
    """A script that waits in its `train()`, until `end`."""

    def __init__(self, script: ScriptSpec) -> None:
        """Run the script up to its `train()`. Raises UserError for its job, SystemExit if it ends without that."""
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [*_HOST, str(theirs.fileno())], pass_fds=(theirs.fileno(),), env={**as_no_rank(), "PYTHONUNBUFFERED": "1"}
        )
        theirs.close()
        self._ours.sendall(encode_json(script))
        super().__init__()
        self._scope = trio.CancelScope()
        answer = self._answer()
        self.resume: str | bool | None = answer["resume"]
        self.described = DescribedScript.of(script, answer)
        self._microbatch_size = answer["settings"].get("microbatch_size")

    def check_for(self, job: JobSpec) -> None:
        """Have the script try what the job asks for beside its own. Raises UserError for what it cannot be given."""
        if job.microbatch_size == self._microbatch_size and job.devices_per_stage == 1:
            return
        self._ours.sendall(json.dumps({"job": encode_json(job).decode()}).encode() + b"\n")
        self._answer()

    def _answer(self) -> Any:
        with self._ours.makefile("rb") as lines:
            line = lines.readline(_MOST_BYTES)
        if not line:
            raise SystemExit(self._wait())
        answer = json.loads(line)
        if "problem" in answer:
            self._wait()
            raise problem_of(answer)
        return answer

    # --- during the run ----------------------------------------------------------------------------------------

    def begin(
        self,
        log: Path,
        checkpoints: Path,
        *,
        on_stop: Callable[[], None],
        answer: Callable[[ScriptAnswered | ScriptEnded], None],
    ) -> None:
        """Redirect its output to `log`; call `on_stop` when a callback asks training to stop.

        `checkpoints` is the directory of the run's checkpoints. `answer` is called when more steps may begin.
        """
        self._on_stop = on_stop
        self._tell_master = answer
        paths = {"log": str(log.absolute()), "checkpoints": str(checkpoints.absolute())}
        self._ours.sendall(json.dumps(paths).encode() + b"\n")

    async def run(self) -> None:
        """Feed the process until `finish`."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._ours.dup()))
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._listen, stream)
                    async for entry in self._entries:
                        await stream.send_all(encode_json(entry))
                    # All entries are sent, and `_listen` would wait until the script ends.
                    nursery.cancel_scope.cancel()
        except* trio.BrokenResourceError:
            _log.warning("the script has ended in its train()")
            self._tell_master(ScriptEnded())
        finally:
            self._entries.close()
            stream.socket.close()

    async def finish(self) -> None:
        """Stop `run` after the waiting entries, or after 30 s."""
        self._send.close()
        self._scope.deadline = trio.current_time() + _LAST_ENTRIES_S

    async def _listen(self, stream: trio.SocketStream) -> None:
        rest = b""
        async for data in stream:
            *lines, rest = (rest + bytes(data)).split(b"\n")
            for line in lines:
                match line.split():
                    case [b"stop"]:
                        self._on_stop()
                    case [b"allow", step, through]:
                        self._tell_master(ScriptAnswered(step=int(step), through=int(through)))
        self._tell_master(ScriptEnded())

    # --- afterwards --------------------------------------------------------------------------------------------

    def end(self, exit_code: int, checkpoints: Path) -> int:
        """Let the script continue after its `train()`, or end if the run failed; returns its exit status."""
        # The duplicate in `run` shares the socket's flags, and trio made it non-blocking.
        self._ours.setblocking(True)
        ended = {"exit_code": int(exit_code), "checkpoints": str(checkpoints)}
        try:
            self._ours.sendall(json.dumps(ended).encode() + b"\n")
        except OSError:
            _log.warning("the script has ended in its train()")
        code = self._wait()
        return int(exit_code) or code

    def _wait(self) -> int:
        """Wait for its end. It gets the terminal's Ctrl-C itself; SIGTERM is forwarded."""
        self._ours.close()
        before = signal.signal(signal.SIGTERM, lambda *_: self._process.terminate())
        try:
            while True:
                try:
                    code = self._process.wait()
                    return code if code >= 0 else 128 - code
                except KeyboardInterrupt:
                    continue
        finally:
            signal.signal(signal.SIGTERM, before)
