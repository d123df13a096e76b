"""Pipelines cut for an interleaved schedule: several chunks of layers a stage, where the timeline shows that it pays.

A cut begins with the most even chunks (their squared seconds add up to the least, found exactly), and is improved by
moving single layers over a boundary where the timeline of the step becomes shorter. Like `forecast`, this is apart
from the package's own names, since it brings the planner's cost model along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from oobleck.planner import PipelineTemplate, Profile

from .choice import LEAST_GAIN, choose_schedule, evaluate, fits, kind_for
from .schedule import ScheduleKind

__all__ = ["Interleaving", "make_cutter"]

_Stops = tuple[int, ...]
"""0, and where each chunk stops."""

_MOST_ROUNDS = 8
"""Beyond so many microbatches for each stage, the time of each further one is taken as constant."""
_ROUNDS = 2
"""With so many microbatches for each stage cuts are compared: what differs between them shows in each round."""
_PASSES = 2
"""Over the boundaries, each of which is moved to where it is best beside the others: a recovery waits for it."""
_MOST_CHUNKS = 16
"""Where a pipeline has more, the even cut is taken as it is."""


def make_cutter(kind: ScheduleKind | None, num_chunks: int) -> Callable[[Profile], Interleaving] | None:
    """Return what a planner is to cut its pipelines with for a schedule: None for those of one chunk a stage.

    Without a `kind`, plans choose: pipelines are cut where that saves time.
    """
    if kind not in (None, ScheduleKind.INTERLEAVED):
        return None
    return partial(Interleaving, num_chunks=num_chunks, always=kind is not None)


class Interleaving:
    """Cuts the templates of one profile into several chunks a stage. Remembers what it has found; changes nothing."""

    def __init__(
        self, profile: Profile, *, num_chunks: int, always: bool = False, reserved_memory_bytes: int = 0
    ) -> None:
        """`always`, wherever there are layers and memory enough; else only where it saves time."""
        self._profile = profile
        self._num_chunks = num_chunks
        self._always = always
        self._reserved_memory_bytes = reserved_memory_bytes
        self._known: dict[tuple[object, int], PipelineTemplate] = {}

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template for steps of so many microbatches: cut into chunks, or the object that it is.

        O(L² · chunks) for L layers, and an evaluation of two rounds for each of a few cuts at every boundary, once for
        like numbers.
        """
        key = template.stages, num_microbatches
        if key not in self._known:
            self._known[key] = self._cut(template, num_microbatches)
        return self._known[key]

    def step_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        """Return the event-exact seconds of a step under the best schedule for a template as it is cut."""
        most = _MOST_ROUNDS * template.num_stages
        if num_microbatches <= most:
            return self._step_s(template, num_microbatches)
        most_s = self._step_s(template, most)
        return most_s + (num_microbatches - most) * (most_s - self._step_s(template, most // 2)) / (most - most // 2)

    def _step_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        reserved = self._reserved_memory_bytes
        if self._always:
            kind = kind_for(template, ScheduleKind.ONE_F_ONE_B)
            return evaluate(kind, self._profile, template, num_microbatches).makespan_s
        found = choose_schedule(self._profile, template, num_microbatches, reserved_memory_bytes=reserved)
        return found.timeline.makespan_s

    def _cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        count = template.num_stages * self._num_chunks
        if template.num_stages == 1 or template.num_chunks > 1 or count > template.num_layers or not num_microbatches:
            return template
        best = self._improved(template, _even_stops(self._profile, template, count), num_microbatches)
        if best is None or self._always:
            return best or template
        plain_s, interleaved_s = self.step_s(template, num_microbatches), self.step_s(best, num_microbatches)
        return best if interleaved_s <= (1 - LEAST_GAIN) * plain_s else template

    def _improved(self, template: PipelineTemplate, stops: _Stops, num_microbatches: int) -> PipelineTemplate | None:
        """Return the best cut that is found from one on; None where that does not fit, as then few around it do."""
        rounds = min(num_microbatches, _ROUNDS * template.num_stages)  # with more, no more are in flight

        def seconds(stops: _Stops) -> float:
            cut = _with_stops(template, stops)
            found = evaluate(ScheduleKind.INTERLEAVED, self._profile, cut, rounds)
            has_room = fits(found, self._profile, cut, reserved_memory_bytes=self._reserved_memory_bytes)
            return found.makespan_s if has_room else math.inf

        best_s = seconds(stops)
        if best_s == math.inf:
            return None
        for _ in range(_PASSES if len(stops) <= _MOST_CHUNKS + 1 else 0):
            before = stops
            for index in range(1, len(stops) - 1):
                best_s, stops = min([(best_s, stops), *((seconds(each), each) for each in _moved(stops, index))])
            if stops == before:
                break
        return _with_stops(template, stops)


def _even_stops(profile: Profile, template: PipelineTemplate, count: int) -> _Stops:
    """Return the cut into `count` chunks whose squared seconds add up to the least; O(L² · count)."""
    size, num_layers = template.num_stages, template.num_layers
    sums = [
        (0.0, *accumulate(layer.forward_s[devices] + layer.backward_s[devices] for layer in profile.layers))
        for devices in (stage.num_devices for stage in template.stages)
    ]
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
