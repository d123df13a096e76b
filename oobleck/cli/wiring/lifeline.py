"""A run that ends with the program that started it: the end of standard input, a pipe, is that program's end."""

from __future__ import annotations

import os
import signal
import stat
import threading
from contextlib import suppress


def end_with_stdin() -> None:
    """Send this process a SIGTERM once its standard input ends; nothing where that is no pipe.

    A master that is started again (`oobleck chaos` does that) has no pipe, and is nobody's. SIGINT is heard from here
    on: a shell has programs in its background ignore it, which the processes that they start inherit, and this one is
    stopped by it. To be called in the main thread.
    """
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_wait_and_end, name="lifeline", daemon=True).start()


def _wait_and_end() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
