"""Which schedule a pipeline runs, where that is left open: 1F1B, or the zero-bubble kind where it saves time.

The timeline decides, with the costs of a backward pass in two parts as they were measured. A pipeline that was cut
into several chunks a stage is interleaved: whether to cut it so was decided before
(`interleaving.py`). Like `forecast`, this is apart from the package's own names, since it brings the planner's cost
model along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.plan import ScheduleKind
from oobleck.planner import PipelineTemplate, Profile

from .compile import compile_schedule
from .costs_of_stages import profiles_of_stages, stage_costs
from .step_flow import StepFlow, step_flow
from .timeline import Timeline, timeline

LEAST_GAIN = 0.01
"""Another schedule than 1F1B has to save this share of a step: times are measured, and it holds more activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    """A pipeline's schedule, on the timeline."""

    timeline: Timeline
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
    kind, saved, _ = _choose(profile, template, num_microbatches, reduce_s, reserved_memory_bytes)
    found = evaluate(kind, profile, template, num_microbatches, reduce_s=reduce_s)
    return ScheduleChoice(timeline=found, saved=saved)


def chosen_step_s(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    *,
    reserved_memory_bytes: int = 0,
) -> float:
    """Return the seconds of a step under the schedule that would be chosen, without the reduction; O(instructions)."""
    return _choose(profile, template, num_microbatches, 0.0, reserved_memory_bytes)[-1]


def _choose(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    reduce_s: float,
    reserved_memory_bytes: int,
) -> tuple[ScheduleKind, float, float]:
    """Return a pipeline's schedule, the share of 1F1B's step that it saves, and the seconds of its step."""
    plain_kind = kind_for(template, ScheduleKind.ONE_F_ONE_B)
    plain_s = step_s(plain_kind, profile, template, num_microbatches)
    if template.num_stages == 1 or template.num_chunks > 1 or not num_microbatches:
        return plain_kind, 0.0, plain_s
    flow = _flow(ScheduleKind.ZERO_BUBBLE, template, num_microbatches)
    costs = stage_costs(profile, template, splits=True)
    split_s = flow.step_s(costs)
    saved = 1 - (split_s + reduce_s) / plain_s
    if saved < LEAST_GAIN or not _has_room(
        flow.peak_memory_bytes(costs), profile, template, reserved_memory_bytes=reserved_memory_bytes
    ):
        return plain_kind, 0.0, plain_s
    return ScheduleKind.ZERO_BUBBLE, saved, split_s


def step_s(
    kind: ScheduleKind, profile: Profile | Sequence[Profile], template: PipelineTemplate, num_microbatches: int
) -> float:
    """Return the seconds of a step, those of its timeline, without the reduction."""
    costs = stage_costs(profile, template, splits=kind is ScheduleKind.ZERO_BUBBLE)
    return _flow(kind, template, num_microbatches).step_s(costs)


def _flow(kind: ScheduleKind, template: PipelineTemplate, num_microbatches: int) -> StepFlow:
    return step_flow(
        kind, num_stages=template.num_stages, num_microbatches=num_microbatches, num_chunks=template.num_chunks
    )


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
        kind, num_stages=template.num_stages, num_microbatches=num_microbatches, num_chunks=template.num_chunks
    )
    return timeline(
        schedule, stage_costs(profile, template, reduce_s=reduce_s, splits=kind is ScheduleKind.ZERO_BUBBLE)
    )


def fits(
    found: Timeline, profile: Profile | Sequence[Profile], template: PipelineTemplate, *, reserved_memory_bytes: int = 0
) -> bool:
    """Tell whether every stage's devices hold what the timeline says at its fullest."""
    return _has_room(found.peak_memory_bytes, profile, template, reserved_memory_bytes=reserved_memory_bytes)


def _has_room(
    peak_memory_bytes: Sequence[int],
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    *,
    reserved_memory_bytes: int,
) -> bool:
    each = zip(peak_memory_bytes, template.stages, profiles_of_stages(profile, template), strict=False)
    return all(
        peak <= stage.num_devices * (own.device.memory_bytes - reserved_memory_bytes) for peak, stage, own in each
    )
