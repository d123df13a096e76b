"""The pipelines that nodes can form, with their times, and the plans made of them.

`one_kind` and `mixed` each search for pipelines in their own way; all that follows from a pipeline is here. Results
are computed on demand and cached; the order of the calls changes no result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate

from .costs import Timing
from .instantiation import distribute_microbatches, reduction_s
from .inventory import Holding, needed_holdings
from .kinds import Counts, Form, KindCosts
from .templates import cut_for_speeds, order_for_speeds

# Cutting a pipeline again moves its layers, so a slightly slower template stays.
STILL_FAST = 1.05
"""A pipeline keeps its own template while that takes at most this many times as long as the present one."""


class Catalog(ABC):
    """The pipelines of one cluster under one set of settings."""

    def __init__(self, costs: KindCosts) -> None:
        self.costs, self.settings = costs, costs.settings
        # The holdings of all nodes have this length.
        self.most_devices = max(costs.devices)
        # Keyed by the identity of the template, which the value keeps alive: comparing templates takes long.
        self._needed: dict[int, tuple[PipelineTemplate, tuple[Holding, ...]]] = {}
        self._for_speeds: dict[tuple[object, ...], Form] = {}
        self._fewest: dict[Counts, int] = {}
        self._orders: dict[tuple[object, ...], tuple[int, ...] | None] = {}

    @property
    def most_stages(self) -> int:
        """The most stages that a pipeline can have, since every stage needs a layer."""
        return min(self.costs.num_layers, self.settings.num_stages or self.costs.num_layers)

    @abstractmethod
    def kind(self, node: str) -> int:
        """Return the index of a node's kind. Raises PlanningError where it has none, or one without a profile."""

    @abstractmethod
    def count(self, nodes: Collection[str]) -> Counts:
        """Count the nodes of each kind. Raises PlanningError."""

    def by_kind(self, nodes: Collection[str]) -> Sequence[Sequence[str]]:
        """Return the nodes of each kind, in their order. Raises PlanningError."""
        found: list[list[str]] = [[] for _ in self.costs.kinds]
        for node in nodes:
            found[self.kind(node)].append(node)
        return found

    @abstractmethod
    def timings(self, nodes: Counts) -> Mapping[Counts, Timing]:
        """Return the step times of every pipeline that these nodes can form, keyed by its nodes."""

    def templates(self, num_nodes: int) -> dict[int, PipelineTemplate]:
        """Return the template of each size up to `num_nodes` nodes; none where pipelines mix kinds."""
        return {}

    def template_timing(self, num_nodes: int) -> Timing:
        """Return the step times of the template of a size."""
        return self.timings((num_nodes,))[(num_nodes,)]

    @abstractmethod
    def form(self, counts: Counts, total: Counts) -> Form:
        """Return the pipeline of `counts` nodes in a plan of `total` nodes; the same object each time."""

    @abstractmethod
    def best(self, total: Counts) -> tuple[tuple[Counts, ...], float]:
        """Return the best pipelines of `total` nodes, and the seconds of their step. Raises PlanningError."""

    def start(self, total: Counts, *, is_slowed: bool) -> tuple[list[Form], Sequence[int] | None]:
        """Return the best pipelines for a first plan, and their microbatches where the search fixes these.

        `is_slowed` tells that some of the nodes are slow. Raises PlanningError.
        """
        return [self.form(counts, total) for counts in self.best(total)[0]], None

    def exact_step_s(self, plan: ExecutionPlan, speeds: Mapping[str, float]) -> float | None:
        """Return the event-exact seconds of a plan's step, reduction included; None where bounds have to do."""
        return None

    def least_start_s(self, total: Counts) -> float:
        """Return a lower bound on the event-exact seconds of what `start` returns where no node is slow."""
        return 0.0

    def least_exact_s(self, forms: Sequence[Form], num_microbatches: Sequence[int]) -> float:
        """Return a lower bound on the event-exact seconds of these pipelines' step, reduction included."""
        return 0.0

    def exact_shares(self, plan: ExecutionPlan, speeds: Mapping[str, float]) -> tuple[int, ...]:
        """Return the microbatches of a plan's pipelines that suit their timelines, where it has an exact step."""
        return tuple(pipeline.num_microbatches for pipeline in plan.pipelines)

    def cut_again(self, form: Form, num_microbatches: int, num_pipelines: int, speeds: tuple[float, ...] = ()) -> Form:
        """Return a pipeline with the fastest of some stages by the timeline; `speeds` if its nodes are slow."""
        return form

    def least_s(self, pipelines: Sequence[Counts], total: Counts) -> float:
        """Return a lower bound on the seconds of these pipelines' step, with no node slow."""
        return 0.0

    @abstractmethod
    def continued(self, own: Form, total: Counts, num_microbatches: int, speeds: Sequence[float] | None) -> Form | None:
        """Return the form in which an old pipeline continues with unchanged numbers of nodes of each kind.

        This is its own form while that is about as fast as a present template. `speeds` are those of its nodes, None
        if none of them is slow.
        """

    @abstractmethod
    def usual_if_faster(self, form: Form, total: Counts, num_microbatches: int) -> Form:
        """Return the form of a new pipeline of these nodes, none of them slow, if it is faster than `form`."""

    @abstractmethod
    def explain(self, total: Counts) -> str:
        """Explain why `total` nodes cannot hold the model."""

    @abstractmethod
    def timing(self, form: Form, speeds: Sequence[float] | None, share: int, still_fast: float = STILL_FAST) -> Timing:
        """Return the bound on a pipeline's step of about `share` microbatches; `speeds` where nodes are slow."""

    def reduced_bytes(self, form: Form, share: int) -> int:
        """Return the most gradient bytes that a node of a pipeline reduces."""
        return self.costs.of[0].reduced_bytes(form.template)  # a layer's parameters take the same bytes on all kinds

    @abstractmethod
    def most_pipelines(self, total: Counts) -> int:
        """Return how many pipelines `total` nodes can form for a whole batch; 0 for none."""

    def possible_number(self, total: Counts, wanted: int) -> int:
        """Return how many pipelines take a whole batch: `wanted`, or the next number that can."""
        return wanted

    def can_hold(self, total: Counts) -> bool:
        """Return whether these nodes can train the model."""
        return bool(self.timings(total))

    def num_pipelines(self, total: Counts) -> tuple[int, int]:
        """Return the fewest and the most pipelines for `total` nodes.

        Raises PlanningError where the nodes cannot hold the model.
        """
        most = self.most_pipelines(total)
        if not most:
            raise PlanningError(self.explain(total))
        if self.settings.num_pipelines is not None:
            wanted = self.possible_number(total, min(self.settings.num_pipelines, most))
            return wanted, wanted
        if self.settings.max_redundancy_percent is not None:
            return self._affordable(total, most), most
        return min(self.settings.fault_threshold + 1, most), most

    def _affordable(self, total: Counts, most: int) -> int:
        """Return how many pipelines, up to f + 1, make a step at most so much longer as redundancy may cost."""
        if total not in self._fewest:
            longest_s = (1 + (self.settings.max_redundancy_percent or 0.0) / 100) * self.best_step_s(total, 1, most)
            wanted = range(min(self.settings.fault_threshold + 1, most), 1, -1)
            self._fewest[total] = next((n for n in wanted if self.best_step_s(total, n, most) <= longest_s), 1)
        return self._fewest[total]

    @abstractmethod
    def best_step_s(self, total: Counts, fewest: int, most: int) -> float:
        """Return the seconds of the best step of `fewest` to `most` pipelines."""

    @abstractmethod
    def best_for(self, nodes: Counts, total: Counts, number: int | None = None) -> tuple[Counts, ...] | None:
        """Return the best pipelines of some of `total` nodes, for their share of the batch, or the best `number`.

        Returns None if they cannot form that number, or any.
        """

    def needed(self, template: PipelineTemplate) -> tuple[Holding, ...]:
        """Return the layers that each node of a pipeline has to hold."""
        if id(template) not in self._needed:
            self._needed[id(template)] = template, needed_holdings(template, self.most_devices)
        return self._needed[id(template)][1]

    def cut_for(self, form: Form, speeds: Sequence[float], holdings: Sequence[Holding], num_microbatches: int) -> Form:
        """Return the form with the best stages for nodes of these speeds that hold these layers, or `form` itself."""
        template = form.template
        # Pipelines with several chunks a stage stay as they are.
        if template.num_chunks > 1 or template.num_stages == 1:
            return form
        key = template.stages, form.kinds, tuple(speeds), tuple(holdings), num_microbatches
        if key not in self._for_speeds:
            costs = [self.costs.of[kind] for kind in form.kinds]
            cut = cut_for_speeds(costs, template, speeds, holdings, num_microbatches)
            self._for_speeds[key] = Form(template=cut, kinds=form.kinds)
        found = self._for_speeds[key]
        # Callers compare forms by identity, so an equal cut has to be the same object.
        return form if found.template.stages == template.stages else found

    def order_for(self, form: Form, speeds: Sequence[float], num_microbatches: int) -> tuple[int, ...] | None:
        """Return the best order of a pipeline's nodes, as their present places; None where no other is better."""
        template = form.template
        if template.num_chunks > 1 or template.num_nodes == 1:
            return None
        key = template.stages, form.kinds, tuple(speeds), num_microbatches
        if key not in self._orders:
            costs = [self.costs.of[kind] for kind in form.kinds]
            self._orders[key] = order_for_speeds(costs, template, speeds, num_microbatches)
        order = self._orders[key]
        return None if order == tuple(range(template.num_nodes)) else order

    def cut_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return the plan with its pipelines cut into chunks, where the schedule needs them."""
        return plan

    def marked(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return the plan with what its stages recompute, where that is for the planner to choose."""
        return plan

    def unmarked(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a marked plan as it was."""
        return plan

    def predicted_step_s(self, plan: ExecutionPlan, bound_s: float, speeds: Mapping[str, float]) -> float:
        """Return the seconds of a plan's step: `bound_s`, or a closer prediction."""
        return bound_s

    def build_plan(
        self,
        pipelines: Sequence[tuple[Form, Sequence[str]]],
        spares: Sequence[str],
        speeds: Mapping[str, float],
        *,
        before: ExecutionPlan | None = None,
        still_fast: float = STILL_FAST,
        num_microbatches: Sequence[int] | None = None,
    ) -> tuple[ExecutionPlan, float]:
        """Return the plan of pipelines given as (form, nodes), and the seconds of its step at the given speeds.

        A pipeline without slow nodes that takes up to `still_fast` times as long as others of its size counts as
        equally fast. `num_microbatches` fixes the shares of the batch. Pipelines that are unchanged since the plan
        `before` stay the same objects.
        """
        # Old pipeline objects have computed their workers already.
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
        counts = num_microbatches or distribute_microbatches(timings, self.settings.num_microbatches)
        slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
        made = []
        for (form, nodes), count in zip(pipelines, counts, strict=True):
            own = known.get(tuple(nodes))
            if own is None or own.template is not form.template or own.num_microbatches != count:
                own = Pipeline(template=form.template, nodes=tuple(nodes), num_microbatches=count)
            made.append(own)
        plan = ExecutionPlan(pipelines=tuple(made), spares=tuple(spares))
        return plan, slowest_s + reduction_s(self.costs.network, reduced_bytes, len(pipelines))

    def rest_s(self, rests: Sequence[tuple[Pipeline, int, int]], speeds: Mapping[str, float]) -> float:
        """Return the seconds in which pipelines finish a step; see `Planner.rest_s`."""
        slowest_s, most_bytes = 0.0, 0
        for each, own, others in rests:
            form, share = self.form_of(each), each.num_microbatches
            timing = self.timing(form, speeds_among(each.nodes, speeds), share)
            # A pipeline in mid-step is full already and finishes one microbatch each `next_s`.
            own_s = timing.bound_s(own) if own == share else own * timing.next_s
            # What it has had in flight it can have again, whatever this planner thinks of its memory.
            most = math.inf if share >= each.template.num_stages else max(share, timing.most_microbatches)
            others_s = timing.bound_s(others) if others else 0.0
            slowest_s = max(slowest_s, own_s + (others_s if others <= most else math.inf))
            most_bytes = max(most_bytes, self.reduced_bytes(form, share))
        return slowest_s + reduction_s(self.costs.network, most_bytes, len(rests))

    def kinds_of(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the index of each node's kind. Raises PlanningError."""
        return tuple(map(self.kind, nodes))

    def form_of(self, pipeline: Pipeline) -> Form:
        return Form(template=pipeline.template, kinds=self.kinds_of(pipeline.nodes))

    def counts_of(self, form: Form) -> Counts:
        return tuple(form.kinds.count(kind) for kind in range(len(self.costs.kinds)))

    def share(self, size: int, num_nodes: int) -> int:
        """Return the microbatches of a pipeline of `size` nodes in a plan of `num_nodes` nodes."""
        return max(1, round(self.settings.num_microbatches * size / num_nodes))


def speeds_among(nodes: Sequence[str], speeds: Mapping[str, float]) -> list[float] | None:
    """Return the speeds of a pipeline's nodes; None if `speeds` names none of them."""
    if not speeds or not any(node in speeds for node in nodes):
        return None
    return [speeds.get(node, 1.0) for node in nodes]
