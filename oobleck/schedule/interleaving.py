"""Cuts pipelines into several chunks of layers a stage, for an interleaved schedule, where the timeline is shorter.

A cut begins with the most even chunks (those with the least sum of squared seconds), and is improved by moving single
layers over a boundary where that shortens the step's timeline.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from oobleck.plan import ScheduleKind
from oobleck.planner import PipelineTemplate, Profile, with_speed
from oobleck.planner.zero_bubble import LEAST_GAIN

from .choice import chosen_step_s, kind_for, step_s
from .cost import StageCost
from .costs_of_stages import stage_costs
from .step_flow import StepFlow, step_flow

# Stops are 0, and the layer at which each chunk stops.
_Stops = tuple[int, ...]

# This many rounds, with a microbatch for each stage, are evaluated; each further one takes a constant time.
_MOST_ROUNDS = 8
# Cuts are compared over this many rounds: their differences show in each.
_ROUNDS = 2
# Passes over the boundaries are few, as a recovery waits for them; each moves every boundary to its best place.
_PASSES = 2
# The even cut is improved for pipelines of up to this many chunks.
_MOST_CHUNKS = 16


def make_cutter(kind: ScheduleKind | None, num_chunks: int) -> Callable[[Profile], Interleaving] | None:
    """Return the function that makes a planner's cutter for a schedule; None for kinds with one chunk a stage.

    Without a `kind`, pipelines are cut where that saves time.
    """
    if kind not in (None, ScheduleKind.INTERLEAVED):
        return None
    return partial(Interleaving, num_chunks=num_chunks, always=kind is not None)


class Interleaving:
    """Cuts the templates of one profile into several chunks a stage. Remembers its results."""

    def __init__(self, profile: Profile, *, num_chunks: int, always: bool = False) -> None:
        """With `always`, cut wherever layers and memory suffice; else only where that saves time."""
        self._profile = profile
        self.num_chunks = num_chunks
        self.is_open = not always
        self._known: dict[tuple[object, int], PipelineTemplate] = {}
        self._steps_s: dict[tuple[object, ...], float] = {}
        self._most: dict[object, float] = {}
        self._of_speed: dict[float, Profile] = {}

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template cut into chunks, or the same object; O(L² · chunks), and a few timelines a boundary."""
        key = template.stages, num_microbatches
        if key not in self._known:
            self._known[key] = self._cut(template, num_microbatches)
        return self._known[key]

    def most_microbatches(self, template: PipelineTemplate) -> float:
        """Return how many microbatches of its own a template that is cut has memory for; infinity for any number."""
        if template.stages not in self._most:
            costs, most = stage_costs(self._profile, template), _ROUNDS * template.num_stages
            holds = partial(self._holds, template, costs)
            # More microbatches keep more in flight, up to those of a few rounds.
            found = most if holds(most) else bisect_left(range(1, most), True, key=lambda number: not holds(number))
            self._most[template.stages] = math.inf if found == most else found
        return self._most[template.stages]

    def step_s(self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] | None = None) -> float:
        """Return the event-exact seconds of a step under the best schedule, see `Cutter`; O(instructions)."""
        key = template.stages, num_microbatches, None if speeds is None else tuple(speeds)
        if key not in self._steps_s:
            profile: Profile | Sequence[Profile] = self._profile
            if speeds is not None:
                for speed in speeds:
                    if speed not in self._of_speed:
                        self._of_speed[speed] = with_speed(self._profile, speed)
                profile = [self._of_speed[speed] for speed in speeds]
            self._steps_s[key] = self._step_s(profile, template, num_microbatches)
        return self._steps_s[key]

    def _step_s(self, profile: Profile | Sequence[Profile], template: PipelineTemplate, num_microbatches: int) -> float:
        size = template.num_stages
        more = math.ceil(num_microbatches / size) - _MOST_ROUNDS
        if more > 0:  # whole rounds are left out, so that the last one keeps its microbatches, which may be fewer
            # The time of a round is the mean over the last half of those that are evaluated.
            most, fewer = num_microbatches - more * size, _MOST_ROUNDS // 2
            most_s = self._step_s(profile, template, most)
            return most_s + more / fewer * (most_s - self._step_s(profile, template, most - fewer * size))
        if not self.is_open:
            return step_s(kind_for(template, ScheduleKind.ONE_F_ONE_B), profile, template, num_microbatches)
        return chosen_step_s(profile, template, num_microbatches)

    def _cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        count = template.num_stages * self.num_chunks
        if template.num_stages == 1 or template.num_chunks > 1 or count > template.num_layers or not num_microbatches:
            return template
        best = self._improved(template, _even_stops(self._profile, template, count), num_microbatches)
        if best is None or not self.is_open:
            return best or template
        plain_s, interleaved_s = self.step_s(template, num_microbatches), self.step_s(best, num_microbatches)
        return best if interleaved_s <= (1 - LEAST_GAIN) * plain_s else template

    def _improved(self, template: PipelineTemplate, stops: _Stops, num_microbatches: int) -> PipelineTemplate | None:
        """Return the best cut near the first one; None where that does not fit, as then few around it do."""
        # More microbatches would not be in flight at once.
        flow = self._flow(template, min(num_microbatches, _ROUNDS * template.num_stages))

        def better(stops: _Stops, than: tuple[float, _Stops]) -> tuple[float, _Stops]:
            """Return a cut with its seconds if it fits and is faster than another, or as fast and sorts first."""
            costs = stage_costs(self._profile, _with_stops(template, stops))
            found = flow.step_s(costs), stops
            if found >= than:
                return than
            return found if self._fits(template, flow, costs) else than

        best = better(stops, (math.inf, ()))
        if best[0] == math.inf:
            return None
        for _ in range(_PASSES if len(stops) <= _MOST_CHUNKS + 1 else 0):
            before = best
            for index in range(1, len(stops) - 1):
                for moved in tuple(_moved(best[1], index)):
                    best = better(moved, best)
            if best == before:
                break
        return _with_stops(template, best[1])

    def _holds(self, template: PipelineTemplate, costs: Sequence[StageCost], num_microbatches: int) -> bool:
        return self._fits(template, self._flow(template, num_microbatches), costs)

    def _flow(self, template: PipelineTemplate, num_microbatches: int) -> StepFlow:
        return step_flow(
            ScheduleKind.INTERLEAVED,
            num_stages=template.num_stages,
            num_microbatches=num_microbatches,
            num_chunks=self.num_chunks,
        )

    def _fits(self, template: PipelineTemplate, flow: StepFlow, costs: Sequence[StageCost]) -> bool:
        device_bytes = self._profile.device.memory_bytes
        each = zip(flow.peak_memory_bytes(costs), template.stages, strict=False)
        return all(peak <= stage.num_devices * device_bytes for peak, stage in each)


