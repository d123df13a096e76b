"""Virtual time, and one order of events for one seed.

Trio shuffles the tasks that are ready together, on purpose, and has two private knobs that make the shuffle
repeatable. They are touched here alone, and a test fails as soon as they move.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio._core._run as _scheduler
from trio.testing import MockClock

__all__ = ["Livelock", "run_virtual"]

T = TypeVar("T")

_PATIENCE = 20_000
"""Turns of the scheduler in one and the same instant, after which nothing will ever change."""
_KNOBS = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int, horizon_s: float) -> T:
    """Run `main` from virtual second 0; the same seed gives the same order of events, in any process.

    Time stands still while any task can run, and then jumps to what is due next. Raises trio.TooSlowError at
    `horizon_s` virtual seconds: without it, tasks that wait for one another would spin for ever. Raises Livelock when
    tasks keep one another busy and time cannot go on.
    """
    watch = _Watch()

    async def bounded() -> T:
        with trio.fail_after(horizon_s):
            with watch.scope:
                return await main()
            raise Livelock(f"tasks keep one another busy at {trio.current_time():g} s, and time cannot go on")

    with _scheduling(seed):
        return trio.run(bounded, clock=MockClock(autojump_threshold=0), instruments=[watch])


class Livelock(AssertionError):
    """Tasks that wake one another without end, in one instant."""


class _Watch(trio.abc.Instrument):
    """Counts the scheduler's turns in one instant, and ends the run when there are too many."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._now_s = -1.0
        self._turns = 0

    def after_io_wait(self, timeout: float) -> None:
        now_s = trio.current_time()
        self._turns = self._turns + 1 if now_s == self._now_s else 0
        self._now_s = now_s
        if self._turns > _PATIENCE:
            self.scope.cancel()


@contextmanager
def _scheduling(seed: int) -> Iterator[None]:
    missing = [name for name in _KNOBS if not hasattr(_scheduler, name)]
    if missing:
        raise RuntimeError(f"trio {trio.__version__} has no {missing[0]} any more; look for what took its place")
    before, state = _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r.getstate()
    _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]  # Final for everybody else
    _scheduler._r.seed(seed)
    try:
        yield
    finally:
        _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        _scheduler._r.setstate(state)
