"""A trio clock that does not count time in which the process was stopped.

After a stop (by a signal, a virtual machine's migration, swapping) all time limits of a process would be over:
handshakes, commands and answers would fail although no peer was slow. This clock resumes where it stopped, so each has
its remaining time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import trio

_HELD_UP_S = 1.0  # shorter delays are work, or waiting for the CPU; a longer one is a stop


class PatientClock(trio.abc.Clock):
    """Trio reads it before and after each sleep, for about a microsecond."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held_up_s = 0.0
        self._expected_s = math.inf  # when the next read is due if the process runs

    @property
    def held_up_s(self) -> float:
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
        # Trio sleeps next, so the following read is due only then.
        self._expected_s += max(0.0, sleep_s)
        return sleep_s
