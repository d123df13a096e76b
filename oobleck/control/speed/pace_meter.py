"""What a worker computes between two reports of its pace."""

from __future__ import annotations

from oobleck.control.protocol import Pace

_SHORTEST_INTERVAL_S = 1.0
_REPORTS_PER_S = 1000.0
"""Of all workers together: each report costs the master some of its time, for no two are equal."""


def report_interval_s(num_workers: int) -> float:
    """Seconds from one report of a worker to its next, at least: they are made between steps."""
    return max(_SHORTEST_INTERVAL_S, num_workers / _REPORTS_PER_S)


class PaceMeter:
    """Adds up computation, and hands out a report when it is due."""

    def __init__(self, device: int, now_s: float) -> None:
        self._device = device
        self._compute_s = 0.0
        self._microbatches = 0
        self._since_s = now_s
        self._interval_s = report_interval_s(1)

    def adopt(self, num_workers: int) -> None:
        """Note how many workers a plan has."""
        self._interval_s = report_interval_s(num_workers)

    def add(self, compute_s: float, num_microbatches: int) -> None:
        """Note what so many microbatches took, waiting left out."""
        self._compute_s += compute_s
        self._microbatches += num_microbatches

    def take(self, now_s: float) -> Pace | None:
        """The report that is due, and begin the next one; None where the one before was just now."""
        if now_s < self._since_s + self._interval_s or not self._microbatches:
            return None
        pace = Pace(device=self._device, compute_s=self._compute_s, microbatches=self._microbatches)
        self._compute_s, self._microbatches, self._since_s = 0.0, 0, now_s
        return pace
