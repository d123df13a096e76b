"""Which schedule a pipeline runs, where that is left open: 1F1B, or the zero-bubble kind where it saves time.

The timeline decides, with the costs of a backward pass in two parts as they were measured. Like `forecast`, this is
apart from the package's own names, since it brings the planner's cost model along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.planner import PipelineTemplate, Profile

from .compile import compile_schedule
from .costs_of_stages import profiles_of_stages, stage_costs
from .schedule import ScheduleKind
from .timeline import Timeline, timeline

__all__ = ["LEAST_GAIN", "ScheduleChoice", "choose_schedule"]

LEAST_GAIN = 0.01
"""A zero-bubble schedule has to save this share of a step: times are measured, and it holds more activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """A pipeline's schedule, on the timeline."""

    timeline: Timeline
    """Of the schedule that was chosen."""
    saved: float
    """The share of 1F1B's step that it saves at least; 0 for 1F1B itself."""

    @property
    def kind(self) -> ScheduleKind:
        return self.timeline.schedule.kind


def choose_schedule(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    *,
    reduce_s: float = 0.0,
    reserved_memory_bytes: int = 0,
) -> ScheduleChoice:
    """Choose between 1F1B and zero-bubble for one pipeline by their timelines; `profile` is as for `stage_costs`.

    1F1B reduces gradients while the last backward pass runs, and is taken to hide all of it (`reduce_s`); zero-bubble
    is not, and must fit the memory of every stage's devices at its fullest. O(instructions).
    """
    plain = _evaluate(profile, template, num_microbatches, ScheduleKind.ONE_F_ONE_B, reduce_s)
    if template.num_stages == 1 or not num_microbatches:
        return ScheduleChoice(timeline=plain, saved=0.0)
    split = _evaluate(profile, template, num_microbatches, ScheduleKind.ZERO_BUBBLE, reduce_s)
    saved = 1 - split.makespan_s / (plain.makespan_s - reduce_s)
    fits = all(
        peak <= stage.num_devices * (own.device.memory_bytes - reserved_memory_bytes)
        for peak, stage, own in zip(
            split.peak_memory_bytes, template.stages, profiles_of_stages(profile, template), strict=True
        )
    )
    return (
        ScheduleChoice(timeline=split, saved=saved)
        if fits and saved >= LEAST_GAIN
        else ScheduleChoice(timeline=plain, saved=0.0)
    )


def _evaluate(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    kind: ScheduleKind,
    reduce_s: float,
) -> Timeline:
    return timeline(
        compile_schedule(kind, num_stages=template.num_stages, num_microbatches=num_microbatches),
        stage_costs(profile, template, reduce_s=reduce_s, splits=kind is ScheduleKind.ZERO_BUBBLE),
    )
