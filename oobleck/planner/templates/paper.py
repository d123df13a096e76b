"""Templates under the objective of the Oobleck paper, as a second cost model to compare plans on its terms.

Equations 1 to 4 (Jang et al., SOSP 2023), with w the seconds of a stage, S stages, Nb = 4S microbatches and k the
rightmost slowest stage, counted from 0:

    T = sum(w) + (Nb - S + k - 1) · w[k] + sum(w[k:])

Communication is no part of w there, nor here. The published search is not exact, since whether a part is best
depends on k and on the whole. This one is: for a given w[k] = B the terms belong to single stages,

    before k: w + 4B, with w <= B      k itself: 2w + 2B, with w = B      after k: 2w + 3B, with w < B

So for every value B that a stage can have, a dynamic programme over (layers, devices, whether k was placed) finds
the best pipelines of all sizes at once: O(B·V·L²·D) for B distinct values, V devices, L layers and D device counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from oobleck.planner.costs import Floats, StageCosts
from oobleck.planner.plan import PipelineTemplate, StageTemplate
from oobleck.planner.profiles import Profile

__all__ = ["find_paper_templates", "paper_step_s"]

_EQUAL = 1e-12
"""Stages whose seconds differ by less than this share are equally slow: sums in floating point are not exact."""


def paper_step_s(stage_seconds: Sequence[float]) -> float:
    """Return the paper's estimate of a step with 4 microbatches for each stage, from each stage's seconds."""
    number = len(stage_seconds)
    slowest_s = max(stage_seconds)
    slowest = max(index for index, seconds in enumerate(stage_seconds) if seconds >= slowest_s * (1 - _EQUAL))
    return (
        math.fsum(stage_seconds)
        + (4 * number - number + slowest - 1) * stage_seconds[slowest]
        + math.fsum(stage_seconds[slowest:])
    )


def find_paper_templates(
    profile: Profile, node_counts: Iterable[int], *, devices_per_node: int = 1, max_devices_per_stage: int = 1
) -> dict[int, tuple[PipelineTemplate, float]]:
    """Return the best template under the paper's objective, and its seconds, for each possible number of nodes.

    As in the paper, memory is no part of the search.
    """
    costs = StageCosts(
        profile,
        devices_per_node=devices_per_node,
        max_devices_per_stage=max_devices_per_stage,
        max_in_flight=1,
        communication=False,
    )
    most = costs.num_layers * costs.device_counts[-1] // devices_per_node
    wanted = sorted({count for count in node_counts if 1 <= count <= most})
    if not wanted:
        return {}
    tables = {count: costs.seconds(count, left_same_node=False, right_same_node=False) for count in costs.device_counts}
    best: dict[int, tuple[float, float]] = {}
    for slowest_s in _distinct([table[np.isfinite(table)] for table in tables.values()]):
        run = _Run(costs, tables, slowest_s, wanted[-1] * devices_per_node)
        for count in wanted:
            value = run.best_s(count * devices_per_node)
            if value < best.get(count, (math.inf, 0.0))[0]:
                best[count] = value, slowest_s
    templates = {}
    for count, (value, slowest_s) in best.items():
        run = _Run(costs, tables, slowest_s, count * devices_per_node)
        templates[count] = run.template(count * devices_per_node), value
    return templates


def _distinct(values: Sequence[Floats]) -> list[float]:
    """Return the values in order, one for each group of equal ones: the largest."""
    ordered = np.unique(np.concatenate(values))
    last_of_group = np.append(ordered[1:] > ordered[:-1] * (1 + _EQUAL), True)
    return [float(value) for value in ordered[last_of_group]]


class _Run:
    """The programme for one slowest stage; suffixes by [devices, first layer], without and with that stage."""

    def __init__(self, costs: StageCosts, tables: dict[int, Floats], slowest_s: float, num_devices: int) -> None:
        self._costs = costs
        size = costs.num_layers
        self._before: dict[int, Floats] = {}
        self._itself: dict[int, Floats] = {}
        self._after: dict[int, Floats] = {}
        for count, seconds in tables.items():
            within = seconds <= slowest_s
            equal = within & (seconds >= slowest_s * (1 - 2 * _EQUAL))
            self._before[count] = np.where(within, seconds + 4 * slowest_s, np.inf)
            self._itself[count] = np.where(equal, 2 * seconds + 2 * slowest_s, np.inf)
            self._after[count] = np.where(within & ~equal, 2 * seconds + 3 * slowest_s, np.inf)
        self._without = np.full((num_devices + 1, size + 1), np.inf)
        self._with = np.full((num_devices + 1, size + 1), np.inf)
        self._without[0, size] = 0.0
        for total in range(1, num_devices + 1):
            for count in self._counts(total):
                rest = total - count
                followed = self._without[rest][None, :]
                self._improve(self._without[total], self._after[count] + followed)
                self._improve(self._with[total], self._itself[count] + followed)
                self._improve(self._with[total], self._before[count] + self._with[rest][None, :])

    def _improve(self, best: Floats, sums: Floats) -> None:
        np.minimum(best, sums.min(axis=1), out=best)

    def _counts(self, total: int) -> list[int]:
        per_node = self._costs.devices_per_node
        return [
            count
            for count in self._costs.device_counts
            if count <= total and (total - count) % per_node + count <= per_node
        ]

    def best_s(self, num_devices: int) -> float:
        return float(self._with[num_devices, 0])

    def template(self, num_devices: int) -> PipelineTemplate:
        stages: list[StageTemplate] = []
        first, left, placed = 0, num_devices, False
        while left:
            options: list[tuple[float, bool, int, int]] = []
            for count in self._counts(left):
                rest = left - count
                steps = [(self._after, self._without, True)] if placed else []
                if not placed:
                    steps = [(self._itself, self._without, True), (self._before, self._with, False)]
                for table, following, is_placed in steps:
                    sums = table[count][first] + following[rest]
                    options.append((float(sums.min()), is_placed, count, int(sums.argmin())))
            _, placed, count, stop = min(options)
            stages.append(self._costs.stage(first, stop, num_devices - left, count))
            first, left = stop, left - count
        return PipelineTemplate(stages=tuple(stages))
