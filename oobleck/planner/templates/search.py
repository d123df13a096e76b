"""The dynamic programme of the template search: the best cuts of layers into stages, for all sizes at once.

A partial pipeline is a suffix: layers [i, L) on the last v devices. One step adds a stage of d devices before a suffix
of v - d devices:

    best[v][i] = min over d, j > i of  cost(i, j, d) ∘ best[v - d][j]

with ∘ = max for the tightest bound on the slowest stage, and ∘ = + under such a bound for the least sum. Several bounds
share one run as another axis of the arrays. O(Q·V·L·W·D) for Q bounds, V devices, L layers, stages of at most W layers,
D device counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts, Timing
from oobleck.planner.tables import Floats

# Of equal sums the most even stages win: a stage costs w · (1 + 1e-9 · w / sum), so sums are exact to 1e-9.
_EVENNESS = 1e-9
# Of those, the longest stages come first: a slow stage delays the warm-up and drain of the stages before it.
_LEFTMOST = 1e-13
_CHUNK = 32

# A key names a kind of stage: its devices, and whether its left and right neighbours are on the same node.
_Key = tuple[int, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut of the layers: where each stage stops, and its number of devices, from the first stage to the last."""

    stops: tuple[int, ...]
    num_devices: tuple[int, ...]
    timing: Timing

    def template(self, costs: StageCosts) -> PipelineTemplate:
        stages = []
        first, device = 0, 0
        for stop, count in zip(self.stops, self.num_devices, strict=True):
            stages.append(costs.stage(first, stop, device, count))
            first, device = stop, device + count
        return PipelineTemplate(stages=tuple(stages))


class _Table:
    """The stages of one kind: seconds, cost and memory at [stage's layers - 1, first layer]."""

    def __init__(self, seconds: Floats, most_in_flight: Floats, scale_s: float) -> None:
        size = seconds.shape[0] - 1
        lengths, firsts = np.arange(1, size + 1)[:, None], np.arange(size)[None, :]
        stops = np.minimum(firsts + lengths, size)
        inside = firsts + lengths <= size
        self.seconds = np.where(inside, seconds[firsts, stops], np.inf)
        self.cost = self.seconds + (_EVENNESS / scale_s) * np.where(inside, self.seconds, 0.0) ** 2
        self.most_in_flight = np.where(inside, most_in_flight[firsts, stops], np.inf)


class _Stages:
    """The tables of all kinds of stages; `counted` tells whether runs carry the number of stages along."""

    def __init__(self, costs: StageCosts, *, counted: bool) -> None:
        self.costs, self.counted = costs, counted
        whole = [
            float(costs.seconds(count, left_same_node=False, right_same_node=False)[0, -1])
            for count in costs.device_counts
        ]
        self.scale_s = max(whole) or 1.0
        """The seconds of the whole model."""
        neighbours = (False, True) if costs.devices_per_node > 1 else (False,)
        self.keys: list[_Key] = list(product(costs.device_counts, neighbours, neighbours))
        self._tables: dict[tuple[_Key, int], _Table] = {}

    def table(self, key: _Key, num_stages: int) -> _Table:
        """Return the stages of a kind from which on there are `num_stages` stages, themselves included."""
        costs, (count, left, right) = self.costs, key
        # All else equal, more microbatches in flight leave less memory, and a stage may have to recompute more.
        in_flight = costs.in_flight(num_stages) if costs.recomputes else 0
        if (key, in_flight) not in self._tables:
            seconds = costs.seconds(count, left_same_node=left, right_same_node=right)
            if costs.recomputes:
                seconds += costs.recomputing_s(count, in_flight)
            self._tables[key, in_flight] = _Table(seconds, costs.most_in_flight(count), self.scale_s)
        return self._tables[key, in_flight]


