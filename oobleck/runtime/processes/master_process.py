"""Kills the process of a run's master and starts it again, as its user would."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from oobleck.errors import UsageError
from oobleck.runtime.files import ProcessId

_END_TIMEOUT_S = 10.0


def restart_master(master: ProcessId, *more: str, down_s: float) -> None:
    """Kill a master with SIGKILL, and start it again `down_s` seconds later with `more` arguments.

    The new process has the same output. Raises UsageError if the old one is gone, or belongs to another user.
    """
    process = Path("/proc") / str(master.pid)
    with ExitStack() as stack:
        if not master.lives:
            raise UsageError(f"the run's master, process {master.pid}, does not live any more")
        try:
            arguments = _words(process / "cmdline")
            environment = dict(word.split("=", 1) for word in _words(process / "environ") if "=" in word)
            directory = os.readlink(process / "cwd")
            out, err = (stack.enter_context((process / "fd" / number).open("ab", buffering=0)) for number in "12")
        except OSError as error:
            raise UsageError(f"the run's master, process {master.pid}, cannot be looked into: {error}") from error
        master.send(signal.SIGKILL)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        # While the old process lives it holds the run's lock, and the new one would refuse to start.
        while master.lives and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(down_s)
        subprocess.Popen(
            [*arguments, *more],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _words(path: Path) -> list[str]:
    return os.fsdecode(path.read_bytes()).split("\0")[:-1]