def _even_stops(profile: Profile, template: PipelineTemplate, count: int) -> _Stops:
    """Return the cut into `count` chunks with the least sum of squared seconds; O(L² · count)."""
    size, num_layers = template.num_stages, template.num_layers
    sums = [
        (0.0, *accumulate(layer.forward_s[devices] + layer.backward_s[devices] for layer in profile.layers))
        for devices in (stage.num_devices for stage in template.stages)
    ]
    # The best cut of the layers before each layer, into the chunks so far.
    best: list[tuple[float, _Stops]] = [(0.0, (0,))] + [(float("inf"), ())] * num_layers
    for chunk in range(count):
        table = sums[chunk % size]
        best = [
            min(
                (
                    (best[first][0] + (table[stop] - table[first]) ** 2, (*best[first][1], stop))
                    for first in range(chunk, stop)
                ),
                default=(float("inf"), ()),
            )
            for stop in range(num_layers + 1)
        ]
    return best[num_layers][1]


def _moved(stops: _Stops, index: int) -> Iterator[_Stops]:
    """Yield the cuts that move one boundary by one layer."""
    for moved in (stops[index] - 1, stops[index] + 1):
        if stops[index - 1] < moved < stops[index + 1]:
            yield (*stops[:index], moved, *stops[index + 1 :])


def _with_stops(template: PipelineTemplate, stops: Sequence[int]) -> PipelineTemplate:
    size = template.num_stages
    return PipelineTemplate(
        stages=tuple(
            replace(template.stages[chunk % size], first_layer=first, stop_layer=stop)
            for chunk, (first, stop) in enumerate(pairwise(stops))
        )
    )
