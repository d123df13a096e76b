"""The time of a run, which continues under a new master and while the master's process is stopped."""

from __future__ import annotations

from collections.abc import Callable

import trio


class RunClock:
    """Seconds since a run started, by trio's clock. `start` it within trio."""

    def __init__(self, *, elapsed_s: float = 0.0, held_up_s: Callable[[], float] = lambda: 0.0) -> None:
        """`elapsed_s` is the run's time under earlier masters.

        `held_up_s` returns how long this process was stopped so far, if trio's clock does not count that.
        """
        self._elapsed_s = elapsed_s
        self._held_up_s = held_up_s
        self._started_s = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._started_s = trio.current_time() - self._elapsed_s + self._held_up_s()

    @property
    def now_s(self) -> float:
        """Seconds since the run started, including those in which this process was stopped."""
        return trio.current_time() - self._started_s + self._held_up_s()

    def deadline(self, at_s: float) -> float:
        """Return the trio time of a moment of the run; infinity stays infinity."""
        return at_s + self._started_s - self._held_up_s()
