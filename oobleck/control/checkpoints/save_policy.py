"""When to save: after so many steps, every so many seconds, or as often as it pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oobleck.job import CheckpointSpec

_FIRST_SAVE_S = 60.0
"""Before the cost of a save is known."""
_LEAST_INTERVAL_S = 10.0
_MOST_INTERVAL_S = 1800.0
_PRIOR_FAILURE_S = 86_400.0
"""Until a run has failures of its own to count, one that needs a checkpoint is taken to come once a day."""
_DISK_SHARE = 0.5
"""At most this share of the time is spent on writing to disk."""


def best_interval_s(cost_s: float, mean_failure_s: float) -> float:
    """The time between saves that costs least, in seconds.

    A save costs `cost_s` of training, and a failure, one in `mean_failure_s` on average, half an interval of work: the
    sum is least at sqrt(2·cost·mean) (Young, "A first order approximation to the optimum checkpoint interval", CACM
    1974; Daly, FGCS 2006, adds terms that matter only where the cost is near the mean).
    """
    return math.sqrt(2.0 * cost_s * mean_failure_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePolicy:
    """What has been seen of saves and failures so far, and what follows from it."""

    spec: CheckpointSpec
    cost_s: float | None = None
    """What the newest save cost training; None before the first. A copy beside training counts in full: it takes the
    same memory's bandwidth."""
    disk_s: float = 0.0
    """How long it took until that save was on the disk."""
    num_failures: int = 0
    """That needed a checkpoint."""

    def next_step(self, last_step: int) -> int | None:
        """The step to save after, when steps are counted; None when time is.

        Left to itself, a run saves after its first step: until then, it has nothing to go back to.
        """
        every = self.spec.save_steps
        if every is None and self.spec.save_interval_s is None and self.cost_s is None:
            return last_step + 1
        return None if every is None else (last_step // every + 1) * every

    def interval_s(self, now_s: float) -> float:
        """Seconds from one save to the next, when time is counted."""
        if self.spec.save_interval_s is not None:
            return self.spec.save_interval_s
        if self.cost_s is None:
            return _FIRST_SAVE_S
        mean_failure_s = (_PRIOR_FAILURE_S + now_s) / (1 + self.num_failures)
        least_s = max(_LEAST_INTERVAL_S, self.disk_s / _DISK_SHARE)
        return max(least_s, min(_MOST_INTERVAL_S, best_interval_s(self.cost_s, mean_failure_s)))
