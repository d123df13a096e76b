"""Stages cut anew for nodes that are slow: a node that takes twice as long gets about half of the layers.

Which node has which stage, and with which devices, stays. The cut is the best under the bound of 1F1B,
`sum(w) + (m - 1) * max(w)` with w the seconds of a stage on its node, within the memory of each stage. The search is
that of `templates`: the least sum(w) under a bound on max(w), and bounds are tried as long as they may lead to less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oobleck.planner.costs import Floats, StageCosts
from oobleck.planner.plan import PipelineTemplate

from .recut import with_stops

__all__ = ["cut_for_speeds"]

_LEAST_GAIN = 1e-6
"""A cut has to be faster by more than this share."""
_MOST_BOUNDS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Where stages stop, and what they take."""

    stops: list[int]
    sum_s: float
    most_s: float


def cut_for_speeds(
    costs: StageCosts, template: PipelineTemplate, speeds: Sequence[float], num_microbatches: int
) -> PipelineTemplate:
    """Return the template with the fastest cut for nodes of these speeds, by their index in it (0.5: half as fast).

    It has the same devices and fits their memory. A template that is the fastest itself, or has several chunks a
    stage, is returned as the object that it is. O(bounds tried · S · L²).
    """
    if template.num_stages == 1 or template.num_chunks > 1:
        return template
    tables = _tables(costs, template, speeds)
    before = costs.timing(template, speeds)
    best_s = before.step_s(num_microbatches) * (1 - _LEAST_GAIN)
    best: list[int] | None = None
    tightest_s = bound_s = _tightest(tables)
    for number in range(_MOST_BOUNDS):  # the tightest, none, then each that may lead to less
        if (found := _least_sum(tables, bound_s)) is None:
            break
        step_s = found.sum_s + (num_microbatches - 1) * found.most_s
        if step_s < best_s:
            best, best_s = found.stops, step_s
        if not number:
            bound_s = math.inf
            continue
        bound_s = (best_s - found.sum_s) / (num_microbatches - 1) if num_microbatches > 1 else 0.0
        bound_s = min(bound_s, math.nextafter(found.most_s, 0.0))
        if bound_s <= tightest_s:
            break
    return template if best is None else with_stops(template, best)


def _tables(costs: StageCosts, template: PipelineTemplate, speeds: Sequence[float]) -> list[Floats]:
    """Return the seconds of all layers that each stage could have; infinite where they do not fit."""
    stages = template.stages
    tables = []
    for index, stage in enumerate(stages):
        table = costs.seconds(
            stage.num_devices,
            left_same_node=index > 0 and stages[index - 1].node_index == stage.node_index,
            right_same_node=index + 1 < len(stages) and stages[index + 1].node_index == stage.node_index,
            speed=speeds[stage.node_index],
        )
        table[costs.most_in_flight(stage.num_devices) < costs.in_flight(len(stages) - index)] = np.inf
        tables.append(table)
    return tables


def _tightest(tables: Sequence[Floats]) -> float:
    """Return the least that the slowest stage can take; infinite where no cut fits."""
    slowest = np.full(len(tables[0]), np.inf)
    slowest[0] = 0.0
    for table in tables:
        slowest = np.maximum(slowest[:, None], table).min(axis=0)
    return float(slowest[-1])


def _least_sum(tables: Sequence[Floats], bound_s: float) -> _Found | None:
    """Return the cut with the least sum of seconds whose stages all take `bound_s` at most."""
    sums = np.full(len(tables[0]), np.inf)
    sums[0] = 0.0
    choices = []
    for table in tables:
        totals = sums[:, None] + np.where(table <= bound_s, table, np.inf)
        choices.append(totals.argmin(axis=0))
        sums = totals.min(axis=0)
    if not math.isfinite(sums[-1]):
        return None
    stops = [len(sums) - 1]
    for choice in reversed(choices):
        stops.append(int(choice[stops[-1]]))
    stops.reverse()
    most_s = max(float(table[first, stop]) for table, first, stop in zip(tables, stops, stops[1:], strict=False))
    return _Found(stops=stops, sum_s=float(sums[-1]), most_s=most_s)
