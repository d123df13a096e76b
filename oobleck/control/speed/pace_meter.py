"""What a worker computes between two reports of its pace."""

from __future__ import annotations

from oobleck.control.protocol import Pace

__all__ = ["INTERVAL_S", "PaceMeter"]

INTERVAL_S = 1.0
"""From one report to the next, at least: they are made between steps."""


class PaceMeter:
    """Adds up computation, and hands out a report when it is due."""

    def __init__(self, device: int, now_s: float) -> None:
        self._device = device
        self._compute_s = 0.0
        self._microbatches = 0
        self._since_s = now_s

    def add(self, compute_s: float, num_microbatches: int) -> None:
        """Note what so many microbatches took, waiting left out."""
        self._compute_s += compute_s
        self._microbatches += num_microbatches

    def take(self, now_s: float) -> Pace | None:
        """The report that is due, and begin the next one; None within a second of the one before."""
        if now_s < self._since_s + INTERVAL_S or not self._microbatches:
            return None
        pace = Pace(device=self._device, compute_s=self._compute_s, microbatches=self._microbatches)
        self._compute_s, self._microbatches, self._since_s = 0.0, 0, now_s
        return pace
