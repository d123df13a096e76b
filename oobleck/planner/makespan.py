"""The event-exact time of 1F1B steps, for many ways to cut the layers at once.

The planner's searches bound a step by `sum(w) + (m - 1) * max(w)`, with messages counted as work of the sending
stages. Here a pass waits for the previous pass on its stage and for its message, and a message occupies only its link:
the rules and the seconds of a schedule's timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.plan import PipelineTemplate

from .costs import StageCosts, cut_seconds
from .tables import Floats, prefix_sums

Stops = NDArray[np.int64]
"""[candidate, S + 1]: 0, and where each stage stops."""

MOST_ROUNDS = 8
"""With this many microbatches for each stage, each further one takes a constant time."""


def stops_of(template: PipelineTemplate) -> Stops:
    """Return a template's cut as one candidate."""
    return np.array([[0, *(stage.stop_layer for stage in template.stages)]], dtype=np.int64)


class PassTimes:
    def __init__(self, costs: StageCosts) -> None:
        profile, device_counts, layers = costs.profile, costs.device_counts, costs.profile.layers
        self._costs = costs
        self._lines: dict[object, tuple[float, float]] = {}
        self._forward = {n: prefix_sums([layer.forward_s[n] for layer in layers]) for n in device_counts}
        self._backward = {n: prefix_sums([layer.backward_s[n] for layer in layers]) for n in device_counts}
        self._messages = {
            same_node: np.array(
                [0.0, *(cut_seconds(profile.network, layer.output_bytes, same_node=same_node) for layer in layers)]
            )
            for same_node in (False, True)
        }

    def step_s(self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] = ()) -> float:
        """Return the seconds of one step of a pipeline, without the reduction; `speeds` (0.5: half) are by node."""
        stops, most = stops_of(template), MOST_ROUNDS * template.num_stages
        if num_microbatches <= most:
            return float(self.steps_s(template, stops, num_microbatches, speeds)[0])
        key = template.stages, tuple(speeds)
        if key not in self._lines:
            most_s, each_s = self._line(template, stops, speeds)
            self._lines[key] = float(most_s[0]), float(each_s[0])
        first_s, next_s = self._lines[key]
        return first_s + (num_microbatches - most) * next_s + self._costs.exchange_s(template)

    def steps_s(
        self, template: PipelineTemplate, stops: Stops, num_microbatches: int, speeds: Sequence[float] = ()
    ) -> Floats:
        """Return the seconds of a step for each candidate cut of the template; O(S · m) for m microbatches."""
        most, exchange_s = MOST_ROUNDS * template.num_stages, self._costs.exchanges_s(stops)
        if num_microbatches <= most:
            return _makespans(*self._passes(template, stops, speeds), num_microbatches) + exchange_s
        most_s, each_s = self._line(template, stops, speeds)
        steps_s: Floats = most_s + (num_microbatches - most) * each_s + exchange_s
        return steps_s

    def _line(self, template: PipelineTemplate, stops: Stops, speeds: Sequence[float]) -> tuple[Floats, Floats]:
        """Return the seconds of `MOST_ROUNDS` microbatches for each stage, and of each further microbatch."""
        passes, most = self._passes(template, stops, speeds), MOST_ROUNDS * template.num_stages
        most_s = _makespans(*passes, most)
        # The difference leaves out the warm-up and the drain, which both runs have.
        return most_s, (most_s - _makespans(*passes, most // 2)) / (most - most // 2)

    def _passes(
        self, template: PipelineTemplate, stops: Stops, speeds: Sequence[float]
    ) -> tuple[Floats, Floats, Floats]:
        """Return forward and backward seconds, [stage, candidate], and those of the messages between stages."""
        stages = template.stages
        forward, backward = np.empty((2, len(stages), len(stops)))
        for index, stage in enumerate(stages):
            first, stop = stops[:, index], stops[:, index + 1]
            forward[index] = self._forward[stage.num_devices][stop] - self._forward[stage.num_devices][first]
            backward[index] = self._backward[stage.num_devices][stop] - self._backward[stage.num_devices][first]
            if self._costs.recomputes:
                in_flight = self._costs.in_flight(len(stages) - index)
                backward[index] += self._costs.recomputing_s(stage.num_devices, in_flight)[first, stop]
            if speeds:
                forward[index] /= speeds[stage.node_index]
                backward[index] /= speeds[stage.node_index]
        messages = np.zeros((len(stages) - 1, len(stops)))
        for index in range(len(stages) - 1):
            same_node = stages[index].node_index == stages[index + 1].node_index
            messages[index] = self._messages[same_node][stops[:, index + 1]]
        return forward, backward, messages


def _makespans(forward: Floats, backward: Floats, messages: Floats, num_microbatches: int) -> Floats:
    """Return when the last stage ends."""
    size, width = forward.shape
    last = num_microbatches - 1
    # Stage s sends forward over link s + 1 and back over link s; the outer links carry nothing.
    links = np.concatenate([np.zeros((1, width)), messages, np.zeros((1, width))])
    # Arrivals at stage s from the previous stage, and at stage s - 1 from the next one.
    now, ahead, back = np.zeros((size, width)), np.zeros((size + 1, width)), np.zeros((size + 1, width))
    # Stages do their passes in lockstep. With s counted from 0 of S stages, the forward pass of microbatch i belongs to
    # slot 2i + s and its backward pass to slot 2i + 2S - 1 - s. So a pass waits for earlier slots only, and one slot is
    # a few numpy expressions over all stages of all candidates.
    for slot in range(2 * (last + size)):
        first, stop = _stages(slot - 2 * last, slot, slot, size)
        if first < stop:
            own, after = slice(first, stop, 2), slice(first + 1, stop + 1, 2)
            now[own] = np.maximum(now[own], ahead[own]) + forward[own]
            # The last arrival is also the moment when the link is free again.
            ahead[after] = np.maximum(now[own], ahead[after]) + links[after]
        turn = 2 * size - 1 - slot
        first, stop = _stages(turn, turn + 2 * last, turn, size)
        if first < stop:
            own, after = slice(first, stop, 2), slice(first + 1, stop + 1, 2)
            now[own] = np.maximum(now[own], back[after]) + backward[own]
            back[own] = np.maximum(now[own], back[own]) + links[own]
    makespans: Floats = now.max(axis=0)
    return makespans


def _stages(low: int, high: int, like: int, size: int) -> tuple[int, int]:
    """Return the bounds of the stages from `low` to `high` that are even or odd as `like` is."""
    first = max(low, 0)
    return first + (first - like) % 2, min(high, size - 1) + 1
