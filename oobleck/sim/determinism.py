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

__all__ = ["run_virtual"]

T = TypeVar("T")

_KNOBS = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r")


def run_virtual(main: Callable[[], Awaitable[T]], *, seed: int, horizon_s: float) -> T:
    """Run `main` from virtual second 0; the same seed gives the same order of events, in any process.

    Time stands still while any task can run, and then jumps to what is due next. Raises trio.TooSlowError at
    `horizon_s` virtual seconds: without it, tasks that wait for one another would spin for ever.
    """

    async def bounded() -> T:
        with trio.fail_after(horizon_s):
            return await main()

    with _scheduling(seed):
        return trio.run(bounded, clock=MockClock(autojump_threshold=0))


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
