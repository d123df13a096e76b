"""Measures how the training thread spends its time: how fast it computes, when, and how long it waits."""

from __future__ import annotations

import time
from collections import deque

from oobleck.control.speed import PaceMeter
from oobleck.control.steps import without

_STEPS_TIMED = 16  # the latest steps, over which `spent` sums
# The latest stretches of computation, which show how long a recovery stalled all workers.
_BUSY_TIMES = 32


class StepTimer:
    """Adds up stretches of computation, step by step."""

    def __init__(self, device: int) -> None:
        self.pace = PaceMeter(device, time.monotonic())
        self._step_began_s = time.monotonic()
        self._posted_s: float | None = None  # when this worker posted its part of the step's commit
        self._busy_s: deque[tuple[float, float]] = deque(maxlen=_BUSY_TIMES)
        self._busy_in_step: list[tuple[float, float]] = []
        self._whole_in_step_s = self._waited_in_step_s = 0.0
        self._spent_s: deque[tuple[float, float]] = deque(maxlen=_STEPS_TIMED)

    def add(
        self,
        began_s: float,
        ended_s: float,
        *,
        waited_s: float,
        longest_wait_s: tuple[float, float],
        num_microbatches: int,
    ) -> None:
        """Add a stretch of computation, with its time spent waiting and the interval of its longest wait."""
        self._whole_in_step_s += ended_s - began_s
        # The longest wait is no computation: the other worker may have waited as well, for a failed node.
        self._busy_in_step += without((began_s, ended_s), longest_wait_s)
        self._waited_in_step_s += waited_s
        self.pace.add(ended_s - began_s - waited_s, num_microbatches)

    def begin_step(self) -> None:
        self._step_began_s, self._posted_s = time.monotonic(), None

    def forget_step(self) -> None:
        self._busy_in_step, self._whole_in_step_s, self._waited_in_step_s = [], 0.0, 0.0

    def end_step(self) -> None:
        """Count the step, which is applied."""
        # The time from this worker's part of the commit on belongs to the next step.
        self._step_began_s, self._posted_s = self._posted_s or time.monotonic(), None
        self._busy_s.extend(self._busy_in_step)
        if self._whole_in_step_s:
            self._spent_s.append((self._whole_in_step_s - self._waited_in_step_s, self._waited_in_step_s))
        self.forget_step()

    def post_step(self) -> float:
        """Note that this worker posts its part of the step's commit; returns the seconds that the part took."""
        self._posted_s = time.monotonic()
        return self._posted_s - self._step_began_s

    @property
    def busy_s(self) -> tuple[tuple[float, float], ...]:
        """The intervals of computation in the latest steps, by the monotonic clock."""
        return tuple(self._busy_s)

    def spent(self) -> tuple[float, float]:
        """Return the seconds of the latest steps in which this worker computed, and in which it waited for others."""
        return sum(computed_s for computed_s, _ in self._spent_s), sum(waited_s for _, waited_s in self._spent_s)
