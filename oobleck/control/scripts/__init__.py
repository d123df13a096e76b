"""The decisions of `oobleck run`: when the ranks of a script start, on which nodes, and when all start again."""

from __future__ import annotations

from .coordinator import RanksCoordinator
from .replayed_ranks import ReplayedRanks

__all__ = ["RanksCoordinator", "ReplayedRanks"]