class StageSearch:
    """Searches the cuts of one cost table.

    With stages of several devices a result may break the memory limit; `counted=True` avoids that, at L times the cost.
    """

    def __init__(self, costs: StageCosts, *, counted: bool = False) -> None:
        self._stages = stages = _Stages(costs, counted=counted)
        # The last stage of a pipeline has the least in flight, and so no other takes less time for as many layers.
        self._quickest = np.min([stages.table(key, 1).seconds.min(axis=1) for key in stages.keys], axis=0)

    def tightest(self, num_devices: int) -> Floats:
        """Return, at [v], the least possible seconds of the slowest stage of a pipeline of v devices."""
        run = self._run(np.array([np.inf]), num_devices, np.maximum)
        values: Floats = run.best[:, 0, :, 0].min(axis=1)
        return values

    def least_sums(self, devices: Sequence[int]) -> list[Cut]:
        """Return, for each number of devices, the cut with the least sum of the stages' seconds."""
        run = self._run(np.array([np.inf]), max(devices), np.add)
        return run.trace([0] * len(devices), devices)

    def least_sums_within(self, bounds: Sequence[float], devices: Sequence[int]) -> list[Cut]:
        """Return, for each (bound, devices), the cut of the least sum whose stages all stay within the bound."""
        answers: dict[int, Cut] = {}
        limits, totals = np.array(bounds), np.array(devices)
        for chunk in _chunks(totals):
            run = self._run(limits[chunk], int(totals[chunk].max()), np.add)
            answers.update(zip(chunk, run.trace(range(len(chunk)), totals[chunk].tolist()), strict=True))
        return [answers[query] for query in range(len(bounds))]

    def _run(self, bounds: Floats, num_devices: int, combine: np.ufunc) -> _Run:
        # Stages with more layers than the loosest bound allows are left out.
        allowed = np.nonzero(self._quickest <= bounds.max())[0]
        width = int(allowed[-1]) + 1 if len(allowed) else 1
        return _Run(self._stages, bounds, num_devices, width, combine)


def _chunks(devices: NDArray[np.int64]) -> list[list[int]]:
    """Group queries of similar size, so that none pays for a much larger one."""
    chunks: list[list[int]] = []
    for query in np.argsort(devices, kind="stable").tolist():
        if chunks and devices[query] <= 1.25 * devices[chunks[-1][0]] + 1 and len(chunks[-1]) < _CHUNK:
            chunks[-1].append(query)
        else:
            chunks.append([query])
    return chunks


