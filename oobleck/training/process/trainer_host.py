"""Runs a script whose `train()` trains on a run's nodes: `python -m oobleck.training.process.trainer_host SOCKET`.

It is the user's own process: the script runs once in it, as `__main__`, from its first line to its last. At `train()`
the process describes the job to the master over the socket, whose number is an argument. It then follows the journal,
calls the script's callbacks, and continues with the trained weights when the run has ended.

    receives    a ScriptSpec
    sends       {"settings": …, "provides": …, "resume": …}, or {"problem": …, "is_usage": …}
    receives    {"job": …}, a JobSpec that asks for more than was described, if it does
    sends       {}, or {"problem": …, "is_usage": …}
    receives    {"log": …, "checkpoints": …}, the journal's entries, and at last {"exit_code": …, "checkpoints": …}
    sends       "stop" when a callback asks for that, "allow STEP THROUGH" when callbacks have heard of a step, and the
                others up to THROUGH may begin
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from oobleck.control.journal import JournalEntry
from oobleck.errors import ConfigError, UsageError, UserError
from oobleck.host.handover import receiving
from oobleck.host.places import place_of
from oobleck.host.script import blamed, never_trained, run_as_main
from oobleck.job import JobSpec, ScriptSpec
from oobleck.training.randomness import seed_scripts
from oobleck.wire import decode_json

from .plain_trainers import refuse_plain_trainers

_FAILED = 1
_IS_ENTRY = b'{"@type"'  # other lines are the master's own
_GONE = 75  # EX_TEMPFAIL: the run continues, or can be continued, without this process


def main() -> int:
    """Run the script; returns the exit status."""
    master = socket.socket(fileno=int(sys.argv[1]))
    # Processes that the script starts may outlive it; the master must see its end all the same.
    os.set_inheritable(master.fileno(), False)
    host = _TrainerHost(master)
    script = decode_json((ScriptSpec,), host.lines.readline())
    seed_scripts()
    refuse_plain_trainers()
    try:
        with receiving(host.train):
            run_as_main(script)
    # It is the user's own, and may fail in any way.
    except Exception as error:  # noqa: BLE001
        if host.has_begun:
            traceback.print_exception(error)
        else:
            host.send({"problem": blamed(error, script), "is_usage": False})
        return _FAILED
    if not host.has_begun:
        host.send({"problem": str(never_trained(script)), "is_usage": False})
        return _FAILED
    return 0


class _TrainerHost:
    def __init__(self, master: socket.socket) -> None:
        self._master = master
        self.lines: BinaryIO = master.makefile("rb")
        self.has_begun = False
        """Whether the master has received a job, or the reason why there is none."""

    def send(self, answer: object) -> None:
        self.has_begun = True
        self._master.sendall(json.dumps(answer).encode() + b"\n")

    def _tell(self, word: bytes) -> None:
        # A run that has ended does not listen any more while the last entries are taken.
        with suppress(OSError):
            self._master.sendall(word)

    def train(self, trainer: Any) -> Any:
        """Have a trainer's job trained; returns what its `train()` returns. Exits with the run's status if that fails.

        Raises UsageError for a second call.
        """
        # Workers run the script up to its first `train()`: they would know nothing of another.
        if self.has_begun:
            raise UsageError(f"{type(trainer).__name__}.train() comes after another: a run trains once; start another")
        with self._answering_problems():
            job = trainer.job()
            described = {"settings": job.settings, "provides": job.provides, "resume": trainer.resume(job)}
        self.send(described)
        run = trainer.follow(job)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the master, which finishes the step
        try:
            asked = self._next_line()
            if "job" in asked:
                with self._answering_problems():
                    job.check_for(decode_json((JobSpec,), asked["job"]))
                self.send({})
                asked = self._next_line()
            if "checkpoints" in asked:
                run.saves_in(place_of(asked["checkpoints"], "checkpoint.directory"))
            ended = asked if "exit_code" in asked else self._follow(run, Path(asked["log"]))
        finally:
            signal.signal(signal.SIGINT, before)
        if ended["exit_code"]:
            raise SystemExit(ended["exit_code"])
        return run.finish(Path(ended["checkpoints"]))

    @contextmanager
    def _answering_problems(self) -> Iterator[None]:
        """Send a user's error within the block to the master, and exit."""
        try:
            yield
        except UserError as error:
            self.send({"problem": str(error), "is_usage": not isinstance(error, ConfigError)})
            raise SystemExit(_FAILED) from error

    def _next_line(self) -> Any:
        line = self.lines.readline()
        return json.loads(line) if line else {"exit_code": _GONE}

    def _follow(self, run: Any, log: Path) -> Any:
        """Follow the run until it has ended; returns the master's last line."""
        is_stopping = False
        with _output_in(log):
            for line in _at_once(self.lines):
                if not line.startswith(_IS_ENTRY):
                    return json.loads(line)
                run.take(decode_json(JournalEntry, line))
                if run.wants_stop:
                    if not is_stopping:
                        self._tell(b"stop\n")
                    is_stopping = True
                elif (allowed := run.take_allowed()) is not None:
                    self._tell(b"allow %d %d\n" % allowed)
        return {"exit_code": _GONE}


def _at_once(lines: BinaryIO) -> Iterator[bytes]:
    """Yield lines, which are received as they come: the script may evaluate for long, and the master does not wait."""
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        for line in lines:
            received.put(line)
        received.put(b"")

    threading.Thread(target=receive, daemon=True, name="receive entries").start()
    return iter(received.get, b"")


@contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """Within the block, output goes to a file, while the terminal shows the run."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Redirecting descriptors, not `sys.stdout`, takes along child processes and libraries in other languages.
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


if __name__ == "__main__":
    sys.exit(main())
