"""The event-exact time of steps of 1F1B and zero-bubble, for many ways to cut the layers at once.

The planner's searches bound a step by `sum(w) + (m - 1) * max(w)`, with messages counted as work of the sending
stages. Here a pass waits for the previous pass on its stage and for its message, and a message occupies only its link:
the rules and the seconds of a schedule's timeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oobleck.plan import PipelineTemplate, StageTemplate

from .costs import StageCosts, closing_s, cut_seconds
from .tables import Floats, prefix_sums
from .zero_bubble import LEAST_GAIN, SplitPasses, Stops

MOST_ROUNDS = 8
"""With this many microbatches for each stage, each further one takes a constant time."""
_ROUNDING = 1e-9


def stops_of(template: PipelineTemplate) -> Stops:
    """Return a template's cut as one candidate."""
    return np.array([[0, *(stage.stop_layer for stage in template.stages)]], dtype=np.int64)


# [stage, candidate] each.
_Passes = tuple[Floats, Floats, Floats, Floats]
"""Seconds of forward and backward passes, of the messages between stages, and of what follows when a
backward pass has sent its gradient: nothing under 1F1B."""


class PassTimes:
    def __init__(self, costs: StageCosts, *, splits: bool = False) -> None:
        """With `splits`, a pipeline takes the zero-bubble schedule where `schedule/choice.py` would."""
        profile, device_counts, layers = costs.profile, costs.device_counts, costs.profile.layers
        self._costs = costs
        self._lines: dict[object, tuple[Floats, Floats]] = {}
        self._forward = {n: prefix_sums([layer.forward_s[n] for layer in layers]) for n in device_counts}
        self._backward = {n: prefix_sums([layer.backward_s[n] for layer in layers]) for n in device_counts}
        self._messages = {
            same_node: np.array(
                [0.0, *(cut_seconds(profile.network, layer.output_bytes, same_node=same_node) for layer in layers)]
            )
            for same_node in (False, True)
        }
        # What a stage recomputes is chosen for as many microbatches in flight as 1F1B has.
        self._split = SplitPasses(costs) if splits and not costs.recomputes else None

    def step_s(
        self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] = (), *, reduce_s: float = 0.0
    ) -> float:
        """Return the seconds of one step of a pipeline, without the reduction; `speeds` (0.5: half) are by node."""
        key = template.stages, tuple(speeds)
        return float(self._chosen_s(template, stops_of(template), num_microbatches, speeds, reduce_s, key)[0])

    def steps_s(
        self,
        template: PipelineTemplate,
        stops: Stops,
        num_microbatches: int,
        speeds: Sequence[float] = (),
        *,
        reduce_s: float | Floats = 0.0,
        below_s: Floats | None = None,
    ) -> Floats:
        """Return the seconds of a step for each candidate cut of the template; O(S · m) for m microbatches.

        `reduce_s` are those in which a step's gradients are reduced, which the choice of a schedule depends on. Where
        it is sure that a step takes `below_s` seconds or more, its time may be infinite: that saves most of the work.
        """
        if below_s is None or self._split is not None or num_microbatches > MOST_ROUNDS * template.num_stages:
            return self._chosen_s(template, stops, num_microbatches, speeds, reduce_s, None)
        passes, closings_s = self._passes(template, stops, speeds), self._costs.closings_s(template, stops)
        open_ = _least_s(passes, num_microbatches) + closings_s < below_s
        steps_s = np.full(len(stops), np.inf)
        if open_.any():
            forward, backward, messages, weights = (part[:, open_] for part in passes)
            steps_s[open_] = _makespans(forward, backward, messages, weights, num_microbatches) + closings_s[open_]
        return steps_s

    def _chosen_s(
        self,
        template: PipelineTemplate,
        stops: Stops,
        num_microbatches: int,
        speeds: Sequence[float],
        reduce_s: float | Floats,
        key: object,
    ) -> Floats:
        plain, size = self._passes(template, stops, speeds), len(stops)
        fits = None
        if self._split is not None and template.num_stages > 1:
            fits = self._split.fit(template, stops, num_microbatches)
        if self._split is None or fits is None or not fits.any():
            found = self._steps_s(plain, num_microbatches, key)
        else:
            parts = self._split.seconds(template, stops, *plain[:2], speeds)
            split = *parts[:2], plain[2], parts[2]
            both: _Passes = tuple(map(np.hstack, zip(plain, split, strict=True)))  # type: ignore[assignment]
            steps_s = self._steps_s(both, num_microbatches, key and (key, "both"))
            plain_s, split_s = steps_s[:size], steps_s[size:]
            # As in `schedule/choice.py`.
            hidden_s = np.minimum(reduce_s, plain[1].max(axis=0))
            saves = split_s + reduce_s <= (1 - LEAST_GAIN) * (plain_s + reduce_s - hidden_s)
            found = np.where(fits & saves, split_s, plain_s)
        whole_s: Floats = found + self._costs.closings_s(template, stops)
        return whole_s

    def _steps_s(self, passes: _Passes, num_microbatches: int, key: object) -> Floats:
        """Return the seconds of a step without exchanges; `key` remembers what long steps have in common."""
        if key is None or num_microbatches <= MOST_ROUNDS * len(passes[0]):
            return _steps_s(passes, num_microbatches)
        if key not in self._lines:
            self._lines[key] = _line(passes)
        return _steps_s(passes, num_microbatches, self._lines[key])

    def passes(self, template: PipelineTemplate, speeds: Sequence[float] = ()) -> _Passes:
        """Return the passes of a template as it is cut."""
        return self._passes(template, stops_of(template), speeds)

    def closing_s(self, stage: StageTemplate) -> float:
        """Return the seconds of a step after a whole stage's last pass, but for the reduction."""
        return closing_s(self._costs.profile, [stage])

    def _passes(self, template: PipelineTemplate, stops: Stops, speeds: Sequence[float]) -> _Passes:
        stages = template.stages
        forward, backward = np.empty((2, len(stages), len(stops)))
        most = self._costs.most_of_cuts(template, stops) if self._costs.recomputes else None
        for index, stage in enumerate(stages):
            first, stop = stops[:, index], stops[:, index + 1]
            forward[index] = self._forward[stage.num_devices][stop] - self._forward[stage.num_devices][first]
            backward[index] = self._backward[stage.num_devices][stop] - self._backward[stage.num_devices][first]
            if most is not None:
                in_flight = np.maximum(np.minimum(self._costs.in_flight(len(stages) - index), most), 1)
                for number in np.unique(in_flight):
                    own = in_flight == number
                    more_s = self._costs.recomputing_s(stage.num_devices, int(number))
                    backward[index, own] += more_s[first[own], stop[own]]
            if speeds:
                forward[index] /= speeds[stage.node_index]
                backward[index] /= speeds[stage.node_index]
        messages = np.zeros((len(stages) - 1, len(stops)))
        for index in range(len(stages) - 1):
            same_node = stages[index].node_index == stages[index + 1].node_index
            messages[index] = self._messages[same_node][stops[:, index + 1]]
        return forward, backward, messages, np.zeros_like(backward)


