"""Chooses a pipeline's schedule where the job leaves that open: 1F1B, or the zero-bubble kind where it saves time.

The timeline decides, with measured costs of a backward pass in two parts. A pipeline with several chunks a stage is
interleaved, as decided before (`interleaving.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.plan import ScheduleKind
from oobleck.planner import PipelineTemplate, Profile
from oobleck.planner.zero_bubble import LEAST_GAIN

from .compile import compile_schedule
from .costs_of_stages import profiles_of_stages, stage_costs
from .step_flow import StepFlow, step_flow
from .timeline import Timeline, timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleChoice:
    timeline: Timeline
    saved: float
    """The share of 1F1B's step that it saves at least; 0 for 1F1B itself, and where stages have several chunks."""

    @property
    def kind(self) -> ScheduleKind:
        return self.timeline.schedule.kind


def kind_for(template: PipelineTemplate, kind: ScheduleKind) -> ScheduleKind:
    """Return a pipeline's kind where others run `kind`: interleaved with several chunks a stage, and only then."""
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

    Zero-bubble must fit the memory of every stage's devices. O(instructions).
    """
    kind, saved, _ = _choose(profile, template, num_microbatches, reduce_s, reserved_memory_bytes)
    found = evaluate(kind, profile, template, num_microbatches, reduce_s=reduce_s)
    return ScheduleChoice(timeline=found, saved=saved)


def chosen_step_s(profile: Profile | Sequence[Profile], template: PipelineTemplate, num_microbatches: int) -> float:
    """Return the seconds of a step under the schedule that would be chosen, without the reduction; O(instructions)."""
    return _choose(profile, template, num_microbatches, 0.0, 0)[-1]


def _choose(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    num_microbatches: int,
    reduce_s: float,
    reserved_memory_bytes: int,
) -> tuple[ScheduleKind, float, float]:
    """Return a pipeline's schedule, the share of 1F1B's step that it saves, and the seconds of its step."""
    plain_kind = kind_for(template, ScheduleKind.ONE_F_ONE_B)
    plain = stage_costs(profile, template)
    plain_s = _flow(plain_kind, template, num_microbatches).step_s(plain)
    # One stage has no bubble to fill, and interleaving was decided when the template was cut.
    if template.num_stages == 1 or template.num_chunks > 1 or not num_microbatches:
        return plain_kind, 0.0, plain_s
    flow = _flow(ScheduleKind.ZERO_BUBBLE, template, num_microbatches)
    costs = stage_costs(profile, template, splits=True)
    split_s = flow.step_s(costs)
    # Under 1F1B the reduction runs during a stage's last backward pass, and so hides no more of itself than that takes;
    # zero-bubble hides none.
    hidden_s = min(reduce_s, max(cost.backward_s for cost in plain))
    saved = 1 - (split_s + reduce_s) / (plain_s + reduce_s - hidden_s)
    if saved < LEAST_GAIN:
        return plain_kind, 0.0, plain_s
    profiles, peaks = profiles_of_stages(profile, template), flow.peak_memory_bytes(costs)
    has_room = all(
        peak <= stage.num_devices * (own.device.memory_bytes - reserved_memory_bytes)
        for peak, stage, own in zip(peaks, template.stages, profiles, strict=True)
    )
    return (ScheduleKind.ZERO_BUBBLE, saved, split_s) if has_room else (plain_kind, 0.0, plain_s)


def step_s(
    kind: ScheduleKind, profile: Profile | Sequence[Profile], template: PipelineTemplate, num_microbatches: int
) -> float:
    """Return the seconds of a step on its timeline, without the reduction."""
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
    costs = stage_costs(profile, template, reduce_s=reduce_s, splits=kind is ScheduleKind.ZERO_BUBBLE)
    return timeline(schedule, costs)
