"""How fast nodes compute, as the planner's searches take it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from oobleck.errors import PlanningError

from .profiles import Profile


def speeds_of(slow: Mapping[str, float] | None) -> dict[str, float]:
    """Return the speeds of nodes, 0.5 for one that takes twice as long."""
    for node, factor in (slow or {}).items():
        if not (math.isfinite(factor) and factor > 0):
            raise PlanningError(f"node {node} takes {factor} times as long; that must be finite and above 0")
    return {node: 1 / factor for node, factor in (slow or {}).items()}


def with_speed(profile: Profile, speed: float) -> Profile:
    """Return the profile of a node that computes at another speed: 0.5 takes twice as long, also in split passes."""
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                forward_s={count: seconds / speed for count, seconds in layer.forward_s.items()},
                backward_s={count: seconds / speed for count, seconds in layer.backward_s.items()},
                split=None
                if layer.split is None
                else replace(
                    layer.split,
                    forward_s=layer.split.forward_s / speed,
                    backward_input_s=layer.split.backward_input_s / speed,
                    backward_weight_s=layer.split.backward_weight_s / speed,
                ),
            )
            for layer in profile.layers
        ),
    )
