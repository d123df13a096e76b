"""What a planner chooses pipelines from, and makes plans of: the pipelines that some nodes can form, and their times.

`one_kind` and `mixed` search for pipelines, each in its own way; all that follows from a pipeline is here. Everything
is found when it is asked for, and kept; the answers are the same in whatever order they are asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate

from .costs import Timing
from .instantiation import distribute_microbatches, reduction_s
from .inventory import Holding, needed_holdings
from .kinds import Counts, Form, KindCosts
from .templates import cut_for_speeds

STILL_FAST = 1.05
"""A pipeline's own template may take this many times as long as the present one: to cut it again moves its layers."""


class Catalog(ABC):
    """The pipelines of one cluster under one set of settings."""

    def __init__(self, costs: KindCosts) -> None:
        self.costs, self.settings = costs, costs.settings
        self.most_devices = max(costs.devices)
        """Holdings of all nodes are as long."""
        self._needed: dict[int, tuple[PipelineTemplate, tuple[Holding, ...]]] = {}
        """By the identity of the template, which is kept with it: comparing templates takes long."""
        self._for_speeds: dict[tuple[object, ...], Form] = {}

    @abstractmethod
    def kind(self, node: str) -> int:
        """Return the number of a node's kind. Raises PlanningError where it has none, or one without a profile."""

    @abstractmethod
    def count(self, nodes: Collection[str]) -> Counts:
        """Return how many of the nodes are of each kind. Raises PlanningError."""

    def by_kind(self, nodes: Collection[str]) -> Sequence[Sequence[str]]:
        """Return the nodes of each kind, in their order. Raises PlanningError."""
        found: list[list[str]] = [[] for _ in self.costs.kinds]
        for node in nodes:
            found[self.kind(node)].append(node)
        return found

    @abstractmethod
    def timings(self, nodes: Counts) -> Mapping[Counts, Timing]:
        """Return the pipelines that so many nodes can form, by their nodes, with their step times."""

    def templates(self, num_nodes: int) -> dict[int, PipelineTemplate]:
        """Return the templates of all sizes up to so many nodes; none where pipelines have nodes of several kinds."""
        return {}

    @abstractmethod
    def form(self, counts: Counts, total: Counts) -> Form:
        """Return the pipeline of so many nodes, in a plan of `total` of them; the same object each time."""

    @abstractmethod
    def best(self, total: Counts) -> tuple[tuple[Counts, ...], float]:
        """Return the best pipelines of so many nodes, and the seconds of their step. Raises PlanningError."""

    def start(self, total: Counts, *, is_slowed: bool) -> tuple[list[Form], Sequence[int] | None]:
        """Return the best pipelines to begin with, and their microbatches if these are fixed already.

        `is_slowed` where some of the nodes are slow. Raises PlanningError.
        """
        return [self.form(counts, total) for counts in self.best(total)[0]], None

    def least_s(self, pipelines: Sequence[Counts], total: Counts) -> float:
        """Return what a step of these pipelines takes at least, where no node is slow."""
        return 0.0

    @abstractmethod
    def continued(self, own: Form, total: Counts, num_microbatches: int, speeds: Sequence[float] | None) -> Form | None:
        """Return the form in which an old pipeline goes on, if it goes on with as many nodes of each kind.

        Mostly its own, as long as that is about as fast as a template is now. `speeds` are those of its nodes, if any
        of them is slow.
        """

    @abstractmethod
    def usual_if_faster(self, form: Form, total: Counts, num_microbatches: int) -> Form:
        """Return the form that a new pipeline of these nodes without slow ones would have, if that is faster."""

    @abstractmethod
    def explain(self, total: Counts) -> str:
        """Say why so many nodes cannot hold the model."""

    @abstractmethod
    def timing(self, form: Form, speeds: Sequence[float] | None, share: int, still_fast: float = STILL_FAST) -> Timing:
        """Return the bound on a pipeline's step of about `share` microbatches; `speeds` where nodes are slow."""

    def reduced_bytes(self, form: Form, share: int) -> int:
        """Return the most gradient bytes that a node of a pipeline reduces."""
        return self.costs.of[0].reduced_bytes(form.template)  # what a layer's parameters take is the same on all kinds

    @abstractmethod
    def most_pipelines(self, total: Counts) -> int:
        """Return how many pipelines so many nodes can form, at most one for each microbatch."""

    def num_pipelines(self, total: Counts) -> tuple[int, int]:
        """Return the fewest and the most pipelines that so many nodes should have.

        Raises PlanningError where they cannot hold the model.
        """
        most = self.most_pipelines(total)
        if not most:
            raise PlanningError(self.explain(total))
        if self.settings.num_pipelines is not None:
            wanted = min(self.settings.num_pipelines, most)
            return wanted, wanted
        return min(self.settings.fault_threshold + 1, most), most

    def needed(self, template: PipelineTemplate) -> tuple[Holding, ...]:
        """Return what each node of a pipeline of that template has to hold."""
        if id(template) not in self._needed:
            self._needed[id(template)] = template, needed_holdings(template, self.most_devices)
        return self._needed[id(template)][1]

    def cut_for(self, form: Form, speeds: Sequence[float], holdings: Sequence[Holding], num_microbatches: int) -> Form:
        """Return the form with the best stages for nodes of these speeds, which hold these layers; or as it is.

        Pipelines with several chunks a stage stay as they are. Remembered once found.
        """
        template = form.template
        if template.num_chunks > 1 or template.num_stages == 1:
            return form
        key = template.stages, form.kinds, tuple(speeds), tuple(holdings), num_microbatches
        if key not in self._for_speeds:
            costs = [self.costs.of[kind] for kind in form.kinds]
            cut = cut_for_speeds(costs, template, speeds, holdings, num_microbatches)
            self._for_speeds[key] = Form(template=cut, kinds=form.kinds)
        found = self._for_speeds[key]
        return form if found.template.stages == template.stages else found

    def cut_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan whose pipelines are cut into chunks for their microbatches, where that is wanted."""
        return plan

    def predicted_step_s(self, plan: ExecutionPlan, bound_s: float, speeds: Mapping[str, float]) -> float:
        """Return the seconds of a plan's step: the bound on it, or more exactly."""
        return bound_s

    def build_plan(
        self,
        pipelines: Sequence[tuple[Form, Sequence[str]]],
        spares: Sequence[str],
        speeds: Mapping[str, float],
        *,
        before: ExecutionPlan | None = None,
        still_fast: float = STILL_FAST,
    ) -> tuple[ExecutionPlan, float]:
        """Return the plan of pipelines given as (form, nodes), and the seconds of its step at the given speeds.

        Pipelines that are as in the plan `before` are the same objects: they know their workers already. Those without
        slow nodes that take up to `still_fast` times as long as those of their size count as fast as these.
        """
        known = {each.nodes: each for each in before.pipelines} if before is not None else {}
        num_nodes = sum(len(nodes) for _, nodes in pipelines)
        # Thousands of pipelines share a few forms, which take long to compare.
        alike: dict[int, tuple[Timing, int]] = {}
        timings, reduced_bytes = [], 0
        for form, nodes in pipelines:
            share = self.share(len(nodes), num_nodes)
            if id(form) not in alike:
                alike[id(form)] = self.timing(form, None, share, still_fast), self.reduced_bytes(form, share)
            timing, own_bytes = alike[id(form)]
            if (slowed := speeds_among(nodes, speeds)) is not None:
                timing = self.timing(form, slowed, share, still_fast)
            timings.append(timing)
            reduced_bytes = max(reduced_bytes, own_bytes)
        counts = distribute_microbatches(timings, self.settings.num_microbatches)
        slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
        plan = ExecutionPlan(
            pipelines=tuple(
                _pipeline(form.template, tuple(nodes), count, known)
                for (form, nodes), count in zip(pipelines, counts, strict=True)
            ),
            spares=tuple(spares),
        )
        return plan, slowest_s + reduction_s(self.costs.network, reduced_bytes, len(pipelines))

    def rest_s(self, rests: Sequence[tuple[Pipeline, int, int]], speeds: Mapping[str, float]) -> float:
        """Return the seconds in which pipelines finish a step; see `Planner.rest_s`."""
        slowest_s, most_bytes = 0.0, 0
        for each, own, others in rests:
            form, share = self.form_of(each), each.num_microbatches
            timing = self.timing(form, speeds_among(each.nodes, speeds), share)
            # A pipeline that is filled takes one microbatch after the other.
            own_s = timing.step_s(own) if own == share else own * timing.next_s
            slowest_s = max(slowest_s, own_s + (timing.step_s(others) if others else 0.0))
            most_bytes = max(most_bytes, self.reduced_bytes(form, share))
        return slowest_s + reduction_s(self.costs.network, most_bytes, len(rests))

    def kinds_of(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the number of each node's kind. Raises PlanningError."""
        return tuple(map(self.kind, nodes))

    def form_of(self, pipeline: Pipeline) -> Form:
        """Return the form of a pipeline of a plan."""
        return Form(template=pipeline.template, kinds=self.kinds_of(pipeline.nodes))

    def counts_of(self, form: Form) -> Counts:
        """Return how many nodes of each kind a pipeline has."""
        return tuple(form.kinds.count(kind) for kind in range(len(self.costs.kinds)))

    def share(self, size: int, num_nodes: int) -> int:
        """Return the microbatches of a pipeline of a size, in a plan of so many nodes."""
        return max(1, round(self.settings.num_microbatches * size / num_nodes))


def speeds_among(nodes: Sequence[str], speeds: Mapping[str, float]) -> list[float] | None:
    """Return the speeds of a pipeline's nodes; None where none of them has another than the usual one."""
    if not speeds or not any(node in speeds for node in nodes):
        return None
    return [speeds.get(node, 1.0) for node in nodes]


def _pipeline(
    template: PipelineTemplate, nodes: tuple[str, ...], count: int, known: Mapping[tuple[str, ...], Pipeline]
) -> Pipeline:
    before = known.get(nodes)
    if before is not None and before.template is template and before.num_microbatches == count:
        return before
    return Pipeline(template=template, nodes=nodes, num_microbatches=count)
