"""Templates under the objective of the Oobleck paper, as a second cost model to compare plans on its terms.

Equations 1 to 4 (Jang et al., SOSP 2023), with w the seconds of a stage, S stages, Nb = 4S microbatches and k the
rightmost slowest stage, counted from 0:

    T = sum(w) + (Nb - S + k - 1) · w[k] + sum(w[k:])

Communication is no part of w there, nor here. The published search is not exact, since whether a part is best
depends on k and on the whole. This one is: for a given w[k] = B the terms belong to single stages,

    before k: w + 4B, with w <= B      k itself: 2w + 2B, with w = B      after k: 2w + 3B, with w < B

So for a value B, a dynamic programme over (layers, devices, whether k was placed) finds the best pipelines of all
sizes at once: O(V·L²·D) for V devices, L layers and D device counts. Few values have to be tried. None is below the
tightest that a size allows. And what comes before k sums to at most k · B, so that

    T >= 2 · sum(w) + (3S - 1) · B

of which the pipeline found at the tightest B leaves little room above it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from oobleck.plan import PipelineTemplate, StageTemplate
from oobleck.planner.costs import StageCosts
from oobleck.planner.profiles import Profile
from oobleck.planner.tables import Floats

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
    tables = {
        count: _by_length(costs.seconds(count, left_same_node=False, right_same_node=False))
        for count in costs.device_counts
    }
    values = _distinct([table[np.isfinite(table)] for table in tables.values()])
    best: dict[int, tuple[float, int]] = {}
    ranges = _first_values(costs, tables, values, wanted, best)
    for index in range(len(values)):
        sizes = [count for count, (first, last) in ranges.items() if first < index <= last]
        if sizes:
            _try_slowest(costs, tables, values, index, sizes, best)
    templates = {}
    for count, (value, index) in best.items():
        run = _Run(costs, tables, values[index], count * devices_per_node)
        templates[count] = run.template(count * devices_per_node), value
    return templates


def _first_values(
    costs: StageCosts,
    tables: dict[int, Floats],
    values: Sequence[float],
    node_counts: Sequence[int],
    best: dict[int, tuple[float, int]],
) -> dict[int, tuple[int, int]]:
    """Try the tightest slowest stage for each number of nodes; return the first and last value that can be the best."""
    largest, per_node = costs.device_counts[-1], costs.devices_per_node
    most = node_counts[-1] * per_node
    tightest, least_sums = (_least(costs, tables, most, combine) for combine in (np.maximum, np.add))
    first_of: dict[int, list[int]] = {}
    for count in node_counts:
        if np.isfinite(tightest[count * per_node]):
            first_of.setdefault(bisect_left(values, float(tightest[count * per_node])), []).append(count)
    ranges = {}
    for first, counts in first_of.items():
        _try_slowest(costs, tables, values, first, counts, best)
        for count in counts:
            fewest_stages = -(-count * per_node // largest)
            room_s = best[count][0] - 2 * float(least_sums[count * per_node])
            limit_s = room_s / (3 * fewest_stages - 1) * (1 + 4 * _EQUAL)
            ranges[count] = first, bisect_right(values, limit_s) - 1
    return ranges


def _least(costs: StageCosts, tables: dict[int, Floats], num_devices: int, combine: np.ufunc) -> Floats:
    """Return the least sum or largest of the stages' seconds over all cuts, at [v] for pipelines of v devices."""
    suffixes = _no_suffixes(costs.num_layers, num_devices)
    suffixes[0, costs.num_layers] = 0.0
    for total in range(1, num_devices + 1):
        for count in _counts(costs, total):
            _improve(suffixes[total], tables[count], suffixes[total - count], combine)
    return suffixes[:, 0]


def _try_slowest(
    costs: StageCosts,
    tables: dict[int, Floats],
    values: Sequence[float],
    index: int,
    node_counts: Sequence[int],
    best: dict[int, tuple[float, int]],
) -> None:
    """Keep the pipelines of these numbers of nodes whose slowest stage takes `values[index]`, where they are better."""
    run = _Run(costs, tables, values[index], max(node_counts) * costs.devices_per_node)
    for count in node_counts:
        value = run.best_s(count * costs.devices_per_node)
        if value < best.get(count, (math.inf, 0))[0]:
            best[count] = value, index


