"""The planner for nodes of several kinds: named nodes in, decisions out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate, WorkerId
from oobleck.planner.catalog import rest_of_step_s
from oobleck.planner.decision import Decision
from oobleck.planner.formatting import listed
from oobleck.planner.node_kind import NodeKind
from oobleck.planner.profiles import Profile
from oobleck.planner.reconfiguration import Changes
from oobleck.planner.settings import PlannerSettings
from oobleck.planner.speeds import speeds_of
from oobleck.planner.start import check_nodes, started

from .catalog import MixedCatalog
from .choice import Choice, Chooser, Counts
from .kinds import MixedTemplate
from .reconfigure import reconfigure


class MixedPlanner:
    """Plans for one model on nodes of several kinds. A function of its arguments; it only remembers templates."""

    def __init__(
        self, kinds: Sequence[NodeKind], settings: PlannerSettings, kind_of: Mapping[str, str], *, mixes: bool = True
    ) -> None:
        """`kind_of` names the kind of each node; it may grow. `settings.devices_per_node` is not used.

        With `mixes=False`, pipelines have nodes of one kind each. Raises PlanningError where profiles are not of one
        model.
        """
        self.kinds = tuple(kinds)
        self.settings = settings
        self._kind_of = kind_of
        self._numbers = {kind.name: number for number, kind in enumerate(kinds)}
        self._catalog = MixedCatalog(kinds, settings, mixes=mixes)
        seconds = [_seconds_a_node(kind) for kind in kinds]
        self._ranks = [sorted(seconds).index(own_s) for own_s in seconds]

    def kind_of(self, node: str) -> str:
        """Return the name of a node's kind. Raises PlanningError where it has none, or one without a profile."""
        return self.kinds[self._number(node)].name

    def profile_of(self, node: str) -> Profile:
        """Return the profile of a node's kind, with the network that all kinds share."""
        return self._catalog.costs.of[self._number(node)].profile

    def can_hold(self, nodes: Sequence[str]) -> bool:
        """Return whether these nodes hold the model at least once."""
        return bool(self._catalog.timings(self._count(nodes)))

    def best_first(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes in the order in which they are used where not all of them are: the fastest first."""
        return sorted(nodes, key=lambda node: self._ranks[self._number(node)])

    def fewest_nodes(self, nodes: Sequence[str]) -> int:
        """Return how many of the nodes, from the first on, hold the model as often as was asked for.

        Where not even all do, that is all of them. Raises PlanningError where they cannot hold the model once.
        """
        wanted, _ = self._catalog.num_pipelines(self._count(nodes))
        return bisect_left(range(1, len(nodes)), wanted, key=lambda count: self._num_copies(nodes[:count])) + 1

    def step_s(self, nodes: Sequence[str]) -> float:
        """Return the seconds of a step under the best plan for these nodes, none of them slow. Raises PlanningError."""
        total = self._count(nodes)
        choice = self._choose(total)
        templates = [self._catalog.template(counts, total).template for counts in choice.pipelines]
        return choice.slowest_s + self._catalog.reduction_s(templates)

    def _num_copies(self, nodes: Sequence[str]) -> int:
        """Return how many of the pipelines that were asked for these nodes can form."""
        total = self._count(nodes)
        return self._catalog.num_pipelines(total)[0] if self._catalog.timings(total) else 0

    def templates(self, nodes: Sequence[str]) -> dict[tuple[int, ...], PipelineTemplate]:
        """Return the pipelines that some of these nodes can form, by how many of each kind they have."""
        total = self._count(nodes)
        return {counts: self._catalog.template(counts, total).template for counts in self._catalog.timings(total)}

    def initial_plan(self, nodes: Sequence[str], *, slow: Mapping[str, float] | None = None) -> Decision:
        """Plan the start of a job on named nodes; see `Planner.initial_plan`."""
        speeds = speeds_of(slow)
        check_nodes(nodes)
        limits = [0.0, *sorted({speed for node in nodes if (speed := speeds.get(node, 1.0)) < 1.0})]
        best: tuple[ExecutionPlan, float] | None = None
        for limit in limits:
            chosen = [node for node in nodes if speeds.get(node, 1.0) > limit]
            if not chosen or (limit and not self._catalog.timings(self._count(chosen))):
                continue
            plan, step_s = self._plan(nodes, chosen, speeds)
            if best is None or (len(plan.pipelines) >= len(best[0].pipelines) and step_s < best[1]):
                best = plan, step_s
        assert best is not None, "all nodes were tried"
        plan, step_s = best
        return started(plan, step_s, self.settings, sizes=self._sizes(plan))

    def reconfigure(
        self,
        plan: ExecutionPlan,
        *,
        lost: Collection[str] = (),
        joined: Collection[str] = (),
        leaving: Collection[str] = (),
        resting: Collection[str] = (),
        slow: Mapping[str, float] | None = None,
        held: Mapping[WorkerId, frozenset[int]] | None = None,
    ) -> Decision:
        """Decide what follows a plan; see `Planner.reconfigure`. Places are filled by nodes of their kind alone."""
        return reconfigure(
            self._catalog,
            self._number,
            plan,
            Changes(lost=lost, joined=joined, leaving=leaving, resting=resting, speeds=speeds_of(slow), held=held),
        )

    def rest_s(
        self, plan: ExecutionPlan, rests: Mapping[int, tuple[int, int]], *, slow: Mapping[str, float] | None = None
    ) -> float:
        """Return the seconds in which pipelines finish the step that they are in; see `Planner.rest_s`."""
        speeds = speeds_of(slow)
        slowest_s, templates = 0.0, []
        for index, (own, others) in rests.items():
            pipeline = plan.pipelines[index]
            timing = self._catalog.timing(self._mixed(pipeline), [speeds.get(node, 1.0) for node in pipeline.nodes])
            slowest_s = max(slowest_s, rest_of_step_s(timing, pipeline.num_microbatches, own, others))
            templates.append(pipeline.template)
        return slowest_s + self._catalog.reduction_s(templates)

    def has_room(self, plan: ExecutionPlan, *, gradient_copies: int) -> bool:
        """Return whether every device under a plan holds so many copies of its gradients beside all else."""
        return all(
            self._catalog.costs.fits(self._mixed(pipeline), more_copies=gradient_copies) for pipeline in plan.pipelines
        )

    def cheapest_nodes(self, nodes: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...] | None:
        """Return those of the nodes that train the most samples for their price.

        `prices` are for one node of each kind for an hour. Of a kind, the first nodes are taken. None where the nodes
        are too many to look at all numbers of them. Raises PlanningError for a kind without a price.
        """
        for kind in self.kinds:
            if kind.name not in prices:
                raise PlanningError(f"kind {kind.name} has no price; name one for each kind")
        total = self._count(nodes)
        fewest, _ = self._catalog.num_pipelines(total)
        chooser = Chooser(self._catalog.timings(total), self.settings.num_microbatches)
        counts = chooser.cheapest(total, [prices[kind.name] for kind in self.kinds], fewest=fewest)
        if counts is None:
            return None
        left = list(counts)
        chosen = []
        for node in nodes:
            if left[self._number(node)]:
                left[self._number(node)] -= 1
                chosen.append(node)
        return tuple(chosen)

    def _plan(
        self, nodes: Sequence[str], chosen: Sequence[str], speeds: Mapping[str, float]
    ) -> tuple[ExecutionPlan, float]:
        """Return the best plan for the chosen of the nodes; those that are not used are spares."""
        total = self._count(chosen)
        choice = self._choose(total)
        # Nodes of like speed come together.
        waiting: list[deque[str]] = [deque() for _ in self.kinds]
        for node in sorted(chosen, key=lambda node: -speeds.get(node, 1.0)):
            waiting[self._number(node)].append(node)
        pipelines = []
        for counts in choice.pipelines:
            mixed = self._catalog.template(counts, total)
            pipelines.append((mixed, [waiting[kind].popleft() for kind in mixed.kinds]))
        used = {node for _, each in pipelines for node in each}
        return self._catalog.build_plan(pipelines, [node for node in nodes if node not in used], speeds)

    def _choose(self, total: Counts) -> Choice:
        fewest, exactly = self._catalog.num_pipelines(total)
        choice = self._catalog.choose(total, self.settings.num_microbatches, fewest, exactly=exactly)
        assert choice is not None, "so many pipelines are possible"
        return choice

    def _mixed(self, pipeline: Pipeline) -> MixedTemplate:
        return MixedTemplate(template=pipeline.template, kinds=tuple(map(self._number, pipeline.nodes)))

    def _number(self, node: str) -> int:
        """Return the number of a node's kind."""
        if (name := self._kind_of.get(node)) is None:
            raise PlanningError(f"node {node} has no kind; kinds are {listed(self._numbers)}")
        if name not in self._numbers:
            raise PlanningError(
                f"node {node} is of kind {name}, which has no profile; there is one of {listed(self._numbers)}"
            )
        return self._numbers[name]

    def _count(self, nodes: Sequence[str]) -> Counts:
        numbers = [self._number(node) for node in nodes]
        return tuple(numbers.count(kind) for kind in range(len(self.kinds)))

    def _sizes(self, plan: ExecutionPlan) -> str:
        forms: dict[str, int] = {}
        for pipeline in plan.pipelines:
            counts = self._count(pipeline.nodes)
            parts = [f"{number} {kind.name}" for number, kind in zip(counts, self.kinds, strict=True) if number]
            forms[" + ".join(parts)] = forms.get(" + ".join(parts), 0) + 1
        return ", ".join(form if times == 1 else f"{times} × ({form})" for form, times in forms.items())


def _seconds_a_node(kind: NodeKind) -> float:
    """Return the seconds in which a node's devices, side by side, compute all layers once."""
    seconds = math.fsum(layer.forward_s[1] + layer.backward_s[1] for layer in kind.profile.layers)
    return seconds / kind.devices_per_node
