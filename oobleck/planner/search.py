"""The dynamic programme under the template search: the best ways to cut layers into stages, for all sizes at once.

A partial pipeline is a suffix: layers [i, L) on the last v devices. The programme goes from the right because
1F1B keeps as many microbatches in flight at a stage as there are stages from it to the end. One step adds a
stage of d devices before a suffix of v - d devices:

    best[v][i] = min over d, j > i of  cost(i, j, d) ∘ best[v - d][j]

with ∘ = max for the tightest bound on the slowest stage, and ∘ = + under such a bound for the least sum.
Many bounds are asked at once, as one more axis of the arrays, and layers beyond the longest stage that a bound
allows are left out. O(Q·V·L·W·D) for Q bounds, V devices, L layers, stages of at most W layers, D device counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .costs import Floats, StageCosts
from .plan import PipelineTemplate, StageTemplate

__all__ = ["StageSearch"]

_EVENNESS = 1e-9
"""Of equal sums the most even stages win: a stage costs w · (1 + 1e-9 · w / sum), so sums are exact to 1e-9."""


class _Table:
    """The stages that may stand at one position: seconds, cost and memory by [stage's layers - 1, first layer]."""

    def __init__(self, seconds: Floats, most_in_flight: Floats, scale_s: float) -> None:
        size = seconds.shape[0] - 1
        lengths, firsts = np.arange(1, size + 1)[:, None], np.arange(size)[None, :]
        stops = np.minimum(firsts + lengths, size)
        inside = firsts + lengths <= size
        self.seconds = np.where(inside, seconds[firsts, stops], np.inf)
        self.cost = self.seconds + (_EVENNESS / scale_s) * np.where(inside, self.seconds, 0.0) ** 2
        self.most_in_flight = np.where(inside, most_in_flight[firsts, stops], np.inf)


class StageSearch:
    """Searches the cuts of one cost table.

    With stages of one device, a suffix of v devices has v stages. With larger stages it has at least
    v / largest; the search then takes that least number (`counted=False`), and who finds that a result breaks
    the memory limit asks again with `counted=True`, which carries the number of stages along at L times the cost.
    """

    def __init__(self, costs: StageCosts, *, counted: bool = False) -> None:
        self._costs = costs
        self._counted = counted
        self._size = costs.num_layers
        scale_s = max(
            float(costs.seconds(count, left_same_node=False, right_same_node=False)[0, -1])
            for count in costs.device_counts
        )
        self._tables = {
            (count, left, right): _Table(
                costs.seconds(count, left_same_node=left, right_same_node=right),
                costs.most_in_flight(count),
                scale_s or 1.0,
            )
            for count in costs.device_counts
            for left in (False, True)
            for right in (False, True)
            if costs.devices_per_node > 1 or not (left or right)
        }
        self._quickest = np.min([table.seconds.min(axis=1) for table in self._tables.values()], axis=0)

    def tightest(self, num_devices: int) -> Floats:
        """Return the least possible seconds of the slowest stage, at [v] for pipelines of v devices."""
        return self._values(_Run(self, np.array([np.inf]), num_devices, np.maximum))

    def least_sums(self, num_devices: int) -> Floats:
        """Return the least sum of the stages' seconds, at [v] for pipelines of v devices."""
        return self._values(_Run(self, np.array([np.inf]), num_devices, np.add))

    def _values(self, run: _Run) -> Floats:
        values: Floats = run.best[:, 0, :, 0].min(axis=1)
        return values

    def least_sum_within(self, bounds: Sequence[float], devices: Sequence[int]) -> list[PipelineTemplate | None]:
        """Return, for each (bound, devices), the pipeline of the least sum whose stages all stay within the bound."""
        answers: list[PipelineTemplate | None] = [None] * len(bounds)
        for chunk in self._chunks(np.array(bounds), np.array(devices)):
            run = _Run(self, np.array(bounds)[chunk], int(np.array(devices)[chunk].max()), np.add)
            for query, template in zip(chunk, run.trace(np.array(devices)[chunk]), strict=True):
                answers[int(query)] = template
        return answers

    def _chunks(self, bounds: Floats, devices: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Group queries of similar size, so that none pays for a much larger one."""
        order = np.argsort(devices, kind="stable")
        chunks: list[list[int]] = []
        for query in order:
            if chunks and devices[query] <= 1.25 * devices[chunks[-1][0]] + 1 and len(chunks[-1]) < 32:
                chunks[-1].append(int(query))
            else:
                chunks.append([int(query)])
        return [np.array(chunk) for chunk in chunks]


class _Run:
    """One evaluation of the programme; `best` is [devices, query, stages, first layer].

    The axis of stages has length 1 unless they are counted; the axis of layers is padded with infinities.
    """

    def __init__(self, search: StageSearch, bounds: Floats, num_devices: int, combine: np.ufunc) -> None:
        self._search = search
        self._costs = search._costs
        self._bounds = bounds
        allowed = np.nonzero(search._quickest <= bounds.max())[0]
        self._width = int(allowed[-1]) + 1 if len(allowed) else 1
        size, depth = search._size, min(num_devices, search._size) + 1 if search._counted else 1
        self.best = np.full((num_devices + 1, len(bounds), depth, size + 1 + self._width), np.inf)
        self.best[0, :, 0, size] = 0.0
        self._combine = combine
        self._masked: dict[tuple[tuple[int, bool, bool], int], Floats] = {}
        for total in range(1, num_devices + 1):
            for key, rest in self._steps(total):
                self._extend(key, rest, total)

    def _steps(self, total: int) -> list[tuple[tuple[int, bool, bool], int]]:
        """Return ((devices, left same node, right same node), devices of the rest) of each possible last step."""
        per_node = self._costs.devices_per_node
        steps = []
        for count in self._costs.device_counts:
            rest = total - count
            if rest >= 0 and rest % per_node + count <= per_node:
                steps.append(((count, total % per_node != 0, rest % per_node != 0), rest))
        return steps

    def _least_in_flight(self, total: int) -> int:
        largest = self._costs.device_counts[-1]
        return self._costs.in_flight(-(-total // largest))

    def _stage_costs(self, key: tuple[int, bool, bool], in_flight: int) -> Floats:
        """Return the allowed stages' costs: [stage's layers - 1, query, first layer]."""
        if (masked := self._masked.get((key, in_flight))) is None:
            table = self._search._tables[key]
            seconds = table.seconds[: self._width]
            cost = seconds if self._combine is np.maximum else table.cost[: self._width]
            allowed = (seconds[:, None, :] <= self._bounds[None, :, None]) & (
                table.most_in_flight[: self._width] >= in_flight
            )[:, None, :]
            masked = np.where(allowed, cost[:, None, :], np.inf)
            self._masked[key, in_flight] = masked
        return masked

    def _extend(self, key: tuple[int, bool, bool], rest: int, total: int) -> None:
        size, width = self._search._size, self._width
        windows = np.lib.stride_tricks.sliding_window_view(self.best[rest, :, :, 1 : size + width], width, axis=-1)
        windows = np.moveaxis(windows, -1, 0)
        target = self.best[total, :, :, :size]
        if not self._search._counted:
            costs = self._stage_costs(key, self._least_in_flight(total))
            found = self._combine(costs[:, :, None, :], windows).min(axis=0)
            np.minimum(target, found, out=target)
            return
        for before in range(self.best.shape[2] - 1):
            costs = self._stage_costs(key, self._costs.in_flight(before + 1))
            found = self._combine(costs, windows[:, :, before]).min(axis=0)
            np.minimum(target[:, before + 1], found, out=target[:, before + 1])

    def trace(self, devices: NDArray[np.int64]) -> list[PipelineTemplate | None]:
        """Return the pipeline behind each query's best value at its number of devices."""
        return [self._trace_one(query, int(total)) for query, total in enumerate(devices)]

    def _trace_one(self, query: int, total: int) -> PipelineTemplate | None:
        depth = int(np.argmin(self.best[total, query, :, 0]))
        if not np.isfinite(self.best[total, query, depth, 0]):
            return None
        stages: list[StageTemplate] = []
        first, used, left = 0, 0, total
        while left:
            options = []
            for key, rest in self._steps(left):
                in_flight = self._costs.in_flight(depth) if self._search._counted else self._least_in_flight(left)
                costs = self._stage_costs(key, in_flight)[:, query, first]
                after = self.best[rest, query, max(depth - 1, 0), first + 1 : first + 1 + self._width]
                sums = costs + after
                best = int(sums.argmin())
                options.append((float(sums[best]), -key[0], best))
            _, negative_count, length = min(options)
            count = -negative_count
            stages.append(self._costs.stage(first, first + length + 1, used, count))
            first, used, left, depth = first + length + 1, used + count, left - count, max(depth - 1, 0)
        return PipelineTemplate(stages=tuple(stages))