class _Run:
    """One evaluation of the programme; `best` is [devices, query, stages, first layer], padded with infinities."""

    def __init__(self, stages: _Stages, bounds: Floats, num_devices: int, width: int, combine: np.ufunc) -> None:
        costs, counted = stages.costs, stages.counted
        self._stages, self._bounds = stages, bounds
        self._costs, self._width, self._combine, self._counted = costs, width, combine, counted
        self._size = size = costs.num_layers
        self._allowed: dict[_Table, tuple[Floats, float]] = {}
        depth = min(num_devices, size) + 1 if counted else 1
        self.best = np.full((num_devices + 1, len(bounds), depth, size + width), np.inf)
        self.best[0, :, 0, size] = 0.0
        # The index of the kind of stage, times the width, plus its layers less one.
        self._choice = np.zeros((num_devices + 1, len(bounds), depth, size), dtype=np.int32)
        self._bias = -_LEFTMOST * stages.scale_s * np.arange(width, dtype=np.float64)[:, None, None]
        self._keys = stages.keys
        # From the right, because 1F1B keeps as many microbatches in flight at a stage as there are stages from it on.
        for total in range(1, num_devices + 1):
            for key, rest in self._steps(total):
                self._extend(key, rest, total)

    def _steps(self, total: int) -> list[tuple[_Key, int]]:
        """Return the kinds of stage that a suffix of `total` devices may start with, and the devices after it."""
        per_node = self._costs.devices_per_node
        return [
            ((count, total % per_node != 0, (total - count) % per_node != 0), total - count)
            for count in self._costs.device_counts
            if count <= total and (total - count) % per_node + count <= per_node
        ]

    def _stage_costs(self, key: _Key, num_stages: int, firsts: slice) -> Floats:
        """Return the costs of the stages that fit: [stage's layers - 1, query, first layer]."""
        table, in_flight = self._stages.table(key, num_stages), self._costs.in_flight(num_stages)
        if table not in self._allowed:
            self._allowed[table] = self._within_bounds(table)
        allowed, least_most = self._allowed[table]
        costs = allowed[:, :, firsts]
        # Every possible stage of this kind holds that many, so no mask is needed.
        if in_flight <= least_most:
            return costs
        fits = table.most_in_flight[: self._width, None, firsts] >= in_flight
        return np.where(fits, costs, np.inf)

    def _within_bounds(self, table: _Table) -> tuple[Floats, float]:
        """Return costs, infinite where stages exceed a bound, and the most in flight that fits all other stages."""
        seconds = table.seconds[: self._width]
        values = seconds if self._combine is np.maximum else table.cost[: self._width]
        within = seconds[:, None, :] <= self._bounds[None, :, None]
        possible = within.any(axis=1) & np.isfinite(values)
        least_most = float(table.most_in_flight[: self._width].min(where=possible, initial=np.inf))
        return np.where(within, values[:, None, :], np.inf), least_most

    def _extend(self, key: _Key, rest: int, total: int) -> None:
        size, width = self._size, self._width
        # A suffix of v devices starts at most v stages' widths before the end, and leaves a layer to each stage.
        low, least_stages = max(0, size - total * width), -(-total // self._costs.device_counts[-1])
        firsts = slice(low, size - least_stages + 1)
        kind = self._keys.index(key)
        # A suffix of v devices has v stages if stages have one device, and at least v / largest otherwise. This assumes
        # the least number, so memory limits may be broken.
        if not self._counted:
            costs = self._stage_costs(key, least_stages, firsts)
            self._improve(costs, kind, (rest, 0), (total, 0), firsts)
            return
        for num_stages in range(1, self.best.shape[2]):
            costs = self._stage_costs(key, num_stages, firsts)
            self._improve(costs, kind, (rest, num_stages - 1), (total, num_stages), firsts)

    def _improve(
        self, costs: Floats, kind: int, source: tuple[int, int], target: tuple[int, int], firsts: slice
    ) -> None:
        """Put a stage of one kind before the suffixes of `source`, where that improves those of `target`."""
        sums = self._combine(costs, self._windows(*source, firsts))
        found, best = sums.min(axis=0), self.best[target[0], :, target[1], firsts]
        # The tightest bound is only a number: nothing traces it.
        if self._combine is np.maximum:
            np.minimum(best, found, out=best)
            return
        choice = self._choice[target[0], :, target[1], firsts]
        # The bias only decides between equal sums: it is no part of their value.
        sums += self._bias
        # With one kind of stage, each target has a single source.
        if len(self._keys) == 1:
            best[...], choice[...] = found, sums.argmin(axis=0)
            return
        better = found < best
        best[better] = found[better]
        choice[better] = sums.argmin(axis=0)[better] + kind * self._width

    def _windows(self, devices: int, num_stages: int, firsts: slice) -> Floats:
        """Return best[devices, :, num_stages, i + 1 + l] as a view at [l, query, i]."""
        # Rows of this view overlap in memory, so nothing may write to it.
        by_devices, by_query, by_stages, by_layer = self.best.strides
        offset = devices * by_devices + num_stages * by_stages + (firsts.start + 1) * by_layer
        shape = (self._width, self.best.shape[1], firsts.stop - firsts.start)
        return np.ndarray(shape, np.float64, self.best, offset, (by_layer, by_query, by_layer))

    def trace(self, queries: Sequence[int], devices: Sequence[int]) -> list[Cut]:
        """Return the cut behind the best value of each (query, devices)."""
        return [self._trace(query, total) for query, total in zip(queries, devices, strict=True)]

    def _trace(self, query: int, total: int) -> Cut:
        num_stages = int(self.best[total, query, :, 0].argmin())
        assert np.isfinite(self.best[total, query, num_stages, 0]), "no bound is tighter than the tightest possible"
        stops, counts, seconds = [], [], []
        first, left, most = 0, total, self._costs.device_counts[-1]
        choice = self._choice[:, query]
        while left:
            kind, layers = divmod(int(choice[left, num_stages, first]), self._width)
            after = num_stages if self._counted else -(-left // most)
            seconds.append(float(self._stages.table(self._keys[kind], after).seconds[layers, first]))
            first += layers + 1
            left -= self._keys[kind][0]
            # The axis of stages has length 1 unless they are counted.
            if self._counted:
                num_stages -= 1
            stops.append(first)
            counts.append(self._keys[kind][0])
        timing = Timing(first_s=math.fsum(seconds), next_s=max(seconds))
        return Cut(stops=tuple(stops), num_devices=tuple(counts), timing=timing)
