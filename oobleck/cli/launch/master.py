"""`oobleck up` as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.python_process import module_command

_POLL_S = 0.05
_MOST_LINES = 1000
_LAST_WORDS_S = 2.0
_SAYS = "oobleck up: "
_BLAMES = ("oobleck: ", "Error: ")


class MasterProcess:
    def __init__(self, words: Sequence[str], base_dir: Path, variables: Mapping[str, str]) -> None:
        """Start `oobleck up` with these words, and the options that this class needs."""
        self._base_dir = base_dir
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        own = ("--plain", "--json", "--until-eof", f"--base-dir={base_dir}")
        end = words.index("--") if "--" in words else len(words)  # a script's arguments follow
        self._process = subprocess.Popen(
            module_command("oobleck", "up", *words[:end], *own, *words[end:]),
            # Nothing is written here: however the caller dies, the pipe ends, and the run with it (`--until-eof`).
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A terminal's Ctrl-C reaches only the caller, who passes it on.
            start_new_session=True,
            env={**os.environ, **variables},
        )
        self._id = ProcessId.of(self._process.pid)
        # The thread also keeps the process alive if the program drops its `Run`.
        self._listener = threading.Thread(target=self._listen, name="oobleck-run", daemon=True)
        self._listener.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """As of `subprocess`: None while it lives, negative for the signal that killed it."""
        return self._process.poll()

    def wait_until_accepted(self) -> RunDirectory | None:
        """Wait until the job is accepted and its run has a directory; return None if it ends before."""
        while True:
            # The process may take the lock and end between the two questions, so its end is asked for first.
            has_ended = self.has_ended
            if (held := self._held()) is not None:
                return held
            if has_ended:
                return None
            time.sleep(_POLL_S)

    def _held(self) -> RunDirectory | None:
        """Return the run whose lock this process holds, or has held."""
        if self._id is None or not self._base_dir.is_dir():
            return None
        runs = (RunDirectory(base_dir=self._base_dir, tag=path.name) for path in self._base_dir.iterdir())
        return next((run for run in runs if run.master == self._id), None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, at most for `timeout_s`; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.has_ended

    def interrupt(self) -> None:
        """Pass a Ctrl-C on: the first finishes the step, saves and stops; the second stops at once."""
        self._process.send_signal(signal.SIGINT)

    def words_so_far(self) -> str:
        """Return the lines of its output that are neither the journal's nor shown already."""
        return "\n".join(self._lines)

    def last_error(self) -> str:
        """Return its last error message, without the name of the command."""
        self._listener.join(_LAST_WORDS_S)
        lines = list(self._lines)
        starts = [index for index, line in enumerate(lines) if line.startswith(_BLAMES)]
        blamed = lines[starts[-1] :] if starts else lines[-20:]
        text = "\n".join(blamed).strip()
        return next((text.removeprefix(each) for each in _BLAMES if text.startswith(each)), text)

    def _listen(self) -> None:
        """Show messages for people, keep lines that may be errors, and drop the journal's, which `Run` has."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(_SAYS):
                with suppress(OSError, ValueError):
                    sys.stderr.write(line)
                    sys.stderr.flush()
            elif not line.startswith("["):
                self._lines.append(line.rstrip("\n"))
        self._process.stderr.close()
        self._process.wait()
        if self._process.stdin is not None:  # the run would end with it
            self._process.stdin.close()
