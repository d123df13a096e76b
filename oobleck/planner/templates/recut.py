"""Templates cut again by their event-exact time, in a descent from the best cut under the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product

import numpy as np

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts
from oobleck.planner.makespan import PassTimes, stops_of
from oobleck.planner.tables import Floats
from oobleck.planner.zero_bubble import Stops

MOST_STAGES = 12
"""Pipelines of more stages keep their cut: the cost grows with the fourth power."""
_MOST_MOVES = 24
# A faster cut has to save more than this share.
_LEAST_GAIN = 1e-6


class Recut:
    def __init__(self, costs: StageCosts, times: PassTimes) -> None:
        self._costs, self._times = costs, times

    def best(
        self,
        template: PipelineTemplate,
        num_microbatches: int,
        *,
        reduction_s: float = 0.0,
        speeds: Sequence[float] = (),
    ) -> PipelineTemplate:
        """Return the fastest template that the descent finds, with the same devices, or `template` itself.

        `reduction_s` are the seconds to reduce a byte of gradients: the node with most of them counts with the step.
        `speeds` (0.5: half) are those of the nodes, if any is slow.
        O(moves · S³ · m) for S stages and m microbatches.
        """
        if not 1 < template.num_stages <= MOST_STAGES:
            return template

        def seconds(stops: Stops, below_s: float) -> Floats:
            reduce_s = reduction_s * self._costs.most_reduced(template, stops)
            below = below_s - reduce_s
            steps_s = self._times.steps_s(template, stops, num_microbatches, speeds, reduce_s=reduce_s, below_s=below)
            return steps_s + reduce_s

        stops = stops_of(template)
        best_s = float(seconds(stops, np.inf)[0])
        for _ in range(_MOST_MOVES):
            around = self._that_fit(template, stops + _moves(template.num_stages), num_microbatches)
            if not len(around):
                break
            steps_s = seconds(around, best_s)
            fastest = int(steps_s.argmin())
            if steps_s[fastest] >= best_s * (1 - _LEAST_GAIN):
                break
            best_s, stops = float(steps_s[fastest]), around[fastest : fastest + 1]
        return template if (stops == stops_of(template)).all() else with_stops(template, stops[0].tolist())

    def _that_fit(self, template: PipelineTemplate, stops: Stops, num_microbatches: int) -> Stops:
        # A move may have left a stage without layers.
        stops = stops[np.diff(stops, axis=1).min(axis=1) > 0]
        fits = np.ones(len(stops), dtype=bool)
        for index, stage in enumerate(template.stages):
            most = self._costs.most_in_flight(stage.num_devices)[stops[:, index], stops[:, index + 1]]
            fits &= most >= self._costs.in_flight(template.num_stages - index, num_microbatches)
        return stops[fits]


@lru_cache
def _moves(size: int) -> Stops:
    """Return how the boundaries of `size` stages move to a neighbouring cut, a row each."""
    moves = []
    # Moving all boundaries from one to another by a layer takes a layer from one stage to another, past those between.
    for first in range(1, size):
        for last in range(first, size):
            move = np.zeros(size + 1, dtype=np.int64)
            move[first : last + 1] = 1
            moves += [move, -move]
    # Two boundaries move by one or two layers each.
    for (one, other), (here, there) in product(combinations(range(1, size), 2), product((-2, -1, 1, 2), repeat=2)):
        move = np.zeros(size + 1, dtype=np.int64)
        move[one], move[other] = here, there
        moves.append(move)
    return np.array(moves)


def with_stops(template: PipelineTemplate, stops: Sequence[int]) -> PipelineTemplate:
    """Return the template's devices cut at other layers; `stops` are 0 and where each stage stops."""
    stages = (
        replace(stage, first_layer=first, stop_layer=stop)
        for stage, first, stop in zip(template.stages, stops, stops[1:], strict=False)
    )
    return PipelineTemplate(stages=tuple(stages))
