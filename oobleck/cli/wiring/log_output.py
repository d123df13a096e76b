"""What is logged during a run, on standard error, which may be a pipe that nobody reads."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MAX_WAITING = 1000
_LAST_WORDS_S = 1.0


class _Handler(logging.Handler):
    """Has a thread of its own write; records that are too many for it are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write, name="log-output", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))

    def finish(self) -> None:
        """Have what waits written, within a second; a thread that is stuck ends with the process."""
        self._say(None)
        self._writer.join(_LAST_WORDS_S)

    def _say(self, text: str | None) -> None:
        with suppress(queue.Full):
            self._waiting.put_nowait(text)

    def _write(self) -> None:
        while (text := self._waiting.get()) is not None:
            with suppress(OSError):
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


@contextmanager
def background_logging() -> Iterator[None]:
    """Have a thread write what is logged, warnings included: the caller never waits for its reader."""
    handler = _Handler()
    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.finish()
