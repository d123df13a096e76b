"""The time of a run: it goes on under a master that takes over, and while its master's process is stopped."""

from __future__ import annotations

from collections.abc import Callable

import trio


class RunClock:
    """Seconds since a run started, by trio's clock. `start` it within trio."""

    def __init__(self, *, elapsed_s: float = 0.0, held_up_s: Callable[[], float] = lambda: 0.0) -> None:
        """`elapsed_s`: how long the run has gone on already, under a master before.

        `held_up_s` tells how long this process was stopped so far, where trio's clock does not count that.
        """
        self._elapsed_s = elapsed_s
        self._held_up_s = held_up_s
        self._started_s = 0.0

    def start(self) -> None:
        """Count from now on."""
        self._started_s = trio.current_time() - self._elapsed_s + self._held_up_s()

    @property
    def now_s(self) -> float:
        """Seconds since the run started, those included in which this process was stopped."""
        return trio.current_time() - self._started_s + self._held_up_s()

    def deadline(self, at_s: float) -> float:
        """Return the trio time of a moment of the run; infinity of one that never comes."""
        return at_s + self._started_s - self._held_up_s()
