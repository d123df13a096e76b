"""The search for pipelines over several kinds of nodes, for all numbers of nodes of each kind at once.

The objective is the planner's `sum(w) + (m - 1) * max(w)`, with w the seconds of a stage on its own kind. Under a bound
on max(w), a dynamic programme from the right gives the least sum(w) for every (a, b, …) nodes of each kind: a stage
before a suffix adds its device to a node of its kind, and each order of kinds is a path. So it is exact over all orders
and all cuts. A suffix is full, or has j devices of a node of some kind in use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from oobleck.plan import PipelineTemplate, StageTemplate
from oobleck.planner.costs import Timing
from oobleck.planner.kinds import Counts, Form, KindCosts
from oobleck.planner.tables import Floats

from .choice import Ints, at

# This many bounds are tried first, to know a good pipeline for all numbers of nodes.
_COARSE = 24
_CHUNK = 64
_EQUAL = 1e-12

_Flags = NDArray[np.bool_]
# A mode is a kind, and the devices of its first node that a suffix uses; (0, 0) where all nodes are full.
_Mode = tuple[int, int]
_FULL: _Mode = (0, 0)


@dataclass(frozen=True, slots=True)
class _Stages:
    costs: KindCosts
    depth: Ints
    """The stages of a full suffix, at [nodes of each kind]."""
    tables: dict[tuple[int, bool, bool], Floats]
    """The seconds of each stage, by kind and whether its left and right neighbours are on the same node."""
    least: tuple[Floats, ...]
    """For each kind, at [i, j] the least seconds of a stage that starts at layer i and ends at j or later."""


class MixedSearch:
    """The best pipelines for up to `most` nodes of each kind."""

    def __init__(self, costs: KindCosts, most: Sequence[int]) -> None:
        self._costs = costs
        self._shape = tuple(number + 1 for number in most)
        depth = np.tensordot(np.array(costs.devices), np.indices(self._shape), axes=1)
        tables = {
            (kind, left, right): costs.of[kind].seconds(1, left_same_node=left, right_same_node=right)
            for kind, left, right in product(range(len(most)), (False, True), (False, True))
        }
        least = (
            np.min([table for key, table in tables.items() if key[0] == kind], axis=0) for kind in range(len(most))
        )
        self._stages = _Stages(
            costs, depth, tables, tuple(np.minimum.accumulate(table[:, ::-1], axis=1)[:, ::-1] for table in least)
        )
        per_device = costs.settings.microbatches_per_device
        self._rounds = np.maximum(np.minimum(per_device * depth, costs.of[0].max_in_flight), 1) - 1
        self._best = np.full(self._shape, np.inf)
        self._bound = np.full(self._shape, np.nan)
        self._find()

    def counts(self) -> list[Counts]:
        """Return the numbers of nodes of each kind that can form a pipeline, sorted."""
        return [tuple(int(number) for number in counts) for counts in np.argwhere(np.isfinite(self._best))]

    @property
    def most_microbatches(self) -> float:
        """How many microbatches of its own a pipeline has memory for: any number, if those of a whole step."""
        most = self._costs.of[0].max_in_flight
        return math.inf if most == self._costs.settings.num_microbatches else most

    def timing(self, counts: Counts) -> Timing:
        bound, rounds = float(self._bound[counts]), int(self._rounds[counts])
        if not rounds:
            return self._costs.timing(self.template(counts))
        return Timing(first_s=float(self._best[counts]) - rounds * bound, next_s=bound)

    def template(self, counts: Counts) -> Form:
        return self.templates([counts])[counts]

    def templates(self, wanted: Sequence[Counts]) -> dict[Counts, Form]:
        """Return the pipelines of these nodes; several take little longer than one."""
        bounds = np.unique([self._bound[counts] for counts in wanted])
        run = _Run(self._stages, bounds)
        return {counts: run.template(counts, int(np.searchsorted(bounds, self._bound[counts]))) for counts in wanted}

    def _find(self) -> None:
        tightest = self._run(np.array([np.inf]), np.maximum)[0].ravel()
        # The pipeline of no nodes at all has no stage, and no bound.
        tightest[0] = np.inf
        possible = np.isfinite(tightest)
        if not possible.any():
            return
        values = self._values()
        tried: list[tuple[int, Floats]] = []
        first = np.unique(np.searchsorted(values, tightest[possible] * (1 - _EQUAL)))
        # For a single microbatch the least sum is best, whatever the slowest stage.
        indices = {*first[:: max(1, len(first) // _COARSE)].tolist(), int(first[-1]), len(values) - 1}
        while indices:
            untried = sorted(indices)
            for start in range(0, len(untried), _CHUNK):
                chunk = untried[start : start + _CHUNK]
                tried += zip(chunk, self._try(values[chunk]), strict=True)
            tried.sort(key=lambda pair: pair[0])
            indices = self._wanted(values, tried, possible & (self._rounds.ravel() > 0))

    def _wanted(self, values: Floats, tried: list[tuple[int, Floats]], open_: _Flags) -> set[int]:
        """Return bounds that may still be better, some of each range between two that were tried."""
        wanted: list[int] = []
        before = -1
        for index, sums in tried:
            # Sums grow towards tighter bounds, so this sum limits the slowest stage of every better pipeline below.
            # No better pipeline below a bound has a slower stage than (best - least sum) / (m - 1).
            room = (self._best.ravel()[open_] - sums[open_]) / self._rounds.ravel()[open_]
            limit_s = float(room.max(where=np.isfinite(room), initial=0.0)) * (1 - _EQUAL)
            wanted += range(before + 1, min(index, int(np.searchsorted(values, limit_s))))
            before = index
        return set(wanted[:: max(1, -(-len(wanted) // _CHUNK))])

    def _values(self) -> Floats:
        """Return the possible seconds of a stage in order, the largest of almost equal ones."""
        values = np.unique(np.concatenate([table[np.isfinite(table)] for table in self._stages.tables.values()]))
        last_of_group: _Flags = np.append(values[1:] > values[:-1] * (1 + _EQUAL), True)
        distinct: Floats = values[last_of_group]
        return distinct

    def _try(self, bounds: Floats) -> list[Floats]:
        """Try bounds and keep better pipelines; return the least sums under each bound."""
        sums = self._run(bounds)
        sums[at(slice(None), *(0,) * len(self._shape))] = np.inf
        steps = sums + self._rounds[None] * bounds.reshape(-1, *(1,) * len(self._shape))
        fastest = steps.argmin(axis=0)
        found = np.take_along_axis(steps, fastest[None], 0)[0]
        better = found < self._best * (1 - _EQUAL)
        self._best[better], self._bound[better] = found[better], bounds[fastest][better]
        return [each.ravel() for each in sums]

    def _run(self, bounds: Floats, combine: np.ufunc = np.add) -> Floats:
        sums: Floats = _Run(self._stages, bounds, combine).suffixes[_FULL][0]
        return sums


class _Run:
    """The programme for ascending bounds; suffixes by mode as [first layer, bound, nodes of each kind …]."""

    def __init__(self, stages: _Stages, bounds: Floats, combine: np.ufunc = np.add) -> None:
        costs, depth = stages.costs, stages.depth
        self._costs, self._depth, self._tables, self._least = costs, depth, stages.tables, stages.least
        self._limits, self._combine = bounds * (1 + _EQUAL), combine
        size, shape = costs.num_layers, depth.shape
        modes = [_FULL, *((kind, j) for kind, number in enumerate(costs.devices) for j in range(1, number))]
        self.suffixes = {mode: np.full((size + 1, len(bounds), *shape), np.inf) for mode in modes}
        self.suffixes[_FULL][at(size, slice(None), *(0,) * len(shape))] = 0.0
        self._steps = [(*step, *self._parts(step[0], step[2])) for step in self._stage_steps()]
        self._deepest = int(depth.max()) + max(costs.devices)
        for first in range(size - 1, -1, -1):
            self._extend(first)

    def _stage_steps(self) -> Iterator[tuple[int, _Mode, _Mode, bool, bool]]:
        """Yield (kind, suffix before, suffix after, left and right neighbour on the node) for a stage to add."""
        for kind, devices in enumerate(self._costs.devices):
            for used in range(devices):
                source = (kind, used) if used else _FULL
                target = (kind, used + 1) if used + 1 < devices else _FULL
                yield kind, source, target, used + 1 < devices, used > 0

    def _parts(self, kind: int, target: _Mode) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the slices to read and to write suffixes: a stage that completes a node counts that node."""
        everything = [slice(None)] * self._depth.ndim
        source, written = everything.copy(), everything.copy()
        if target == _FULL:
            source[kind], written[kind] = slice(None, -1), slice(1, None)
        return tuple(source), tuple(written)

    def _extend(self, first: int) -> None:
        size, slowest = self._costs.num_layers, self._limits[-1]
        for stop in range(first + 1, size + 1):
            # `least` covers all later stops as well.
            if not any(least[first, stop] <= slowest for least in self._least):
                return
            for kind, source, target, left, right, read, written in self._steps:
                seconds = self._tables[kind, left, right][first, stop]
                # Bounds ascend, so those from here on allow the stage.
                start = int(np.searchsorted(self._limits, seconds))
                if start == len(self._limits):
                    continue
                values = self._combine(self.suffixes[source][at(stop, slice(start, None), *read)], seconds)
                if not self._fits_everywhere(kind, first, stop):
                    values[:, ~self._fits(kind, source, first, stop)[read]] = np.inf
                best = self.suffixes[target][at(first, slice(start, None), *written)]
                np.minimum(best, values, out=best)

    def _fits_everywhere(self, kind: int, first: int, stop: int) -> bool:
        most = self._costs.of[kind].most_in_flight(1)[first, stop]
        return bool(most >= self._costs.of[kind].in_flight(self._deepest))

    def _fits(self, kind: int, source: _Mode, first: int, stop: int) -> _Flags:
        """Return for each suffix whether a stage before it holds its microbatches in flight."""
        in_flight = np.minimum(self._depth + source[1] + 1, self._costs.of[kind].max_in_flight)
        fits: _Flags = in_flight <= self._costs.of[kind].most_in_flight(1)[first, stop]
        return fits

    def template(self, counts: Counts, bound: int) -> Form:
        """Return the pipeline behind the least sum under the bound with this index."""
        stages: list[StageTemplate] = []
        kinds: list[int] = []
        first, mode, left = 0, _FULL, counts
        while first < self._costs.num_layers:
            stop, kind, source, before = self._step_back(first, mode, left, bound)
            if mode == _FULL:
                kinds.append(kind)
            # A suffix uses the last devices of its first node.
            device = self._costs.devices[kind] - (mode[1] or self._costs.devices[kind])
            stages.append(
                StageTemplate(first_layer=first, stop_layer=stop, node_index=len(kinds) - 1, first_device=device)
            )
            first, mode, left = stop, source, before
        return Form(template=PipelineTemplate(stages=tuple(stages)), kinds=tuple(kinds))

    def _step_back(self, first: int, mode: _Mode, counts: Counts, bound: int) -> tuple[int, int, _Mode, Counts]:
        """Return the stage that makes the best suffix, the longest of equal ones, and the suffix after it."""
        value = self.suffixes[mode][at(first, bound, *counts)]
        for stop, step in product(range(self._costs.num_layers, first, -1), self._steps):
            kind, source, target, left, right = step[:5]
            seconds = self._tables[kind, left, right][first, stop]
            before = tuple(number - (target == _FULL and k == kind) for k, number in enumerate(counts))
            if target != mode or min(before) < 0 or seconds > self._limits[bound]:
                continue
            # The same additions in the same order: equal to the last bit.
            is_it = self.suffixes[source][at(stop, bound, *before)] + seconds == value
            if is_it and self._fits(kind, source, first, stop)[before]:
                return stop, kind, source, before
        raise AssertionError("a suffix has a first stage")
