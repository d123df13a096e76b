"""The speed of training on a number of nodes, from plans on a profile."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from oobleck.errors import PlanningError
from oobleck.planner import PipelineTemplate, Planner, Profile
from oobleck.planner.instantiation import reduction_s
from oobleck.sim.costs import StepTimes
from oobleck.sim.sweep import SweepSettings


class Throughput(Protocol):
    def step_s(self, num_nodes: int) -> float | None:
        """Return the seconds of one step; None for too few nodes."""


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
        self._profile = profile or settings.profile
        self._settings = replace(settings, profile=self._profile)
        self._planner: Planner = self._settings.planner()
        self._pace = StepTimes(self._profile)
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

    def _best(self, num_nodes: int) -> tuple[float, int] | None:
        if num_nodes not in self._known:
            templates = self._planner.templates(num_nodes) if num_nodes > 0 else {}
            # Without a depth that is set, each number of nodes has its best one.
            sizes = [size for size in templates if self._depth in (None, size)]
            options = [(self._grid_s(templates[size], num_nodes // size), size) for size in sizes]
            self._known[num_nodes] = min(options, default=None)
        return self._known[num_nodes]

    def _grid_s(self, template: PipelineTemplate, num_pipelines: int) -> float:
        num_microbatches = self._settings.num_microbatches
        # A pipeline without a microbatch takes no part.
        num_pipelines = min(num_pipelines, num_microbatches)
        each = -(-num_microbatches // num_pipelines)
        reduce_s = reduction_s(self._profile.network, self._pace.reduced_bytes(template), num_pipelines)
        return self._pace.template_s(template, each) + reduce_s


def redundant_profile(profile: Profile) -> Profile:
    """Return the profile of nodes that also hold and compute forward the layers of the next stage, as in Bamboo."""
    layers = (
        replace(
            layer,
            forward_s={count: 2 * seconds for count, seconds in layer.forward_s.items()},
            param_bytes=2 * layer.param_bytes,
            frozen_bytes=2 * layer.frozen_bytes,
            optimizer_bytes=2 * layer.optimizer_bytes,
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))
