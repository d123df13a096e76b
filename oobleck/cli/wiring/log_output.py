"""Writes the log of a run to standard error, which may be a pipe without a reader."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from oobleck.host.hidden_log import hide_in_log

_MAX_WAITING = 1000
_LAST_WORDS_S = 1.0


class _Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write, name="log-output", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))

    def finish(self) -> None:
        """Write what waits, for a second at most; a stuck thread ends with the process."""
        self._say(None)
        self._writer.join(_LAST_WORDS_S)

    def _say(self, text: str | None) -> None:
        # A run must not wait for a reader, so records that the thread is too slow for are dropped.
        with suppress(queue.Full):
            self._waiting.put_nowait(text)

    def _write(self) -> None:
        while (text := self._waiting.get()) is not None:
            with suppress(OSError):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


@contextmanager
def background_logging(hide: Callable[[str], str]) -> Iterator[None]:
    """Let a thread write the log as `hide` returns it, warnings included: the caller never waits for a reader."""
    handler = _Handler()
    logging.getLogger().addHandler(handler)
    hide_in_log(hide)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.finish()
