"""Templates cut for nodes of given speeds: the best stages on named nodes in their order, where some are slow.

The objective is that of all templates, `sum(w) + (m - 1) * max(w)`, with the compute of a node's stages divided by its
speed. The search is exact for the given order of nodes: under a bound on max(w), a dynamic programme over (stages,
layers) finds the least sum(w), and few bounds need trying (see `templates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import Floats, StageCosts, prefix_sums
from oobleck.planner.inventory import Holding

from .recut import with_stops

# Sums within this share of each other count as equal, and the one that moves the fewest bytes wins.
_LEAST_MOVED = 1e-7
# A better cut has to save more than this share.
_TOLERANCE = 1e-6


def cut_for_speeds(
    costs: Sequence[StageCosts],
    template: PipelineTemplate,
    speeds: Sequence[float],
    holdings: Sequence[Holding],
    num_microbatches: int,
) -> PipelineTemplate:
    """Return the template's devices with the best cut for steps of `num_microbatches`, or `template` itself.

    `costs`, `speeds` (0.5 takes twice as long) and `holdings` are by node of the pipeline; the template has one chunk a
    stage. All stages fit their memory; where no cut does, the template stays. O(bounds · S · L²) for S stages and L
    layers, with few bounds.
    """
    search = _Search(costs, template, speeds, holdings)
    loosest = search.least_sum(math.inf)
    if loosest is None:
        return template
    rounds, tightest_s = num_microbatches - 1, search.tightest_s()
    best, least_sum_s, bound_s = loosest, loosest.sum_s, math.nextafter(loosest.slowest_s, 0.0)
    found = search.least_sum(tightest_s)
    while found is not None:
        best = min(best, found, key=lambda cut: cut.sum_s + rounds * cut.slowest_s)
        best_s = best.sum_s + rounds * best.slowest_s
        # The slowest stage of a better cut is within this bound, and its sum at least the least sum under it.
        if rounds:
            bound_s = min(bound_s, (best_s - least_sum_s) / rounds)
        if not rounds or bound_s <= tightest_s or least_sum_s + rounds * tightest_s >= best_s * (1 - _TOLERANCE):
            break
        found = search.least_sum(bound_s)
        if found is not None:
            least_sum_s, bound_s = found.sum_s, math.nextafter(found.slowest_s, 0.0)
    return template if best.stops == search.own_stops else with_stops(template, best.stops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    stops: list[int]
    """0, and where each stage stops."""
    sum_s: float
    slowest_s: float


class _Search:
    def __init__(
        self,
        costs: Sequence[StageCosts],
        template: PipelineTemplate,
        speeds: Sequence[float],
        holdings: Sequence[Holding],
    ) -> None:
        stages = template.stages
        self.own_stops = [0, *(stage.stop_layer for stage in stages)]
        # For every stage `[L + 1, L + 1]`, at [i, j] for layers i to j - 1: its seconds, and the share of all bytes
        # that it would have to receive.
        self._seconds: list[Floats] = []
        self._moved: list[Floats] = []
        layer_bytes = [layer.state_bytes for layer in costs[0].profile.layers]
        # Divided by the number of stages too, so that the shares of a whole cut sum to at most 1.
        total = max(1, sum(layer_bytes)) * len(stages)
        for index, stage in enumerate(stages):
            own = costs[stage.node_index]
            seconds = own.seconds(
                stage.num_devices,
                left_same_node=index > 0 and stages[index - 1].node_index == stage.node_index,
                right_same_node=index + 1 < len(stages) and stages[index + 1].node_index == stage.node_index,
                speed=speeds[stage.node_index],
            )
            seconds[own.most_in_flight(stage.num_devices) < own.in_flight(len(stages) - index)] = np.inf
            self._seconds.append(seconds)
            held = holdings[stage.node_index]
            # All devices of a stage hold the same layers.
            layers = held[stage.first_device] if stage.first_device < len(held) else frozenset()
            missing = [0 if layer in layers else size for layer, size in enumerate(layer_bytes)]
            sums = prefix_sums(missing) / total
            self._moved.append(sums[None, :] - sums[:, None])

    def tightest_s(self) -> float:
        """Return the seconds of the slowest stage in the cut where it is fastest."""
        best = np.full(len(self._seconds[0]), np.inf)
        # A cut without stages has no slowest one.
        best[0] = -np.inf
        for seconds in self._seconds:
            best = np.maximum(best[:, None], seconds).min(axis=0)
        return float(best[-1])

    def least_sum(self, bound_s: float) -> _Cut | None:
        """Return the cut of the least sum whose stages each take at most `bound_s`, or None."""
        best = np.full(len(self._seconds[0]), np.inf)
        best[0] = 0.0
        scale_s = 0.0
        chosen = []
        for seconds, moved in zip(self._seconds, self._moved, strict=True):
            scale_s = scale_s or float(seconds[np.isfinite(seconds)].max(initial=0.0))
            sums = best[:, None] + np.where(seconds <= bound_s, seconds, np.inf) + _LEAST_MOVED * scale_s * moved
            chosen.append(sums.argmin(axis=0))
            best = sums.min(axis=0)
        if not np.isfinite(best[-1]):
            return None
        stops = [len(best) - 1]
        for firsts in reversed(chosen):
            stops.append(int(firsts[stops[-1]]))
        stops.reverse()
        each = [float(table[first, stop]) for table, first, stop in zip(self._seconds, stops, stops[1:], strict=False)]
        return _Cut(stops=stops, sum_s=math.fsum(each), slowest_s=max(each))
