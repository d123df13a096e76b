"""What a plan will do: the timeline and the memory of each of its pipelines, predicted from a profile.

Here a plan meets a schedule. The module is apart from the package's own names, since it brings the planner's
cost model, and numpy with it, along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from oobleck.planner import ExecutionPlan, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.costs import GRADIENT_COPIES, cut_seconds
from oobleck.planner.sizes import reduction_s

from .compile import compile_schedule
from .cost import StageCost
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
        busy_s = sum(len(each.pipelines) * sum(each.timeline.busy_s) for each in self.pipelines)
        return 1.0 - busy_s / (stages * self.step_s)


def forecast(
    profile: Profile,
    plan: ExecutionPlan,
    *,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    reserved_memory_bytes: int = 0,
) -> Forecast:
    """Evaluate every kind of pipeline of a plan event by event.

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
                timeline=timeline(
                    compile_schedule(kind, num_stages=template.num_stages, num_microbatches=num_microbatches),
                    stage_costs(profile, template, reduce_s=reduce_s),
                ),
                available_bytes=tuple(stage.num_devices * per_device for stage in template.stages),
            )
            for template, ((_, num_microbatches), indices) in zip(templates, groups.items(), strict=True)
        ),
        reduce_s=reduce_s,
    )


def stage_costs(profile: Profile, template: PipelineTemplate, *, reduce_s: float = 0.0) -> tuple[StageCost, ...]:
    """Say what each stage of a template costs; `reduce_s` is the same for all of them.

    These are the planner's own costs, told apart: its seconds of a stage are forward, backward and both sends.
    """
    stages = template.stages
    costs = []
    for index, stage in enumerate(stages):
        layers = [profile.layers[layer] for layer in stage.layers]
        costs.append(
            StageCost(
                forward_s=sum(layer.forward_s[stage.num_devices] for layer in layers),
                backward_s=sum(layer.backward_s[stage.num_devices] for layer in layers),
                send_forward_s=_send_s(profile, stages, index, index + 1),
                send_backward_s=_send_s(profile, stages, index, index - 1),
                reduce_s=reduce_s,
                activation_bytes=sum(layer.activation_bytes for layer in layers),
                static_bytes=sum((1 + GRADIENT_COPIES) * layer.param_bytes + layer.optimizer_bytes for layer in layers),
            )
        )
    return tuple(costs)


def _send_s(profile: Profile, stages: Sequence[StageTemplate], source: int, target: int) -> float:
    """Seconds of a message between neighbours: hidden states one way, as many bytes of gradients the other."""
    if not 0 <= target < len(stages):
        return 0.0
    layer = profile.layers[stages[min(source, target)].stop_layer - 1]
    same_node = stages[source].node_index == stages[target].node_index
    return cut_seconds(profile.network, layer.output_bytes, same_node=same_node)


def _param_bytes(profile: Profile, template: PipelineTemplate) -> list[int]:
    """For each node, the bytes of the parameters of all its stages."""
    nodes = [0] * template.num_nodes
    for stage in template.stages:
        nodes[stage.node_index] += sum(profile.layers[layer].param_bytes for layer in stage.layers)
    return nodes
