"""Calls at virtual times: one task sleeps for everybody, which costs a fraction of a sleep each."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import trio

__all__ = ["Alarms"]


class Alarms:
    """`run` must be running. A call that is not wanted any more is made all the same: let it do no harm."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._sleep = trio.CancelScope()

    def call_at(self, t_s: float, callback: Callable[[], None]) -> None:
        """Call back at a time, or at once if it has passed. Calls of the same time are made in order."""
        heappush(self._due, (t_s, next(self._numbers), callback))
        if t_s < self._sleep.deadline:
            self._sleep.deadline = t_s

    async def run(self) -> None:
        """Make the calls, for ever."""
        while True:
            with trio.CancelScope(deadline=self._due[0][0] if self._due else math.inf) as self._sleep:
                await trio.sleep_forever()
            now_s = trio.current_time()
            while self._due and self._due[0][0] <= now_s:
                heappop(self._due)[2]()
