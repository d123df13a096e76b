"""How fast each node computes, against what its stage should take and against the others.

A node counts as slow when, for some time, it has taken much longer than the profile says and the median node does:
what slows all of them down alike is no reason to plan anew. It is taken for normal again only once it is clearly
faster than that, so that nobody is moved back and forth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from oobleck.planner import ExecutionPlan, Place, Profile

from .messages import Pace

__all__ = ["Paces"]

_REPORTS = 5
"""Reports, each of a second or more, that have to agree."""
_SLOW = 1.5
_NORMAL = 1.2
_CHANGED = 1.3
"""A slow node that became this much slower or faster is planned for anew."""


class Paces:
    """Mutable: the latest reports of each worker in the plan."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._ratios: dict[Place, deque[float]] = {}
        """Measured over expected seconds for a microbatch, by worker."""
        self.slow: Mapping[str, float] = {}
        """The slow nodes, as planned for: 2.0 takes twice as long as normal."""

    def note(self, place: Place, pace: Pace, plan: ExecutionPlan) -> None:
        """Take in what a worker's latest microbatches took."""
        located = plan.locate(place)
        if located is None or not pace.microbatches:
            return
        stage = plan.pipelines[located[0]].stages[located[1]]
        layers = self._profile.layers[stage.first_layer : stage.stop_layer]
        devices = len(stage.places)
        expected_s = math.fsum(layer.forward_s[devices] + layer.backward_s[devices] for layer in layers)
        ratios = self._ratios.setdefault(place, deque(maxlen=_REPORTS))
        ratios.append(pace.compute_s / pace.microbatches / expected_s)

    def forget(self, node: str) -> None:
        """A node is lost, or its worker starts anew: it is taken for normal."""
        self._ratios = {place: ratios for place, ratios in self._ratios.items() if place.node != node}
        self.slow = {name: factor for name, factor in self.slow.items() if name != node}

    def take_change(self, plan: ExecutionPlan) -> bool:
        """Look at the reports; returns whether the slow nodes are others now, or much slower or faster."""
        known = {
            place: ratios
            for place, ratios in sorted(self._ratios.items())
            if len(ratios) == _REPORTS and plan.locate(place) is not None
        }
        if len(known) < len(plan.places) or len(known) < 3:
            return False  # without all of them nobody knows what is normal
        usual = median(median(ratios) for ratios in known.values())
        slow = dict(self.slow)
        for place, ratios in known.items():
            least, most = min(ratios) / usual, max(ratios) / usual
            if least > _SLOW:
                slow[place.node] = round(median(ratios) / usual, 1)
            elif most < _NORMAL:
                slow.pop(place.node, None)
        if not _differ(slow, self.slow):
            return False
        self.slow = slow
        return True


def _differ(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    if one.keys() != other.keys():
        return True
    return any(max(one[node], other[node]) > _CHANGED * min(one[node], other[node]) for node in one)
