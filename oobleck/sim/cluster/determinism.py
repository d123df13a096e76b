"""Virtual time, and one order of events for each seed.

Only this module touches trio's private attributes, and a test fails as soon as they move.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

import trio
import trio._core._run as _scheduler

T = TypeVar("T")

# More turns of the scheduler than this in one instant are a livelock.
_PATIENCE = 20_000
# Trio deliberately shuffles the tasks that are ready together. The first two make the shuffle repeatable; the third
# tells whether a task waits for all others to block.
_KNOBS = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT")


class VirtualTime(trio.abc.Clock):
    """A clock that stands still while any task can run, and then jumps to the next deadline or call.

    Calls cost a fraction of a task that sleeps. They cannot be cancelled, so an obsolete one must do no harm.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def call_at(self, t_s: float, wake: Callable[[], None]) -> None:
        """Call `wake` at a time, or as soon as no task can run if that has passed; calls of one time keep their order.

        Trio's scheduler makes the call, not a task: `wake` may wake tasks, and nothing else.
        """
        heappush(self._calls, (t_s, next(self._numbers), wake))

    def start_clock(self) -> None:
        """Do nothing: virtual time needs no start."""

    def current_time(self) -> float:
        return self.now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Advance to the deadline, or to the calls before it: trio asks only when no task can run."""
        if _scheduler.GLOBAL_RUN_CONTEXT.runner.waiting_for_idle:
            return 1.0  # any positive time: a task that waits for all others to block continues before time does
        calls = self._calls
        due_s = min(calls[0][0], deadline) if calls else deadline
        if due_s == math.inf:
            return due_s
        self.now_s = max(self.now_s, due_s)
        while calls and calls[0][0] <= self.now_s:
            heappop(calls)[2]()
        return 0.0


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int, horizon_s: float, time: VirtualTime | None = None) -> T:
    """Run `main` in virtual time; the same seed gives the same order of events, in any process.

    Raises trio.TooSlowError at `horizon_s` virtual seconds, and Livelock when tasks keep one another busy endlessly.
    """
    time = time or VirtualTime()
    watch = _Watch(time)

    async def bounded() -> T:
        with trio.fail_after(horizon_s):
            with watch.scope:
                return await main()
            # Only the watch cancels its scope.
            raise Livelock(f"tasks keep one another busy at {time.now_s:g} s, and time cannot continue")

    with _scheduling(seed):
        return trio.run(bounded, clock=time, instruments=[watch])


class Livelock(AssertionError):
    """Tasks wake one another endlessly in one instant."""


class _Watch(trio.abc.Instrument):
    """Ends the run after too many turns of the scheduler in one instant."""

    def __init__(self, time: VirtualTime) -> None:
        self.scope = trio.CancelScope()
        self._time = time
        self._now_s = -1.0
        self._turns = 0

    def after_io_wait(self, timeout: float) -> None:
        now_s = self._time.now_s
        self._turns = self._turns + 1 if now_s == self._now_s else 0
        self._now_s = now_s
        if self._turns > _PATIENCE:
            self.scope.cancel()


@contextmanager
def _scheduling(seed: int) -> Iterator[None]:
    missing = [name for name in _KNOBS if not hasattr(_scheduler, name)]
    if missing:
        raise RuntimeError(f"trio {trio.__version__} has no {missing[0]} any more; look for its replacement")
    before, state = _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r.getstate()
    _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # Final for everyone else
    _scheduler._r.seed(seed)
    try:
        yield
    finally:
        _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        _scheduler._r.setstate(state)
