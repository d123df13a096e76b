"""The speed of training on a number of nodes, from plans on a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from oobleck.errors import PlanningError
from oobleck.planner import PipelineTemplate, Planner, Profile
from oobleck.planner.instantiation import reduction_s
from oobleck.schedule.costs_of_stages import stage_costs
from oobleck.sim.costs import StepTimes
from oobleck.sim.sweep import SweepSettings


class Throughput(Protocol):
    def step_s(self, num_nodes: int) -> float | None:
        """Return the seconds of one step; None for too few nodes."""

    def num_used(self, num_nodes: int) -> int:
        """Return how many of the nodes train; all of them, where they are too few."""


class Plans:
    """The planner's best plan for each number of nodes, by the schedule's timeline."""

    def __init__(self, settings: SweepSettings) -> None:
        self._planner = settings.planner()
        self._pace = StepTimes(settings.profile)
        self._known: dict[int, float | None] = {}

    def step_s(self, num_nodes: int) -> float | None:
        if num_nodes not in self._known:
            self._known[num_nodes] = self._evaluate(num_nodes)
        return self._known[num_nodes]

    def num_used(self, num_nodes: int) -> int:
        return num_nodes

    def _evaluate(self, num_nodes: int) -> float | None:
        if num_nodes < 1:
            return None
        try:
            plan = self._planner.initial_plan([f"node{number}" for number in range(num_nodes)]).plan
        except PlanningError:
            return None
        return self._pace.step_s(plan, {})


class Grids:
    """Equal pipelines of one depth, for systems without heterogeneous pipelines; the remaining nodes idle."""

    def __init__(self, settings: SweepSettings, *, profile: Profile | None = None, depth: int | None = None) -> None:
        """Take the profile that plans are made by, if it is not the job's, and a depth for all numbers of nodes."""
        self._settings = settings
        self._planner: Planner = (settings if profile is None else replace(settings, profile=profile)).planner()
        self._pace = StepTimes(settings.profile)
        self._depth = depth
        self._known: dict[int, tuple[float, int] | None] = {}

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a step, over all pipelines."""
        return self._settings.num_microbatches

    def step_s(self, num_nodes: int) -> float | None:
        found = self._best(num_nodes)
        return found[0] if found is not None else None

    def depth(self, num_nodes: int) -> int | None:
        """Return the nodes of each pipeline in the best grid."""
        found = self._best(num_nodes)
        return found[1] if found is not None else None

    def num_used(self, num_nodes: int) -> int:
        depth = self.depth(num_nodes)
        return num_nodes if depth is None else depth * min(num_nodes // depth, self.num_microbatches)

    def pipelines_s(self, depth: int, num_pipelines: int, num_microbatches: int) -> float:
        """Return the seconds of a step of pipelines of `depth` nodes, each with a number of microbatches."""
        template = self._planner.templates(depth)[depth]
        reduce_s = reduction_s(self._settings.profile.network, self._pace.reduced_bytes(template), num_pipelines)
        return self._pipeline_s(template, num_microbatches) + reduce_s

    def _pipeline_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        return self._pace.template_s(template, num_microbatches)

    def _best(self, num_nodes: int) -> tuple[float, int] | None:
        if num_nodes not in self._known:
            sizes = self._planner.templates(num_nodes) if num_nodes > 0 else {}
            # Without a depth that is set, each number of nodes has its best one.
            options = [(self._grid_s(size, num_nodes // size), size) for size in sizes if self._depth in (None, size)]
            self._known[num_nodes] = min(options, default=None)
        return self._known[num_nodes]

    def _grid_s(self, depth: int, num_pipelines: int) -> float:
        # A pipeline without a microbatch takes no part.
        num_pipelines = min(num_pipelines, self.num_microbatches)
        return self.pipelines_s(depth, num_pipelines, -(-self.num_microbatches // num_pipelines))


class RedundantGrids(Grids):
    """Grids whose nodes also hold and compute forward the layers of the next stage, as in Bamboo.

    Redundant passes fill the time in which a node waits in 1F1B, as in the paper (section 4.2), and what does not fit
    comes on top. This takes the filling as perfect, and the activations of those passes as swapped out.
    """

    def __init__(self, settings: SweepSettings, *, depth: int | None = None) -> None:
        super().__init__(settings, profile=redundant_profile(settings.profile), depth=depth)

    def _pipeline_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        usual_s = super()._pipeline_s(template, num_microbatches)
        costs = stage_costs(self._settings.profile, template, splits=False)
        ahead = [*costs[1:], costs[0]]  # the last stage is backed by the one before the first
        busy_s = max(
            num_microbatches * (own.forward_s + own.backward_s + other.forward_s)
            for own, other in zip(costs, ahead, strict=True)
        )
        return max(usual_s, busy_s)


def redundant_profile(profile: Profile) -> Profile:
    """Return the profile of nodes that also hold the state of the next stage's layers."""
    layers = (
        replace(
            layer,
            param_bytes=2 * layer.param_bytes,
            frozen_bytes=2 * layer.frozen_bytes,
            optimizer_bytes=2 * layer.optimizer_bytes,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))
