"""How the training thread spent its time: how fast this worker computes, when it computed, and what it waited for."""

from __future__ import annotations

import time
from collections import deque

from oobleck.control.protocol import Pace
from oobleck.control.speed import PaceMeter
from oobleck.control.steps import without

_STEPS_TIMED = 16
"""Over how many steps it is told what was computed and what waited for."""
_BUSY_TIMES = 32
"""How many stretches of computation are remembered, to tell how long a recovery kept all workers waiting."""


class StepTimer:
    """Adds up stretches of computation, step by step."""

    def __init__(self, device: int) -> None:
        self._pace = PaceMeter(device, time.monotonic())
        self._step_began_s = time.monotonic()
        self._posted_s: float | None = None
        """When this worker had done its part of the step."""
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
        """Note a stretch of computation, in which others were waited for: how long in all, and when for longest.

        The longest wait is no computation: the worker that was waited for may have waited as well, for a failed node.
        """
        self._whole_in_step_s += ended_s - began_s
        self._busy_in_step += without((began_s, ended_s), longest_wait_s)
        self._waited_in_step_s += waited_s
        self._pace.add(ended_s - began_s - waited_s, num_microbatches)

    def begin_step(self) -> None:
        """The step's time starts here."""
        self._step_began_s, self._posted_s = time.monotonic(), None

    def forget_step(self) -> None:
        """What was computed of the step was in vain."""
        self._busy_in_step, self._whole_in_step_s, self._waited_in_step_s = [], 0.0, 0.0

    def end_step(self) -> None:
        """The step is applied. To commit and to apply it is part of the next one's time."""
        self._step_began_s, self._posted_s = self._posted_s or time.monotonic(), None
        self._busy_s.extend(self._busy_in_step)
        if self._whole_in_step_s:
            self._spent_s.append((self._whole_in_step_s - self._waited_in_step_s, self._waited_in_step_s))
        self.forget_step()

    def post_step(self) -> float:
        """This worker's part of the step is done, and all are to agree on it; return how many seconds it took."""
        self._posted_s = time.monotonic()
        return self._posted_s - self._step_began_s

    @property
    def busy_s(self) -> tuple[tuple[float, float], ...]:
        """When it computed in the latest steps, by the monotonic clock."""
        return tuple(self._busy_s)

    def spent(self) -> tuple[float, float]:
        """Seconds of the latest steps in which this worker computed, and in which it waited for others."""
        return sum(computed_s for computed_s, _ in self._spent_s), sum(waited_s for _, waited_s in self._spent_s)

    def adopt(self, num_workers: int) -> None:
        """Note how many workers a plan has: the more there are, the less often each tells its speed."""
        self._pace.adopt(num_workers)

    def take_pace(self) -> Pace | None:
        """Return the speed by which the master finds slow nodes; now and then."""
        return self._pace.take(time.monotonic())