def _distinct(values: Sequence[Floats]) -> list[float]:
    """Return the values in order, one for each group of equal ones: the largest."""
    ordered = np.unique(np.concatenate(values))
    last_of_group = np.append(ordered[1:] > ordered[:-1] * (1 + _EQUAL), True)
    return [float(value) for value in ordered[last_of_group]]


def _counts(costs: StageCosts, total: int) -> list[int]:
    """Return the devices that the first stage of a suffix of `total` devices may have."""
    per_node = costs.devices_per_node
    return [count for count in costs.device_counts if count <= total and (total - count) % per_node + count <= per_node]


def _by_length(seconds: Floats) -> Floats:
    """Return the seconds of every stage by [its layers - 1, first layer]; else infinite."""
    size = len(seconds) - 1
    table = np.full((size, size), np.inf)
    for length in range(size):
        table[length, : size - length] = seconds.diagonal(length + 1)
    return table


def _no_suffixes(num_layers: int, num_devices: int) -> Floats:
    """Return the worst suffixes by [devices, first layer], with infinities behind the last layer."""
    return np.full((num_devices + 1, 2 * num_layers + 1), np.inf)


def _improve(best: Floats, stages: Floats, following: Floats, combine: np.ufunc = np.add) -> None:
    """Put a stage before the suffixes that follow, where that makes better ones."""
    width, size = stages.shape
    if width:
        windows = np.ndarray((width, size), np.float64, following, 8, (8, 8))  # following[first + 1 + length]
        np.minimum(best[:size], combine(stages, windows).min(axis=0), out=best[:size])


class _Run:
    """The programme for one slowest stage; suffixes by [devices, first layer], without and with that stage."""

    def __init__(self, costs: StageCosts, tables: dict[int, Floats], slowest_s: float, num_devices: int) -> None:
        self._costs = costs
        self._before: dict[int, Floats] = {}
        self._itself: dict[int, Floats] = {}
        self._after: dict[int, Floats] = {}
        for count, table in tables.items():
            seconds = table[: int(np.count_nonzero(table.min(axis=1) <= slowest_s))]
            within = seconds <= slowest_s
            equal = within & (seconds >= slowest_s * (1 - 2 * _EQUAL))
            self._before[count] = np.where(within, seconds + 4 * slowest_s, np.inf)
            self._itself[count] = np.where(equal, 2 * seconds + 2 * slowest_s, np.inf)
            self._after[count] = np.where(within & ~equal, 2 * seconds + 3 * slowest_s, np.inf)
        self._without = _no_suffixes(costs.num_layers, num_devices)
        self._with = _no_suffixes(costs.num_layers, num_devices)
        self._without[0, costs.num_layers] = 0.0
        for total in range(1, num_devices + 1):
            for count in _counts(costs, total):
                rest = total - count
                _improve(self._without[total], self._after[count], self._without[rest])
                _improve(self._with[total], self._itself[count], self._without[rest])
                _improve(self._with[total], self._before[count], self._with[rest])

    def best_s(self, num_devices: int) -> float:
        return float(self._with[num_devices, 0])

    def template(self, num_devices: int) -> PipelineTemplate:
        stages: list[StageTemplate] = []
        first, left, placed = 0, num_devices, False
        while left:
            options: list[tuple[float, bool, int, int]] = []
            for count in _counts(self._costs, left):
                rest = left - count
                steps = [(self._after, self._without, True)] if placed else []
                if not placed:
                    steps = [(self._itself, self._without, True), (self._before, self._with, False)]
                for table, following, is_placed in steps:
                    stages_s = table[count][:, first]
                    sums = stages_s + following[rest, first + 1 : first + 1 + len(stages_s)]
                    if len(sums):
                        options.append((float(sums.min()), is_placed, count, first + 1 + int(sums.argmin())))
            _, placed, count, stop = min(options)
            stages.append(self._costs.stage(first, stop, num_devices - left, count))
            first, left = stop, left - count
        return PipelineTemplate(stages=tuple(stages))
