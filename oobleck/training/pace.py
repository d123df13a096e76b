"""How fast this worker computes: what the master compares nodes by, to find the slow ones."""

from __future__ import annotations

import time

from oobleck.wire import Pace

__all__ = ["PaceMeter"]

_INTERVAL_S = 1.0


class PaceMeter:
    """Adds up computation; hands out a report once a second at most."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._compute_s = 0.0
        self._microbatches = 0
        self._since_s = time.monotonic()

    def add(self, compute_s: float, microbatches: int) -> None:
        """Note that so many microbatches took so long, waiting left out."""
        self._compute_s += compute_s
        self._microbatches += microbatches

    def take(self) -> Pace | None:
        """The report that is due, and begin the next one; None while it is too early."""
        if time.monotonic() < self._since_s + _INTERVAL_S or not self._microbatches:
            return None
        pace = Pace(device=self._device, compute_s=self._compute_s, microbatches=self._microbatches)
        self._compute_s, self._microbatches, self._since_s = 0.0, 0, time.monotonic()
        return pace
