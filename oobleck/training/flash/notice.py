"""Tells a script that its processes are about to be ended, and how long they have."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

from oobleck.storage import scripts
from oobleck.training import attempts

_asked_s: float | None = None
_before: object = None
_follows = False


def notice() -> float | None:
    """Return within how many seconds this process is ended; None while nothing is to end it.

    Under `oobleck run`, ranks are asked to end when a node leaves (a preemption, `oobleck drain`) or joins, and when
    the run is stopped. They have `--shutdown-timeout` from then on. From the first call on, SIGTERM does not end this
    process any more: it saves what it needs, and ends by itself. A handler that the script has set before is called
    too. Ranks may hear of it at different steps: where they act on it together, one of them decides for all.

    Under other launchers, it returns None, and changes nothing. Must be called in the main thread first; raises
    RuntimeError if it is not.
    """
    grace_s = os.environ.get(scripts.GRACE_VARIABLE)
    if grace_s is None:
        return None
    if not _follows:
        _follow()
    asked_s = attempts.asked_s() if _asked_s is None else _asked_s
    return None if asked_s is None else max(0.0, asked_s + float(grace_s) - time.monotonic())


def _follow() -> None:
    global _follows, _before
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("oobleck.checkpoint.notice: call it in the main thread first, which takes signals")
    _before = signal.signal(signal.SIGTERM, _note)
    _follows = True


def _note(number: int, frame: FrameType | None) -> None:
    global _asked_s
    if _asked_s is None:
        _asked_s = time.monotonic()
    if callable(_before):
        _before(number, frame)
