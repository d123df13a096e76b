"""Which losses are bad: those that are not finite, or jump."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

_NUM_RECENT = 32
_LEAST_RECENT = 8
_JUMP = 3.0


class Losses:
    """The recent losses of one rank."""

    def __init__(self, recent: Iterable[float] = ()) -> None:
        self._recent: deque[float] = deque(recent, maxlen=_NUM_RECENT)

    @property
    def recent(self) -> tuple[float, ...]:
        """The newest good losses, which a rank that continues from here compares with."""
        return tuple(self._recent)

    def is_bad(self, loss: float) -> bool:
        """Whether a loss is not finite, or exceeds the highest recent one by more than three times their range.

        Recent are the last 32 good ones, if there are 8. A loss that is not bad is one of them from now on. O(32).
        """
        if not math.isfinite(loss):
            return True
        if len(self._recent) >= _LEAST_RECENT:
            low, high = min(self._recent), max(self._recent)
            # Losses that are all alike have no range, and zeros, as of a policy's first steps, tell none.
            span = max(high - low, abs(high) / 10)
            if span and loss > high + _JUMP * span:
                return True
        self._recent.append(loss)
        return False
