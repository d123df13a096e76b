"""The pipelines over kinds of nodes that a planner may use, found when asked for and kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate
from oobleck.planner.costs import Timing
from oobleck.planner.formatting import counted, listed
from oobleck.planner.instantiation import distribute_microbatches, reduction_s
from oobleck.planner.inventory import Holding, needed_holdings
from oobleck.planner.node_kind import NodeKind
from oobleck.planner.settings import PlannerSettings

from .choice import Choice, Chooser, Counts
from .kinds import KindCosts, MixedTemplate
from .reduction import Reduction, choose_with_reduction
from .search import MixedSearch

_FEWEST = 8
_MOST_TOGETHER = 2_048
"""With more numbers of nodes than these in a pipeline, pipelines have nodes of one kind each."""


class MixedCatalog:
    """All pipelines for some kinds of nodes. The same answers in whatever order they are asked."""

    def __init__(self, kinds: Sequence[NodeKind], settings: PlannerSettings, *, mixes: bool = True) -> None:
        self.costs = KindCosts(kinds, settings)
        self.settings = settings
        self._mixes = mixes
        self.layer_bytes = self.costs.layer_bytes
        self.most_devices = max(self.costs.devices)
        """Holdings of all nodes are as long."""
        self._searches: dict[Counts, dict[Counts, MixedSearch]] = {}
        self._timings: dict[Counts, dict[Counts, Timing]] = {}
        self._templates: dict[tuple[Counts, Counts], MixedTemplate] = {}
        self._choices: dict[tuple[Counts, int, int, bool, Counts], Choice | None] = {}
        self._needed: dict[int, tuple[PipelineTemplate, tuple[Holding, ...]]] = {}
        self._nominal: dict[tuple[int, tuple[int, ...]], tuple[PipelineTemplate, Timing]] = {}

    def timings(self, nodes: Counts, total: Counts | None = None) -> Mapping[Counts, Timing]:
        """Return the pipelines that so many nodes of each kind can form, by their nodes, with their step times.

        They are of a plan for `total` nodes, if that is another number.
        """
        reach = self._reach(total or nodes)
        if reach not in self._timings:
            self._timings[reach] = {
                counts: search.timing(counts) for counts, search in sorted(self._search(reach).items())
            }
        return {
            counts: timing
            for counts, timing in self._timings[reach].items()
            if all(number <= limit for number, limit in zip(counts, nodes, strict=True))
        }

    def template(self, counts: Counts, nodes: Counts) -> MixedTemplate:
        """Return the pipeline of so many nodes of each kind, in a plan for `nodes` of them."""
        return self.templates([counts], nodes)[counts]

    def templates(self, wanted: Collection[Counts], nodes: Counts) -> dict[Counts, MixedTemplate]:
        """Return the pipelines of so many nodes of each kind, in a plan for `nodes` of them."""
        reach = self._reach(nodes)
        missing = [counts for counts in wanted if (counts, reach) not in self._templates]
        searches = self._search(reach)
        for search in dict.fromkeys(searches[counts] for counts in missing):
            found = search.templates([counts for counts in missing if searches[counts] is search])
            self._templates.update(((counts, reach), template) for counts, template in found.items())
        return {counts: self._templates[counts, reach] for counts in wanted}

    def needed(self, template: PipelineTemplate) -> tuple[Holding, ...]:
        """Return what each node of a pipeline of that template has to hold."""
        if id(template) not in self._needed:
            self._needed[id(template)] = template, needed_holdings(template, self.most_devices)
        return self._needed[id(template)][1]

    def num_pipelines(self, nodes: Counts) -> tuple[int, bool]:
        """Return the fewest pipelines that so many nodes should have, and whether it has to be as many exactly.

        Raises PlanningError where they cannot hold the model.
        """
        timings = self.timings(nodes)
        most = Chooser(timings, self.settings.num_microbatches).most_pipelines(nodes) if timings else 0
        if not most:
            raise PlanningError(self._explain(nodes))
        if self.settings.num_pipelines is not None:
            return min(self.settings.num_pipelines, most), True
        return min(self.settings.fault_threshold + 1, most), False

    def choose(
        self, nodes: Counts, num_microbatches: int, fewest: int, *, exactly: bool = False, total: Counts | None = None
    ) -> Choice | None:
        """Return the best pipelines of so many nodes for so many microbatches; remembered once found.

        `total` as in `timings`.
        """
        key = nodes, num_microbatches, fewest, exactly, self._reach(total or nodes)
        if key not in self._choices:
            timings = self.timings(nodes, total)
            found = None
            if timings and fewest <= num_microbatches:
                reduction = self._reduction(total or nodes)
                found = choose_with_reduction(
                    timings, num_microbatches, nodes, reduction, fewest=fewest, exactly=exactly
                )
            self._choices[key] = found
        return self._choices[key]

    def _reduction(self, nodes: Counts) -> Reduction:
        """Return what pipelines in a plan for so many nodes reduce."""
        costs = self.costs.of[0]  # what a layer's parameters take is the same on all kinds
        return Reduction(
            bytes_of=lambda wanted: {
                counts: costs.reduced_bytes(mixed.template) for counts, mixed in self.templates(wanted, nodes).items()
            },
            all_bytes=sum(layer.trained_bytes for layer in costs.profile.layers),
            seconds=partial(reduction_s, self.costs.network),
        )

    def timing(self, mixed: MixedTemplate, speeds: Sequence[float] = ()) -> Timing:
        """Return the step times of a pipeline; its nominal ones are found once."""
        if any(speed != 1.0 for speed in speeds):
            return self.costs.timing(mixed, speeds)
        key = id(mixed.template), mixed.kinds
        if key not in self._nominal:
            self._nominal[key] = mixed.template, self.costs.timing(mixed)
        return self._nominal[key][1]

    def build_plan(
        self,
        pipelines: Sequence[tuple[MixedTemplate, Sequence[str]]],
        spares: Sequence[str],
        speeds: Mapping[str, float],
    ) -> tuple[ExecutionPlan, float]:
        """Return the plan of pipelines given as (template, nodes), and the seconds of its step at the given speeds."""
        timings = [self.timing(mixed, [speeds.get(node, 1.0) for node in nodes]) for mixed, nodes in pipelines]
        counts = distribute_microbatches(timings, self.settings.num_microbatches)
        slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
        plan = ExecutionPlan(
            pipelines=tuple(
                Pipeline(template=mixed.template, nodes=tuple(nodes), num_microbatches=count)
                for (mixed, nodes), count in zip(pipelines, counts, strict=True)
            ),
            spares=tuple(spares),
        )
        return plan, slowest_s + self.reduction_s([mixed.template for mixed, _ in pipelines])

    def reduction_s(self, templates: Sequence[PipelineTemplate]) -> float:
        """Return the seconds in which pipelines of these templates reduce their gradients."""
        # What a layer's parameters take is the same on all kinds.
        reduced_bytes = max(self.costs.of[0].reduced_bytes(template) for template in templates)
        return reduction_s(self.costs.network, reduced_bytes, len(templates))

    def _reach(self, nodes: Counts) -> Counts:
        """Return the most nodes of each kind in a pipeline: powers of two, so that a few nodes more change nothing."""
        return tuple(
            min(self.costs.num_layers // devices, 1 << (max(number, _FEWEST) - 1).bit_length()) if number else 0
            for number, devices in zip(nodes, self.costs.devices, strict=True)
        )

    def _search(self, reach: Counts) -> Mapping[Counts, MixedSearch]:
        """Return the search that knows each pipeline: one for all, or one for each kind alone."""
        if reach not in self._searches:
            limits = [reach]
            if not self._mixes or math.prod(number + 1 for number in reach) > _MOST_TOGETHER:
                limits = [
                    tuple(number if k == kind else 0 for k, number in enumerate(reach)) for kind in range(len(reach))
                ]
            searches = [MixedSearch(self.costs, limit) for limit in limits]
            self._searches[reach] = {counts: search for search in searches for counts in search.counts()}
        return self._searches[reach]

    def _explain(self, nodes: Counts) -> str:
        """Say why so many nodes cannot hold the model."""
        there = listed(
            f"{counted(number, 'node')} of {kind.devices_per_node} × {kind.name}"
            for number, kind in zip(nodes, self.costs.kinds, strict=True)
            if number
        )
        for index, layer in enumerate(self.costs.kinds[0].profile.layers):
            if not any(most[index, index + 1] >= 1 for most in self.costs.most_in_flight):
                return f"layer {index} ({layer.name}) fits on a device of no kind: more memory is needed than any has"
        return f"{there} cannot hold the model; add nodes, or take smaller microbatches"
