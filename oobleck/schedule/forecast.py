"""Predicts the timeline and the memory of each of a plan's pipelines from a profile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from oobleck.plan import ScheduleKind
from oobleck.planner import ExecutionPlan, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.costs import Footprint, chunks_footprint
from oobleck.planner.instantiation import reduction_s

from .choice import choose_schedule, evaluate, kind_for
from .costs_of_stages import profiles_of_stages
from .timeline import Timeline

# Pipelines with equal stages, profiles of their nodes (by identity) and microbatches behave alike.
_Alike = tuple[tuple[StageTemplate, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak memory of a stage's devices together, in bytes by kind."""

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    """Activations of the microbatches in flight, and the transient memory of a pass."""
    communication: int


@dataclass(frozen=True, kw_only=True)
class PipelineForecast:
    """The forecast of all pipelines of one template with the same number of microbatches."""

    pipelines: tuple[int, ...]
    """Indices in the plan."""
    template: PipelineTemplate
    timeline: Timeline
    footprints: tuple[Footprint, ...]
    available_bytes: tuple[int, ...]
    """For each stage, the memory of its devices that the model may use."""
    profiles: tuple[Profile, ...]

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """The memory of each stage, whose kinds add up to the timeline's peak."""
        return tuple(
            StageMemory(
                weights=held.weight_bytes,
                gradients=held.gradient_bytes,
                optimizer=held.optimizer_bytes,
                copies=held.copy_bytes,
                activations=peak - held.static_bytes + held.transient_bytes,
                communication=held.communication_bytes,
            )
            for held, peak in zip(self.footprints, self.timeline.peak_memory_bytes, strict=True)
        )

    @property
    def headroom_bytes(self) -> tuple[int, ...]:
        """For each stage, the memory left at its peak; negative where the plan does not fit."""
        used = self.timeline.peak_memory_bytes
        return tuple(available - peak for available, peak in zip(self.available_bytes, used, strict=True))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    plan: ExecutionPlan
    pipelines: tuple[PipelineForecast, ...]
    """One for each kind of pipeline, in the order of their first appearance."""
    reduce_s: float
    """The seconds of the gradients' reduction, after the last backward pass."""

    @cached_property
    def step_s(self) -> float:
        """The seconds of a step: those of the slowest pipeline, as all commit together."""
        return max(pipeline.timeline.makespan_s for pipeline in self.pipelines)

    @property
    def bubble_share(self) -> float:
        """The share of the step in which devices that train wait, including the reduction."""
        stages = sum(len(each.pipelines) * each.template.num_stages for each in self.pipelines)
        busy_s = math.fsum(len(each.pipelines) * math.fsum(each.timeline.busy_s) for each in self.pipelines)
        return 1.0 - busy_s / (stages * self.step_s)


def forecast(
    profile: Profile,
    plan: ExecutionPlan,
    *,
    kind: ScheduleKind | None = ScheduleKind.ONE_F_ONE_B,
    reserved_memory_bytes: int = 0,
    profile_of: Callable[[str], Profile] | None = None,
) -> Forecast:
    """Evaluate every kind of pipeline of a plan event by event; without a `kind`, under the schedule that it chooses.

    Pipelines whose stages have several chunks are interleaved, whatever the `kind`. The reduction of gradients is not
    overlapped with the backward pass, and runs at the rate that the planner assumes. Where nodes are of several kinds,
    `profile_of` returns a node's profile, with the network that all share. O(instructions of the distinct pipelines).
    """
    groups: dict[_Alike, tuple[tuple[Profile, ...], list[int]]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        own = (profile,) * len(pipeline.nodes) if profile_of is None else tuple(profile_of(n) for n in pipeline.nodes)
        alike = pipeline.template.stages, tuple(map(id, own)), pipeline.num_microbatches
        groups.setdefault(alike, (own, []))[1].append(index)
    # All nodes reduce at the same time, so the one with the most parameters decides.
    most_bytes = max(reduced_bytes(profile, plan.pipelines[indices[0]].template) for _, indices in groups.values())
    reduce_s = reduction_s(profile.network, most_bytes, len(plan.pipelines))
    forecasts = []
    for profiles, indices in groups.values():
        template, share = plan.pipelines[indices[0]].template, plan.pipelines[indices[0]].num_microbatches
        if kind is None:
            timeline = choose_schedule(
                profiles, template, share, reduce_s=reduce_s, reserved_memory_bytes=reserved_memory_bytes
            ).timeline
        else:
            timeline = evaluate(kind_for(template, kind), profiles, template, share, reduce_s=reduce_s)
        stages = range(template.num_stages)
        # The first chunks come first, so the other chunks' profiles are left out.
        of_stages = list(zip(map(template.chunks_of, stages), profiles_of_stages(profiles, template), strict=False))
        forecasts.append(
            PipelineForecast(
                pipelines=tuple(indices),
                template=template,
                timeline=timeline,
                footprints=tuple(chunks_footprint(own, chunks) for chunks, own in of_stages),
                available_bytes=tuple(
                    chunks[0].num_devices * (own.device.memory_bytes - reserved_memory_bytes)
                    for chunks, own in of_stages
                ),
                profiles=profiles,
            )
        )
    return Forecast(plan=plan, pipelines=tuple(forecasts), reduce_s=reduce_s)


def reduced_bytes(profile: Profile, template: PipelineTemplate) -> int:
    """Return the most gradient bytes that a node of a pipeline reduces."""
    nodes = [0] * template.num_nodes
    for stage in template.stages:
        nodes[stage.node_index] += sum(profile.layers[layer].trained_bytes for layer in stage.layers)
    return max(nodes)