def step_over_kinds_s(
    times: Sequence[PassTimes], template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] = ()
) -> float:
    """Return the seconds of one 1F1B step of a pipeline whose nodes have times of their own, without the reduction.

    Stages are whole, and messages between nodes take the same time on all of them.
    """
    own_of = [times[stage.node_index] for stage in template.stages]
    known = {id(own): own.passes(template, speeds) for own in own_of}
    rows = [[each[index : index + 1] for each in known[id(own)]] for index, own in enumerate(own_of)]
    forward, backward, messages, weights = (np.concatenate(each) for each in zip(*rows, strict=True))
    passes_s = _steps_s((forward, backward, messages, weights), num_microbatches)
    return float(passes_s[0]) + max(map(PassTimes.closing_s, own_of, template.stages))


def _steps_s(passes: _Passes, num_microbatches: int, line: tuple[Floats, Floats] | None = None) -> Floats:
    """Return the seconds of a step without exchanges; `line` is what long steps have in common, where that is known."""
    most = MOST_ROUNDS * len(passes[0])
    if num_microbatches <= most:
        return _makespans(*passes, num_microbatches)
    first_s, next_s = line or _line(passes)
    steps_s: Floats = first_s + (num_microbatches - most) * next_s
    return steps_s


def _line(passes: _Passes) -> tuple[Floats, Floats]:
    """Return the seconds of a step of `MOST_ROUNDS` microbatches for each stage, and those of each further one."""
    most = MOST_ROUNDS * len(passes[0])
    most_s = _makespans(*passes, most)
    # The difference leaves out the warm-up and the drain, which both runs have.
    return most_s, (most_s - _makespans(*passes, most // 2)) / (most - most // 2)


def _least_s(passes: _Passes, num_microbatches: int) -> Floats:
    """Return seconds that a step of 1F1B takes at least, rounding included; O(S)."""
    forward, backward, messages, _ = passes
    # A stage does all its passes between the first one's way to it and the last one's way back.
    ways = forward[:-1] + backward[:-1] + 2 * messages
    least_s = num_microbatches * (forward + backward)
    least_s[1:] += np.cumsum(ways, axis=0)
    found: Floats = least_s.max(axis=0) * (1 - _ROUNDING)
    return found


def _makespans(forward: Floats, backward: Floats, messages: Floats, weights: Floats, num_microbatches: int) -> Floats:
    """Return when the last stage ends."""
    makespans: Floats = stage_ends_s(forward, backward, messages, weights, num_microbatches).max(axis=0)
    return makespans


def stage_ends_s(forward: Floats, backward: Floats, messages: Floats, weights: Floats, num_microbatches: int) -> Floats:
    """Return when each stage ends its last pass, for [stage, candidate] seconds; equal to a timeline's to the last bit.

    `messages` are between stages, the same in both directions; `weights` follow a backward pass that has sent its
    gradient, under zero-bubble. O(S · m).
    """
    size, width = forward.shape
    last = num_microbatches - 1
    # Stage s sends forward over link s + 1 and back over link s; the outer links carry nothing.
    links = np.concatenate([np.zeros((1, width)), messages, np.zeros((1, width))])
    splits = bool(weights.any())
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
            # The gradients of a stage's weights lag by a microbatch for each earlier stage. This is microbatch
            # (slot - 2S + 1 + s) / 2, which is s or more from stage 0 up to this one.
            if splits and first <= (last_lagging := slot - 2 * size + 1):
                lagging = slice(first, min(stop, last_lagging + 1), 2)
                now[lagging] += weights[lagging]
    if splits:
        now += np.minimum(np.arange(size), num_microbatches)[:, None] * weights
    return now


def _stages(low: int, high: int, like: int, size: int) -> tuple[int, int]:
    """Return the bounds of the stages from `low` to `high` that are even or odd as `like` is."""
    first = max(low, 0)
    return first + (first - like) % 2, min(high, size - 1) + 1
