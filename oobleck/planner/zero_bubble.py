"""Backward passes in two parts, as the zero-bubble schedule has them: their seconds, and whether they fit the memory.

Every stage but the first sends the gradient of its input before it computes the gradients of its weights, which wait
for as many microbatches as there are stages before it (`schedule/orders.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.plan import PipelineTemplate

from .costs import StageCosts
from .tables import Floats, prefix_sums

LEAST_GAIN = 0.03
"""The share of a step that another schedule than 1F1B must save: as measured, zero-bubble took up to 0.04 more of
1F1B's time than its timeline, and it holds more activations."""

Stops = NDArray[np.int64]
"""[candidate, S + 1]: 0, and where each stage stops."""


class SplitPasses:
    def __init__(self, costs: StageCosts) -> None:
        self._costs = costs
        parts = [layer.split for layer in costs.profile.layers]
        self._measured = prefix_sums([part is not None for part in parts])
        self._forward = prefix_sums([part.forward_s if part else 0.0 for part in parts])
        self._input = prefix_sums([part.backward_input_s if part else 0.0 for part in parts])
        self._weight = prefix_sums([part.backward_weight_s if part else 0.0 for part in parts])
        self._kept = prefix_sums([part.kept_bytes if part else 0 for part in parts])

    def _are_measured(self, template: PipelineTemplate, stops: Stops, index: int) -> NDArray[np.bool_]:
        first, stop = stops[:, index], stops[:, index + 1]
        # Parts were measured with one device to a stage.
        if index == 0 or template.stages[index].num_devices > 1:
            return np.zeros(len(stops), dtype=bool)
        are_measured: NDArray[np.bool_] = self._measured[stop] - self._measured[first] == stop - first
        return are_measured

    def seconds(
        self, template: PipelineTemplate, stops: Stops, forward: Floats, backward: Floats, speeds: Sequence[float]
    ) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of forward passes, and of both parts of backward passes, [stage, candidate].

        `forward` and `backward` are those of whole passes, as slow as the nodes' `speeds` make them.
        """
        forward, inputs, weights = forward.copy(), backward.copy(), np.zeros_like(backward)
        for index, stage in enumerate(template.stages):
            if index == 0:
                continue
            first, stop, speed = stops[:, index], stops[:, index + 1], speeds[stage.node_index] if speeds else 1.0
            measured = self._are_measured(template, stops, index)
            half = backward[index] / 2
            for own, sums, otherwise in (
                (forward, self._forward, forward[index]),
                (inputs, self._input, half),
                (weights, self._weight, half),
            ):
                own[index] = np.where(measured, (sums[stop] - sums[first]) / speed, otherwise)
        return forward, inputs, weights

    def fit(self, template: PipelineTemplate, stops: Stops, num_microbatches: int) -> NDArray[np.bool_]:
        """Return whether every stage of each candidate has memory for its microbatches; never too favourably."""
        size, fits = template.num_stages, np.ones(len(stops), dtype=bool)
        for index, stage in enumerate(template.stages):
            first, stop = stops[:, index], stops[:, index + 1]
            room, each = self._costs.room(stage.num_devices, first, stop)
            kept = np.where(self._are_measured(template, stops, index), self._kept[stop] - self._kept[first], each)
            whole = min(size - index, num_microbatches)
            waiting = min(index, num_microbatches - whole)
            # A backward pass that leaves more than it takes away adds one that waits.
            more = np.where(kept > each, min(index + 1, num_microbatches) * kept + whole * (kept - each), 0.0)
            fits &= np.maximum(whole * each + waiting * kept, whole * each + more) <= room
        return fits
