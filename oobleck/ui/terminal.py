"""A terminal whose keys are read one by one, and which is as before whatever becomes of this process.

Its user may suspend this process, continue it in the background, or kill it with all of its group.
"""

from __future__ import annotations

import os
import subprocess
import termios
import threading
import tty
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import trio

_LOOK_S = 0.25
_MOST_BYTES = 1024
# Whatever ends our process, its end of the pipe is closed. The shell must outlive signals to our process group, and may
# not be in the terminal's foreground.
_GUARD = """
trap '' HUP INT QUIT TERM TSTP TTIN TTOU
read -r word || { stty "$1" <&1; printf '\\033[?1049l\\033[?25h'; }
"""


class KeyReader:
    """Reads keys of the terminal at `descriptor`, between `begin` and `end`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_wanted = False
        self._before: list[Any] | None = None
        self._guard: int | None = None
        self._setting = threading.Lock()

    @property
    def is_in_foreground(self) -> bool:
        """Whether this process may read and set the terminal; otherwise the kernel would stop it."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # it is gone, or belongs to another session
            return False

    def begin(self) -> None:
        """Have each key readable at once and not echoed, from the moment on that this process is in the foreground.

        Ctrl-C and Ctrl-Z still send signals.
        """
        with self._setting:
            self._is_wanted = True
            if self._before is not None or not self.is_in_foreground:
                return
            with suppress(OSError, termios.error, subprocess.CalledProcessError):
                before = termios.tcgetattr(self._descriptor)
                self._guard = self._start_guard()
                # Not once all output is written: the user may have stopped it (Ctrl-S).
                tty.setcbreak(self._descriptor, termios.TCSANOW)
                self._before = before

    def end(self) -> None:
        """Make the terminal as it was."""
        with self._setting:
            self._is_wanted = False
            before, self._before = self._before, None
            if before is not None and self.is_in_foreground:
                with suppress(OSError, termios.error):
                    termios.tcsetattr(self._descriptor, termios.TCSANOW, before)
            guard, self._guard = self._guard, None
            if guard is not None:
                with suppress(OSError):
                    os.write(guard, b"done\n")
                os.close(guard)

    async def read(self) -> AsyncIterator[str]:
        """Yield what is typed, until the terminal is gone."""
        while True:
            if self._is_wanted and self._before is None:
                await trio.to_thread.run_sync(self.begin)  # it may have been in the background until now
            if self._before is None or not self.is_in_foreground:
                await trio.sleep(_LOOK_S)
                continue
            with trio.move_on_after(_LOOK_S) as waiting:
                await trio.lowlevel.wait_readable(self._descriptor)
            if waiting.cancelled_caught or not self.is_in_foreground:
                continue
            try:
                data = os.read(self._descriptor, _MOST_BYTES)
            except OSError:
                return
            if not data:
                return
            yield data.decode(errors="ignore")

    def _start_guard(self) -> int:
        """Start the shell that restores the terminal in our place; return the pipe that keeps it waiting."""
        stty = subprocess.run(["stty", "-g"], stdin=self._descriptor, capture_output=True, text=True, check=True)
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(reading, "rb") as waits:
            guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "oobleck-terminal", stty.stdout.strip()],
                stdin=waits,
                stdout=self._descriptor,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        guard.returncode = 0  # else this object would warn that it still runs
        return writing
