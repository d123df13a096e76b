"""Templates cut for nodes of given speeds: the best stages on named nodes, in their order or in the best one.

The objective is that of all templates, `sum(w) + (m - 1) * max(w)`, with the compute of a node's stages divided by its
speed. Under a bound on max(w), a dynamic programme over (nodes placed, layers) finds the least sum(w), and few bounds
need trying (see `templates`). Where the order is free, its state counts the placed nodes of each speed; equal nodes are
interchangeable, so one slow node among n doubles the states instead of multiplying them by n.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts
from oobleck.planner.inventory import Holding
from oobleck.planner.tables import Floats, prefix_sums

from .recut import with_stops

# Sums within this share of each other count as equal, and the one that moves the fewest bytes wins.
_LEAST_MOVED = 1e-7
# A better cut has to save more than this share.
_TOLERANCE = 1e-6
# Beyond this many states the closest speeds count as equal while the order is searched.
_MOST_STATES = 256

_Placed = tuple[int, ...]
"""How many nodes of each sort have a place."""
_Levels = Sequence[Mapping[_Placed, Sequence[tuple[int, _Placed]]]]
"""For each place: the states after it, each with (sort of node, state before) of the ways there."""


@dataclass(frozen=True, slots=True)
class _Sort:
    """Nodes that are alike."""

    costs: StageCosts
    speed: float


def cut_for_speeds(
    costs: Sequence[StageCosts],
    template: PipelineTemplate,
    speeds: Sequence[float],
    holdings: Sequence[Holding],
    num_microbatches: int,
) -> PipelineTemplate:
    """Return the template's devices with the best cut for steps of `num_microbatches`, or `template` itself.

    `costs`, `speeds` (0.5 takes twice as long) and `holdings` are by node of the pipeline, which keep their order; the
    template has one chunk a stage. All stages fit their memory; where no cut does, the template stays. Exact, in
    O(bounds · S · L²) for S stages and L layers, with few bounds.
    """
    sorts = [_Sort(own, speed) for own, speed in zip(costs, speeds, strict=True)]
    levels: _Levels = [{(place + 1,): [(place, (place,))]} for place in range(len(sorts))]
    best = _Search(template, sorts, levels, num_microbatches, _moved(template, costs[0], holdings)).best()
    own_stops = [0, *(stage.stop_layer for stage in template.stages)]
    return template if best is None or best.stops == own_stops else with_stops(template, best.stops)


def order_for_speeds(
    costs: Sequence[StageCosts], template: PipelineTemplate, speeds: Sequence[float], num_microbatches: int
) -> tuple[int, ...] | None:
    """Return the best order of a pipeline's nodes as their present places, or None where no cut fits.

    The arguments are as for `cut_for_speeds`. Nodes take the places of nodes of their kind. Exact over all
    orders and cuts while the nodes are of few sorts, such as one slow node among like ones; beyond that the closest
    speeds count as equal. O(bounds · states · L²).
    """
    sorts, of = _sorts(costs, speeds)
    numbers = [of.count(sort) for sort in range(len(sorts))]
    reached: dict[_Placed, list[tuple[int, _Placed]]]
    before: Sequence[_Placed] = [(0,) * len(sorts)]
    levels = []
    for place in range(len(costs)):
        reached = {}
        for state, sort in product(before, range(len(sorts))):
            if state[sort] < numbers[sort] and sorts[sort].costs is costs[place]:
                after = (*state[:sort], state[sort] + 1, *state[sort + 1 :])
                reached.setdefault(after, []).append((sort, state))
        levels.append(reached)
        before = list(reached)
    best = _Search(template, sorts, levels, num_microbatches, None).best()
    if best is None:
        return None
    waiting = [[place for place, own in enumerate(of) if own == sort] for sort in range(len(sorts))]
    # Nodes whose place suits their sort stay; of the others, the first takes the first place.
    staying = {place for place, sort in enumerate(best.sorts) if of[place] == sort}
    for place in staying:
        waiting[of[place]].remove(place)
    return tuple(place if place in staying else waiting[sort].pop(0) for place, sort in enumerate(best.sorts))


def _sorts(costs: Sequence[StageCosts], speeds: Sequence[float]) -> tuple[list[_Sort], list[int]]:
    """Return the sorts of nodes, few enough to search all orders, and the sort of each node."""
    nodes = list(zip(costs, speeds, strict=True))
    while math.prod(number + 1 for number in Counter((id(own), speed) for own, speed in nodes).values()) > _MOST_STATES:
        each = sorted({speed for _, speed in nodes})
        if len(each) == 1:
            break
        # A node that counts as slower than it is loses little: the cut is made for its true speed afterwards.
        slower, faster = min(pairwise(each), key=lambda pair: pair[1] / pair[0])
        nodes = [(own, slower if speed == faster else speed) for own, speed in nodes]
    keys = list(dict.fromkeys((id(own), speed) for own, speed in nodes))
    of = [keys.index((id(own), speed)) for own, speed in nodes]
    return [_Sort(*nodes[of.index(sort)]) for sort in range(len(keys))], of


def _moved(template: PipelineTemplate, costs: StageCosts, holdings: Sequence[Holding]) -> list[Floats]:
    """Return, for every stage, [i, j]: the share of all bytes that it must receive to hold layers i to j - 1."""
    layer_bytes = [layer.state_bytes for layer in costs.profile.layers]
    # Divided by the number of stages too, so that the shares of a whole cut sum to at most 1.
    total = max(1, sum(layer_bytes)) * template.num_stages
    moved = []
    for stage in template.stages:
        held = holdings[stage.node_index]
        # All devices of a stage hold the same layers.
        layers = held[stage.first_device] if stage.first_device < len(held) else frozenset()
        sums = prefix_sums([0 if layer in layers else size for layer, size in enumerate(layer_bytes)]) / total
        moved.append(sums[None, :] - sums[:, None])
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    stops: list[int]
    """0, and where each stage stops."""
    sorts: list[int]
    """The sort of node at each place."""
    sum_s: float
    slowest_s: float


class _Search:
    """The search over cuts, and over the orders that `levels` allow; `moved` decides between equal sums."""

    def __init__(
        self,
        template: PipelineTemplate,
        sorts: Sequence[_Sort],
        levels: _Levels,
        num_microbatches: int,
        moved: Sequence[Floats] | None,
    ) -> None:
        self._template, self._levels = template, levels
        self._num_microbatches = num_microbatches
        stages = template.stages
        self._at = [
            [index for index, stage in enumerate(stages) if stage.node_index == place] for place in range(len(levels))
        ]
        self._seconds: dict[tuple[int, int], Floats] = {}
        self._known: dict[tuple[object, ...], Floats] = {}
        for place, reached in enumerate(levels):
            for sort in {sort for ways in reached.values() for sort, _ in ways}:
                for index in self._at[place]:
                    self._seconds[sort, index] = self._stage_seconds(sorts[sort], index)
        self._size = len(next(iter(self._seconds.values())))
        scale_s = max(float(each[np.isfinite(each)].max(initial=0.0)) for each in self._seconds.values())
        self._bias = [_LEAST_MOVED * scale_s * each for each in moved] if moved is not None else None

    def _stage_seconds(self, sort: _Sort, index: int) -> Floats:
        """Return the seconds of a stage on a sort of node, `[L + 1, L + 1]`, infinite where it does not fit."""
        stages, own = self._template.stages, sort.costs
        num_devices, in_flight = stages[index].num_devices, own.in_flight(len(stages) - index, self._num_microbatches)
        left = index > 0 and stages[index - 1].node_index == stages[index].node_index
        right = index + 1 < len(stages) and stages[index + 1].node_index == stages[index].node_index
        key = id(own), sort.speed, num_devices, left, right
        if key not in self._known:
            self._known[key] = own.seconds(num_devices, left_same_node=left, right_same_node=right, speed=sort.speed)
        seconds: Floats = np.where(own.most_in_flight(num_devices) < in_flight, np.inf, self._known[key])
        if own.recomputes:
            seconds += own.recomputing_s(num_devices, in_flight) / sort.speed
        return seconds

    def best(self) -> _Cut | None:
        """Return the cut with the shortest step, or None where none fits."""
        loosest = self._least_sum(math.inf)
        if loosest is None:
            return None
        rounds, tightest_s = self._num_microbatches - 1, self._tightest_s()
        best, least_sum_s, bound_s = loosest, loosest.sum_s, math.nextafter(loosest.slowest_s, 0.0)
        found = self._least_sum(tightest_s)
        while found is not None:
            best = min(best, found, key=lambda cut: cut.sum_s + rounds * cut.slowest_s)
            best_s = best.sum_s + rounds * best.slowest_s
            # The slowest stage of a better cut is within this bound, and its sum at least the least sum under it.
            if rounds:
                bound_s = min(bound_s, (best_s - least_sum_s) / rounds)
            if not rounds or bound_s <= tightest_s or least_sum_s + rounds * tightest_s >= best_s * (1 - _TOLERANCE):
                break
            found = self._least_sum(bound_s)
            if found is not None:
                least_sum_s, bound_s = found.sum_s, math.nextafter(found.slowest_s, 0.0)
        return best

    def _start(self, value: float) -> dict[_Placed, Floats]:
        best = np.full(self._size, np.inf)
        best[0] = value
        return {before: best for ways in self._levels[0].values() for _, before in ways}

    def _tightest_s(self) -> float:
        """Return the seconds of the slowest stage in the cut where it is fastest."""
        best = self._start(-np.inf)  # a cut without stages has no slowest one
        for place, reached in enumerate(self._levels):
            after: dict[_Placed, Floats] = {}
            for state, ways in reached.items():
                for sort, before in ways:
                    found = best[before]
                    for index in self._at[place]:
                        found = np.maximum(found[:, None], self._seconds[sort, index]).min(axis=0)
                    after[state] = np.minimum(after[state], found) if state in after else found
            best = after
        (final,) = best.values()
        return float(final[-1])

    def _least_sum(self, bound_s: float) -> _Cut | None:
        """Return the cut of the least sum whose stages each take at most `bound_s`, or None."""
        within = {key: np.where(each <= bound_s, each, np.inf) for key, each in self._seconds.items()}
        if self._bias is not None:
            within = {(sort, index): each + self._bias[index] for (sort, index), each in within.items()}
        best = self._start(0.0)
        # For each place and state: of every way there, the first layers of the stages; and the way to each layer.
        firsts: list[dict[_Placed, list[list[NDArray[np.intp]]]]] = []
        chosen: list[dict[_Placed, NDArray[np.intp]]] = []
        for place, reached in enumerate(self._levels):
            after: dict[_Placed, Floats] = {}
            firsts.append({})
            chosen.append({})
            for state, ways in reached.items():
                ends, starts = [], []
                for sort, before in ways:
                    found, own = best[before], []
                    for index in self._at[place]:
                        sums = found[:, None] + within[sort, index]
                        own.append(sums.argmin(axis=0))
                        found = sums.min(axis=0)
                    ends.append(found)
                    starts.append(own)
                stacked = np.array(ends)
                after[state], firsts[-1][state], chosen[-1][state] = stacked.min(axis=0), starts, stacked.argmin(axis=0)
            best = after
        ((final, values),) = best.items()
        return self._trace(final, firsts, chosen) if np.isfinite(values[-1]) else None

    def _trace(
        self,
        state: _Placed,
        firsts: Sequence[Mapping[_Placed, list[list[NDArray[np.intp]]]]],
        chosen: Sequence[Mapping[_Placed, NDArray[np.intp]]],
    ) -> _Cut:
        stops, sorts, each_s = [self._size - 1], [], []
        for place in reversed(range(len(self._levels))):
            way = int(chosen[place][state][stops[-1]])
            sort, before = self._levels[place][state][way]
            for index, starts in zip(reversed(self._at[place]), reversed(firsts[place][state][way]), strict=True):
                first = int(starts[stops[-1]])
                each_s.append(float(self._seconds[sort, index][first, stops[-1]]))
                stops.append(first)
            sorts.append(sort)
            state = before
        return _Cut(stops=stops[::-1], sorts=sorts[::-1], sum_s=math.fsum(each_s), slowest_s=max(each_s))
