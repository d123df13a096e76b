"""What a plan will do: the timeline and the memory of each of its pipelines, predicted from a profile.

Here a plan meets a schedule. The module is apart from the package's own names, since it brings the planner's
cost model, and numpy with it, along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from oobleck.planner import ExecutionPlan, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.instantiation import reduction_s

from .choice import choose_schedule
from .compile import compile_schedule
from .costs_of_stages import stage_costs
from .schedule import ScheduleKind
from .timeline import Timeline, timeline

__all__ = ["Forecast", "PipelineForecast", "forecast", "stage_costs"]


@dataclass(frozen=True, kw_only=True)
class PipelineForecast:
    """What all pipelines of one template with the same number of microbatches do."""

    pipelines: tuple[int, ...]
    """Indices in the plan."""
    template: PipelineTemplate
    timeline: Timeline
    available_bytes: tuple[int, ...]
    """For each stage, the memory of its devices that the model may have."""

    @property
    def headroom_bytes(self) -> tuple[int, ...]:
        """For each stage, the memory left at its fullest; negative where the plan does not fit."""
        used = self.timeline.peak_memory_bytes
        return tuple(available - peak for available, peak in zip(self.available_bytes, used, strict=True))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a plan's step takes."""

    plan: ExecutionPlan
    pipelines: tuple[PipelineForecast, ...]
    """One for each kind of pipeline, in the order of their first appearance."""
    reduce_s: float
    """The part of the step after the last backward pass: the reduction of gradients."""

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step: those of the slowest pipeline, as all commit together."""
        return max(pipeline.timeline.makespan_s for pipeline in self.pipelines)

    @property
    def bubble_share(self) -> float:
        """Share of the step in which devices that train wait, reduction included as waiting."""
        stages = sum(len(each.pipelines) * each.template.num_stages for each in self.pipelines)
        busy_s = math.fsum(len(each.pipelines) * math.fsum(each.timeline.busy_s) for each in self.pipelines)
        return 1.0 - busy_s / (stages * self.step_s)


def forecast(
    profile: Profile,
    plan: ExecutionPlan,
    *,
    kind: ScheduleKind | None = ScheduleKind.ONE_F_ONE_B,
    reserved_memory_bytes: int = 0,
) -> Forecast:
    """Evaluate every kind of pipeline of a plan event by event; without a `kind`, under the schedule that it chooses.

    Gradients are reduced once all are there, at the rate that the planner assumes; nothing of it overlaps
    with the backward pass. O(instructions of the distinct pipelines).
    """
    groups: dict[tuple[tuple[StageTemplate, ...], int], list[int]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        groups.setdefault((pipeline.template.stages, pipeline.num_microbatches), []).append(index)
    templates = [plan.pipelines[indices[0]].template for indices in groups.values()]
    reduced_bytes = max(node_bytes for template in templates for node_bytes in _param_bytes(profile, template))
    reduce_s = reduction_s(profile.network, reduced_bytes, len(plan.pipelines))
    per_device = profile.device.memory_bytes - reserved_memory_bytes
    return Forecast(
        plan=plan,
        pipelines=tuple(
            PipelineForecast(
                pipelines=tuple(indices),
                template=template,
                timeline=_timeline(profile, template, num_microbatches, kind, reduce_s, reserved_memory_bytes),
                available_bytes=tuple(stage.num_devices * per_device for stage in template.stages),
            )
            for template, ((_, num_microbatches), indices) in zip(templates, groups.items(), strict=True)
        ),
        reduce_s=reduce_s,
    )


def _param_bytes(profile: Profile, template: PipelineTemplate) -> list[int]:
    """For each node, the bytes of the parameters of all its stages."""
    nodes = [0] * template.num_nodes
    for stage in template.stages:
        nodes[stage.node_index] += sum(profile.layers[layer].param_bytes for layer in stage.layers)
    return nodes


def _timeline(
    profile: Profile,
    template: PipelineTemplate,
    num_microbatches: int,
    kind: ScheduleKind | None,
    reduce_s: float,
    reserved_memory_bytes: int,
) -> Timeline:
    if kind is None:
        return choose_schedule(
            profile, template, num_microbatches, reduce_s=reduce_s, reserved_memory_bytes=reserved_memory_bytes
        ).timeline
    return timeline(
        compile_schedule(kind, num_stages=template.num_stages, num_microbatches=num_microbatches),
        stage_costs(profile, template, reduce_s=reduce_s, splits=kind is ScheduleKind.ZERO_BUBBLE),
    )
