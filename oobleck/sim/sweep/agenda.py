"""What is to happen in a sweep, in the order of time; and until when there is no master to see it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class Agenda:
    """Virtual time, and the actions that it leads to; those of one moment in the order they were put in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.blind_until_s = 0.0
        """Until then there is no master."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    @property
    def next_s(self) -> float:
        """When something is due next; infinity for never."""
        return self._queue[0][0] if self._queue else inf

    @property
    def is_blind(self) -> bool:
        return self.now_s < self.blind_until_s

    def number(self) -> int:
        """Return a number that nothing else has."""
        self._sequence += 1
        return self._sequence

    def at(self, t_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, or at once if that has passed."""
        heapq.heappush(self._queue, (max(t_s, self.now_s), self.number(), action))

    def when_seen(self, t_s: float, action: Callable[[], None]) -> None:
        """Do something that a master has to be there for."""

        def act() -> None:
            if self.is_blind:
                self.when_seen(self.blind_until_s, action)
            else:
                action()

        self.at(t_s, act)

    def do_due(self) -> None:
        """Do all that is due by now, what becomes due by it included."""
        while self._queue and self._queue[0][0] <= self.now_s:
            heapq.heappop(self._queue)[2]()
