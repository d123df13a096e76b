"""Which schedule a pipeline runs, where that is left open: 1F1B, or the zero-bubble kind where it saves time.

The timeline decides, with the costs of a backward pass in two parts as they were measured. A pipeline that was cut
into several chunks a stage is interleaved: whether to cut it so was decided before
(`interleaving.py`). Like `forecast`, this is apart from the package's own names, since it brings the planner's cost
model along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.planner import PipelineTemplate, Profile

from .compile import compile_schedule
from .costs_of_stages import profiles_of_stages, stage_costs
from .schedule import ScheduleKind
from .timeline import Timeline, timeline

__all__ = ["LEAST_GAIN", "ScheduleChoice", "choose_schedule", "evaluate", "fits", "kind_for"]

LEAST_GAIN = 0.01
"""Another schedule than 1F1B has to save this share of a step: times are measured, and it holds more activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """A pipeline's schedule, on the timeline."""

    timeline: Timeline
    """Of the schedule that was chosen."""
    saved: float
    """The share of 1F1B's step that it saves at least; 0 for 1F1B itself, and where stages have several chunks."""

    @property
    def kind(self) -> ScheduleKind:
        return self.timeline.schedule.kind


def kind_for(template: PipelineTemplate, kind: ScheduleKind) -> ScheduleKind:
    """Return what a pipeline runs where others run `kind`: interleaved with several chunks a stage, and only then."""
    if template.num_chunks > 1:
        return ScheduleKind.INTERLEAVED
    return ScheduleKind.ONE_F_ONE_B if kind is ScheduleKind.INTERLEAVED else kind


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
    plain_kind = kind_for(template, ScheduleKind.ONE_F_ONE_B)
    plain = evaluate(plain_kind, profile, template, num_microbatches, reduce_s=reduce_s)
    if template.num_stages == 1 or template.num_chunks > 1 or not num_microbatches:
        return ScheduleChoice(timeline=plain, saved=0.0)
    split = evaluate(ScheduleKind.ZERO_BUBBLE, profile, template, num_microbatches, reduce_s=reduce_s)
    saved = 1 - split.makespan_s / (plain.makespan_s - reduce_s)
    if saved < LEAST_GAIN or not fits(split, profile, template, reserved_memory_bytes=reserved_memory_bytes):
        return ScheduleChoice(timeline=plain, saved=0.0)
    return ScheduleChoice(timeline=split, saved=saved)


def evaluate(
    kind: ScheduleKind,
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    *,
    reduce_s: float = 0.0,
) -> Timeline:
    """Return the timeline of one pipeline under a kind that fits its chunks; `profile` is as for `stage_costs`."""
    schedule = compile_schedule(
        kind,
        num_stages=template.num_stages,
        num_microbatches=num_microbatches,
        num_chunks=template.num_chunks,
    )
    return timeline(
        schedule, stage_costs(profile, template, reduce_s=reduce_s, splits=kind is ScheduleKind.ZERO_BUBBLE)
    )


def fits(
    found: Timeline,
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    *,
    reserved_memory_bytes: int = 0,
) -> bool:
    """Tell whether every stage's devices hold what the timeline says at its fullest."""
    each = zip(found.peak_memory_bytes, template.stages, profiles_of_stages(profile, template), strict=False)
    return all(
        peak <= stage.num_devices * (own.device.memory_bytes - reserved_memory_bytes) for peak, stage, own in each
    )
