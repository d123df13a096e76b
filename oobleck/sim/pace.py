"""How long the steps of a plan take on nodes that may be slow: the schedule's timeline, remembered by its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, Profile, StageTemplate
from oobleck.planner.costs import GRADIENT_COPIES
from oobleck.planner.sizes import reduction_s
from oobleck.schedule import ScheduleKind, StageCost, compile_schedule, timeline
from oobleck.schedule.forecast import stage_costs

__all__ = ["Pace"]

_ENOUGH = 3
"""Microbatches for each stage after which 1F1B repeats itself, every so many microbatches as there are stages."""


_Key = tuple[StageTemplate, ...]
"""A template by its value: plans that were read from a message have templates of their own."""


class Pace:
    """The times of one profile and kind of schedule. Remembers what it has evaluated; changes nothing else."""

    def __init__(self, profile: Profile, *, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> None:
        self._profile = profile
        self._kind = kind
        self._seconds: dict[tuple[_Key, int, tuple[float, ...]], float] = {}
        self._reduced_bytes: dict[_Key, int] = {}

    def step_s(self, plan: ExecutionPlan, factors: Mapping[str, float]) -> float:
        """Seconds of one step: the slowest pipeline's, and the reduction of gradients after it.

        `factors` are those by which nodes are slower than the profile; O(pipelines), and an evaluation of each
        kind of pipeline that was not met before.
        """
        kinds = Counter((id(each.template), each.num_microbatches) for each in plan.pipelines)
        slow = [each for each in plan.pipelines if any(node in factors for node in each.nodes)] if factors else []
        first = {id(each.template): each for each in plan.pipelines}
        for each in slow:
            kinds[id(each.template), each.num_microbatches] -= 1
        seconds = [
            self._compute_s(first[template].template, number, ())
            for (template, number), count in kinds.items()
            if count > 0
        ]
        seconds += [self.compute_s(each, each.num_microbatches, factors) for each in slow]
        return max(seconds) + self.reduce_s(plan)

    def compute_s(self, pipeline: Pipeline, num_microbatches: int, factors: Mapping[str, float]) -> float:
        """Seconds in which a pipeline takes so many microbatches, without the reduction; 0 for none."""
        if not num_microbatches:
            return 0.0
        slowed = tuple(factors.get(node, 1.0) for node in pipeline.nodes) if factors else ()
        return self._compute_s(pipeline.template, num_microbatches, slowed if any(f != 1.0 for f in slowed) else ())

    def template_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        """Seconds in which a pipeline of a template, on nodes of usual speed, takes so many microbatches."""
        return self._compute_s(template, num_microbatches, ())

    def reduce_s(self, plan: ExecutionPlan) -> float:
        """Seconds of the reduction of gradients, as the planner counts them."""
        templates = {id(each.template): each.template for each in plan.pipelines}
        reduced_bytes = max(self._bytes_of(template) for template in templates.values())
        return reduction_s(self._profile.network, reduced_bytes, len(plan.pipelines))

    def _bytes_of(self, template: PipelineTemplate) -> int:
        key = template.stages
        if key not in self._reduced_bytes:
            nodes = [0] * template.num_nodes
            for stage in template.stages:
                nodes[stage.node_index] += sum(self._profile.layers[layer].param_bytes for layer in stage.layers)
            self._reduced_bytes[key] = GRADIENT_COPIES * max(nodes)
        return self._reduced_bytes[key]

    def _compute_s(self, template: PipelineTemplate, num_microbatches: int, factors: tuple[float, ...]) -> float:
        stages = template.num_stages
        more = num_microbatches - _ENOUGH * stages
        if self._kind is not ScheduleKind.ONE_F_ONE_B or more < stages:
            return self._evaluate(template, num_microbatches, factors)
        periods, rest = divmod(more, stages)
        known = _ENOUGH * stages + rest
        before_s = self._evaluate(template, known, factors)
        return before_s + periods * (self._evaluate(template, known + stages, factors) - before_s)

    def _evaluate(self, template: PipelineTemplate, num_microbatches: int, factors: tuple[float, ...]) -> float:
        key = template.stages, num_microbatches, factors
        if key not in self._seconds:
            schedule = compile_schedule(self._kind, num_stages=template.num_stages, num_microbatches=num_microbatches)
            self._seconds[key] = timeline(schedule, self._costs(template, factors)).makespan_s
        return self._seconds[key]

    def _costs(self, template: PipelineTemplate, factors: Sequence[float]) -> tuple[StageCost, ...]:
        costs = stage_costs(self._profile, template)
        if not factors:
            return costs
        return tuple(
            replace(
                cost,
                forward_s=cost.forward_s * factors[stage.node_index],
                backward_s=cost.backward_s * factors[stage.node_index],
            )
            for cost, stage in zip(costs, template.stages, strict=True)
        )
