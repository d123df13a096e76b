"""The times of a plan's steps on nodes that may be slow: cached timelines of its schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, Profile
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.makespan import stage_ends_s
from oobleck.schedule import ScheduleKind, StageCost, compile_schedule, timeline
from oobleck.schedule.choice import kind_for
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.schedule.forecast import reduced_bytes

# Programs of up to this many microbatches times stages are evaluated whole. A longer one has met its bottleneck, and
# repeats itself with a period of as many microbatches as stages. After 3 microbatches a stage that is not certain: the
# step of one in eight random pipelines was wrong, by up to 4 %.
_WHOLE = 4096
_PLAIN = ScheduleKind.ONE_F_ONE_B

_Profiles = tuple[Profile, ...]


class StepTimes:
    """Cached step times of one profile, or of one for each kind of node (`profile_of`)."""

    def __init__(self, profile: Profile, *, profile_of: Callable[[str], Profile] | None = None) -> None:
        self._profile = profile
        self._profile_of = profile_of
        self._seconds: dict[tuple[PipelineTemplate, int, ScheduleKind, tuple[float, ...], tuple[int, ...]], float] = {}
        self._reduced_bytes: dict[PipelineTemplate, int] = {}

    def step_s(
        self, plan: ExecutionPlan, factors: Mapping[str, float], schedules: Sequence[ScheduleKind] | None = None
    ) -> float:
        """Return the seconds of one step: the slowest pipeline's, and the reduction of gradients after it.

        `factors` are the slow nodes' step times relative to the profile, `schedules` those of the plan's pipelines
        (None: 1F1B). O(pipelines), plus an evaluation of each new kind of pipeline.
        """
        kinds = schedules or (_PLAIN,) * len(plan.pipelines)
        usual: dict[tuple[int, int, ScheduleKind, tuple[int, ...]], tuple[PipelineTemplate, _Profiles]] = {}
        seconds: list[float] = []
        for pipeline, kind in zip(plan.pipelines, kinds, strict=True):
            if factors and any(node in factors for node in pipeline.nodes):
                seconds.append(self.compute_s(pipeline, pipeline.num_microbatches, factors, kind))
            else:
                own = self._own(pipeline)
                key = id(pipeline.template), pipeline.num_microbatches, kind, tuple(map(id, own))
                usual[key] = pipeline.template, own
        seconds += [
            self._compute_s(template, number, kind, (), own) for (_, number, kind, _), (template, own) in usual.items()
        ]
        return max(seconds) + self.reduce_s(plan)

    def compute_s(
        self, pipeline: Pipeline, num_microbatches: int, factors: Mapping[str, float], kind: ScheduleKind = _PLAIN
    ) -> float:
        """Return the seconds in which a pipeline takes its microbatches, without the reduction; 0 for none."""
        if not num_microbatches:
            return 0.0
        slowed = tuple(factors.get(node, 1.0) for node in pipeline.nodes) if factors else ()
        usual = all(factor == 1.0 for factor in slowed)
        return self._compute_s(pipeline.template, num_microbatches, kind, () if usual else slowed, self._own(pipeline))

    def template_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        """Return the seconds of a pipeline on nodes of usual speed, under 1F1B or interleaved."""
        return self._compute_s(template, num_microbatches, _PLAIN, (), ())

    def _own(self, pipeline: Pipeline) -> _Profiles:
        """Return the profile of each node of a pipeline, or none where all are alike."""
        return () if self._profile_of is None else tuple(map(self._profile_of, pipeline.nodes))

    def reduce_s(self, plan: ExecutionPlan) -> float:
        """Return the seconds of the reduction of gradients, counted as in the planner."""
        templates = {id(each.template): each.template for each in plan.pipelines}
        return reduction_s(self._profile.network, max(map(self.reduced_bytes, templates.values())), len(plan.pipelines))

    def reduced_bytes(self, template: PipelineTemplate) -> int:
        """Return the most gradient bytes that a node of a pipeline reduces."""
        key = template
        if key not in self._reduced_bytes:
            self._reduced_bytes[key] = reduced_bytes(self._profile, template)
        return self._reduced_bytes[key]

    def _compute_s(
        self,
        template: PipelineTemplate,
        num_microbatches: int,
        kind: ScheduleKind,
        factors: tuple[float, ...],
        own: _Profiles,
    ) -> float:
        stages = template.num_stages
        more = num_microbatches - max(_WHOLE // stages, 2 * stages)
        # Whole periods are left out, so that the rest ends as the whole program does.
        periods = max(0, -(-more // stages))
        known = num_microbatches - periods * stages  # microbatches of a program that is not cut short
        end_s = self._evaluate(template, known, kind, factors, own)
        if not periods:
            return end_s
        return end_s + periods * (end_s - self._evaluate(template, known - stages, kind, factors, own))

    def _evaluate(
        self,
        template: PipelineTemplate,
        num_microbatches: int,
        kind: ScheduleKind,
        factors: tuple[float, ...],
        own: _Profiles,
    ) -> float:
        key = template, num_microbatches, kind, factors, tuple(map(id, own))
        if key not in self._seconds:
            slowed = [factors[stage.node_index] for stage in template.stages] if factors else None
            costs = costs_on(own or self._profile, template, kind, slowed)
            self._seconds[key] = _makespan_s(template, num_microbatches, kind_for(template, kind), costs)
        return self._seconds[key]


def _makespan_s(
    template: PipelineTemplate, num_microbatches: int, kind: ScheduleKind, costs: Sequence[StageCost]
) -> float:
    """Return a timeline's end; 1F1B's is found in a tenth of the time, and is the same to the last bit."""
    sent_s, sent_back_s = [cost.send_forward_s for cost in costs[:-1]], [cost.send_backward_s for cost in costs[1:]]
    if kind is _PLAIN and sent_s == sent_back_s:
        forward, backward = np.array([(cost.forward_s, cost.backward_s) for cost in costs]).T[:, :, None]
        messages = np.array(sent_s)[:, None]
        ends_s = stage_ends_s(forward, backward, messages, np.zeros_like(forward), num_microbatches)
        return max(float(end_s) + cost.reduce_s for end_s, cost in zip(ends_s[:, 0], costs, strict=True))
    schedule = compile_schedule(
        kind, num_stages=template.num_stages, num_chunks=template.num_chunks, num_microbatches=num_microbatches
    )
    return timeline(schedule, costs).makespan_s


def costs_on(
    profile: Profile | Sequence[Profile],
    template: PipelineTemplate,
    kind: ScheduleKind,
    factors: Sequence[float] | None,
) -> Sequence[StageCost]:
    """Return the cost of each stage or chunk of a template under a schedule, multiplied by its factor.

    `profile` is one for all nodes, or one for each.
    """
    costs = stage_costs(profile, template, splits=kind is ScheduleKind.ZERO_BUBBLE)
    if factors is None:
        return costs
    return [_slowed(cost, factor) for cost, factor in zip(costs, factors, strict=True)]


def _slowed(cost: StageCost, factor: float) -> StageCost:
    weight_s = cost.backward_weight_s
    return replace(
        cost,
        forward_s=cost.forward_s * factor,
        backward_s=cost.backward_s * factor,
        backward_weight_s=None if weight_s is None else weight_s * factor,
    )
