"""Trio's clock for a process that may be stopped: the time in which it could not run is not counted.

A process that is stopped (a signal, a virtual machine that moves, swapping) finds all of its time limits over once it
continues: handshakes, commands and answers would fail although no peer was slow. This clock continues where it
stopped, so that each of them has the time that was left.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import trio

_HELD_UP_S = 1.0  # what takes no longer is work, or waiting for a turn; a process that was away for longer was stopped


class PatientClock(trio.abc.Clock):
    """Trio reads it before and after each time that it sleeps. A read costs about a microsecond."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held_up_s = 0.0
        self._expected_s = math.inf  # by then it is looked at again, if the process runs

    @property
    def held_up_s(self) -> float:
        """How long the process was stopped so far: what this clock is behind."""
        self.current_time()
        return self._held_up_s

    def start_clock(self) -> None:
        self._expected_s = self._now()

    def current_time(self) -> float:
        now_s = self._now()
        if now_s > self._expected_s + _HELD_UP_S:
            self._held_up_s += now_s - self._expected_s
        self._expected_s = now_s
        return now_s - self._held_up_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        sleep_s = deadline - self.current_time()
        self._expected_s += max(0.0, sleep_s)
        return sleep_s
