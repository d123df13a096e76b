"""How fast nodes compute, as the planner's searches take it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from oobleck.errors import PlanningError

__all__ = ["speeds_of"]


def speeds_of(slow: Mapping[str, float] | None) -> dict[str, float]:
    """Return the speeds of nodes, 0.5 for one that takes twice as long."""
    for node, factor in (slow or {}).items():
        if not (math.isfinite(factor) and factor > 0):
            raise PlanningError(f"node {node} takes {factor} times as long; that must be finite and above 0")
    return {node: 1 / factor for node, factor in (slow or {}).items()}
