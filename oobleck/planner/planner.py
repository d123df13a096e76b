"""The planner as one object: profiles and settings in, decisions out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from oobleck.errors import PlanningError
from oobleck.job import Sharding
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate, WorkerId

from . import mixed, one_kind
from . import tensor_parallel as groups
from .catalog import Catalog
from .formatting import counted
from .profiles import Profile
from .reconfiguration import Changes, Domains, Propose, lack_of_domains, lacking, reconfigure
from .sharding import with_exchanges
from .values import Cutter, Decision, NodeKind, PlannerSettings


class Planner:
    """Plans for one model on one cluster; a pure function of its arguments that caches its results."""

    def __init__(
        self,
        kinds: Profile | Sequence[NodeKind],
        settings: PlannerSettings,
        kind_of: Mapping[str, str] | None = None,
        *,
        domain_of: Mapping[str, str] | None = None,
        tensor_parallel: int = 1,
        sharding: Sharding = "none",
        is_cast: bool = False,
        make_cutter: Callable[[Profile], Cutter] | None = None,
        mixes: bool = True,
    ) -> None:
        """Take the kinds of nodes, or one profile where all nodes are alike, with the devices that `settings` gives.

        With several kinds, `kind_of` names the kind of each node and may grow; stages have one device and one chunk;
        `mixes=False` keeps each pipeline to one kind. With one kind, each `tensor_parallel` devices hold the same
        layers, and share them out as `sharding` and `is_cast` say (`with_shares`); `make_cutter`, called with the
        planner's profile, cuts pipelines into chunks. `domain_of` names the failure domain of nodes, and may grow: f
        counts domains, and a node that it leaves out is one by itself. Raises PlanningError.
        """
        if isinstance(kinds, Profile):
            kinds = [NodeKind(name=kinds.device.name, profile=kinds, devices_per_node=settings.devices_per_node)]
        self.kinds, self.settings, self._degree = tuple(kinds), settings, tensor_parallel
        self._remade = partial(
            Planner,
            self.kinds,
            kind_of=kind_of,
            domain_of=domain_of,
            tensor_parallel=tensor_parallel,
            sharding=sharding,
            is_cast=is_cast,
            make_cutter=make_cutter,
        )
        self._domain_of = {} if domain_of is None else domain_of
        self._domains = Domains(self._domain_of, settings.fault_threshold)
        self._profiles: tuple[Profile, ...]
        self._catalog: Catalog
        self._propose: Propose
        if len(self.kinds) == 1:
            (kind,) = self.kinds
            exchanging = with_exchanges(kind.profile, self._degree, sharding)
            profile = groups.with_shares(exchanging, self._degree, sharding, is_cast=is_cast)
            alike = one_kind.OneKindCatalog(
                *groups.grouped(profile, replace(settings, devices_per_node=kind.devices_per_node), self._degree),
                make_cutter=make_cutter,
            )
            # Reports and forecasts see single devices; only the catalog takes a group for one.
            self._profiles = (groups.with_times_of_groups(profile, self._degree),)
            self._catalog, self._propose = alike, partial(one_kind.propose_moves, alike)
        else:
            if self._degree > 1:
                raise PlanningError(f"tensor_parallel is {self._degree}; with kinds of nodes, stages have 1 device")
            if any(layer.recomputed for kind in self.kinds for layer in kind.profile.layers):
                raise PlanningError("recompute is auto; with kinds of nodes, choose none, selective or all")
            several = mixed.MixedCatalog(self.kinds, settings, kind_of or {}, mixes=mixes)
            self._profiles = tuple(costs.profile for costs in several.costs.of)
            self._catalog, self._propose = several, partial(mixed.propose_moves, several)
        seconds = [_seconds_a_node(kind) for kind in self.kinds]
        # Equally fast kinds share a rank, so that `best_first` leaves their nodes in order.
        self._ranks = [sorted(seconds).index(own_s) for own_s in seconds]

    def with_changes(self, *, num_pipelines: int | None, mixes: bool = True) -> Planner:
        """Return a planner for the same nodes with another number of pipelines, or without mixing kinds."""
        return self._remade(settings=replace(self.settings, num_pipelines=num_pipelines), mixes=mixes)

    @property
    def profile(self) -> Profile:
        """The profile of all nodes, or of the first of several kinds."""
        return self._profiles[0]

    def templates(self, num_nodes: int) -> dict[int, PipelineTemplate]:
        """Return the template of each size up to `num_nodes` that holds the model; none for several kinds of nodes."""
        return self._catalog.templates(num_nodes)

    def template_step_s(self, num_nodes: int, num_microbatches: int) -> float:
        """Return the seconds of a step of one pipeline, without the reduction, whether its memory suffices or not."""
        return self._catalog.template_timing(num_nodes).bound_s(num_microbatches)

    def kind_of(self, node: str) -> str:
        """Return the name of a node's kind. Raises PlanningError where it has none, or one without a profile."""
        return self.kinds[self._catalog.kind(node)].name

    def domain_of(self, node: str) -> str:
        """Return the name of a node's failure domain; empty where it is one by itself."""
        return self._domain_of.get(node, "")

    def profile_of(self, node: str) -> Profile:
        """Return the profile of a node's kind, with the network that all kinds share."""
        return self._profiles[self._catalog.kind(node)]

    def can_hold(self, nodes: Sequence[str]) -> bool:
        """Return whether these nodes hold the model at least once."""
        return self._catalog.can_hold(self._catalog.count(nodes))

    def best_first(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes, the fastest kinds first, of all domains in turn: a plan for fewer nodes takes the first."""
        ordered = self._domains.in_turn(nodes) if self._domains else nodes
        return sorted(ordered, key=lambda node: self._ranks[self._catalog.kind(node)])

    def fewest_nodes(self, nodes: Sequence[str]) -> int:
        """Return how many of the first nodes hold as many copies of the model as the settings ask for.

        These are all nodes if none fewer suffice. Raises PlanningError where all together cannot hold the model once.
        """
        wanted, _ = self._catalog.num_pipelines(self._catalog.count(nodes))

        def num_copies(number: int) -> int:
            total = self._catalog.count(nodes[:number])
            return self._catalog.num_pipelines(total)[0] if self._catalog.can_hold(total) else 0

        # More nodes never form fewer pipelines, so a bisection finds the first number that suffices.
        return bisect_left(range(1, len(nodes)), wanted, key=num_copies) + 1

    def step_s(self, nodes: Sequence[str]) -> float:
        """Return the seconds of a step under the best plan for these nodes, none of them slow. Raises PlanningError."""
        return self._catalog.best(self._catalog.count(nodes))[1]

    def initial_plan(self, nodes: Sequence[str], *, slow: Mapping[str, float] | None = None) -> Decision:
        """Plan the start of a job on named nodes. Raises PlanningError.

        `slow` gives a node's computing time as a multiple of its profile's (2.0: twice as long); others take 1.0.
        """
        speeds = _speeds_of(slow)
        self._check(nodes)
        # Pipelines take nodes in this order: nodes of like speed share one, and the slowest become spares.
        ordered = sorted(nodes, key=lambda node: -speeds.get(node, 1.0))
        best: tuple[ExecutionPlan, float] | None = None
        # Try all nodes, then leave out those at or below each low speed.
        for limit in [0.0, *sorted({speed for node in nodes if (speed := speeds.get(node, 1.0)) < 1.0})]:
            chosen = [node for node in ordered if speeds.get(node, 1.0) > limit]
            if limit and not self.can_hold(chosen):
                continue
            plan, step_s = self._plan(ordered, chosen, speeds)
            # A faster step with fewer pipelines does not win: pipelines are the copies of the state.
            if best is None or (len(plan.pipelines) >= len(best[0].pipelines) and step_s < best[1]):
                best = plan, step_s
        assert best is not None, "all nodes were tried"
        plan, bound_s = self._fit(best[0], speeds) or best
        plan = self._catalog.cut_plan(plan)
        redundant = not lacking(self._catalog, self._domains, plan)
        return Decision(
            plan=self._finished(plan),
            action="start",
            reason=self._reason(plan, redundant=redundant),
            transfers=(),
            predicted_step_s=self._catalog.predicted_step_s(plan, bound_s, speeds),
            bound_step_s=bound_s,
            redundant=redundant,
        )

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
        horizon_s: float | None = None,
    ) -> Decision:
        """Decide the plan that follows once nodes were lost, have joined, or have changed their speeds.

        Arguments:
            lost, joined: a node in both has restarted, perhaps as one of another kind, and holds nothing.
            leaving: nodes that get no place but still serve as sources.
            resting: as `leaving`, but they become spares.
            slow: computing times as in `initial_plan`. Name all slow nodes each time; others take 1.0 again. A pipeline
                with a slow node gets fewer microbatches, which moves no state; slow nodes become spares, or gather in
                few pipelines, where the faster step repays what has to move.
            held: the layers that each living worker holds whole; by default, those of the plan.
            horizon_s: the expected seconds to the next change; by default, `mean_time_to_failure_s` of the settings.

        A lost node's place goes to a node of the same kind. Raises Unrecoverable with the layers that no living worker
        holds, and PlanningError where the nodes left cannot hold the model.
        """
        changes = Changes(
            lost=lost,
            joined=joined,
            leaving=leaving,
            resting=resting,
            speeds=_speeds_of(slow),
            held=None if held is None else groups.contract_held(held, self._degree),
            domains=self._domains,
            horizon_s=self.settings.mean_time_to_failure_s if horizon_s is None else horizon_s,
        )
        decision = reconfigure(self._catalog, self._propose, self._as_searched(plan), changes)
        return replace(
            decision,
            plan=self._finished(decision.plan),
            transfers=groups.expand_transfers(decision.transfers, self._degree),
        )

    def rest_s(
        self, plan: ExecutionPlan, rests: Mapping[int, tuple[int, int]], *, slow: Mapping[str, float] | None = None
    ) -> float:
        """Return the seconds in which pipelines of a plan finish the step in flight, reduction included.

        `rests` maps a pipeline's index to how many of its own microbatches are left, and how many of other pipelines it
        takes afterwards, in a separate run. `slow` is as in `reconfigure`. Infinity where these do not fit its memory.
        """
        pipelines = self._as_searched(plan).pipelines
        return self._catalog.rest_s([(pipelines[index], *rest) for index, rest in rests.items()], _speeds_of(slow))

    def has_room(self, plan: ExecutionPlan, *, gradient_copies: int) -> bool:
        """Return whether every device under a plan has memory for `gradient_copies` more copies of its gradients."""
        kinds_of, pipelines = self._catalog.kinds_of, self._as_searched(plan).pipelines
        # Equal templates on equal kinds need equal memory, and thousands of pipelines share a few.
        distinct = {(id(each.template), kinds_of(each.nodes), each.num_microbatches): each for each in pipelines}
        return all(
            self._catalog.costs.fits(self._catalog.form_of(each), each.num_microbatches, more_copies=gradient_copies)
            for each in distinct.values()
        )

    def cheapest_nodes(self, nodes: Sequence[str], prices: Mapping[str, float]) -> tuple[str, ...] | None:
        """Return the nodes that train the most samples for their price; the first ones of each kind.

        `prices` are for one node of each kind for an hour. Returns None where the nodes are too many to try all numbers
        of them. Raises PlanningError for a kind without a price.
        """
        for kind in self.kinds:
            if kind.name not in prices:
                raise PlanningError(f"kind {kind.name} has no price; name one for each kind")
        total = self._catalog.count(nodes)
        fewest, _ = self._catalog.num_pipelines(total)
        chooser = mixed.Chooser(self._catalog.timings(total), self.settings.num_microbatches)
        counts = chooser.cheapest(total, [prices[kind.name] for kind in self.kinds], fewest=fewest)
        if counts is None:
            return None
        by_kind = zip(self._catalog.by_kind(nodes), counts, strict=True)
        chosen = {node for alike, number in by_kind for node in alike[:number]}
        return tuple(node for node in nodes if node in chosen)

    def _finished(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan of the searches with single devices, and with what its stages recompute."""
        return groups.expand_plan(self._catalog.marked(plan), self._degree)

    def _as_searched(self, plan: ExecutionPlan) -> ExecutionPlan:
        return self._catalog.unmarked(groups.contract_plan(plan, self._degree))

    def _check(self, nodes: Sequence[str]) -> None:
        if len(set(nodes)) != len(nodes):
            twice = sorted({node for node in nodes if nodes.count(node) > 1})
            raise PlanningError(f"node {twice[0]} is named twice; every node has one name")
        if not nodes:
            raise PlanningError("no nodes were given; a plan needs at least 1")
        wanted = self.settings.num_pipelines
        if len(self.kinds) == 1 and wanted is not None and wanted > len(nodes):
            raise PlanningError(f"{wanted} pipelines need at least {wanted} nodes; there are {len(nodes)}")

    def _plan(
        self, ordered: Sequence[str], chosen: Sequence[str], speeds: Mapping[str, float]
    ) -> tuple[ExecutionPlan, float]:
        """Return the best plan for the chosen nodes, and the seconds of its step; nodes not used become spares."""
        total = self._catalog.count(chosen)
        forms, num_microbatches = self._catalog.start(total, is_slowed=bool(speeds))
        by_kind = self._catalog.by_kind(chosen)
        if self._domains and not speeds:
            numbers = [sum(form.kinds.count(kind) for form in forms) for kind in range(len(by_kind))]
            by_kind = [self._domains.together(*each) for each in zip(by_kind, numbers, strict=True)]
        waiting = [iter(alike) for alike in by_kind]
        nodes = [tuple(next(waiting[kind]) for kind in form.kinds) for form in forms]
        used = {node for each in nodes for node in each}
        spares = tuple(node for node in ordered if node not in used)
        if num_microbatches is None:
            return self._catalog.build_plan(list(zip(forms, nodes, strict=True)), spares, speeds)
        pipelines = tuple(
            Pipeline(template=form.template, nodes=own, num_microbatches=count)
            for form, own, count in zip(forms, nodes, num_microbatches, strict=True)
        )
        return ExecutionPlan(pipelines=pipelines, spares=spares), self._catalog.best(total)[1]

    def _fit(self, plan: ExecutionPlan, speeds: Mapping[str, float]) -> tuple[ExecutionPlan, float] | None:
        """Return what the plan would become if no layer had to move, and the bound on its step.

        Returns None where no node is slow, and the copies of all layers lie in enough domains.
        """
        nodes = (*plan.nodes, *plan.spares)
        is_spread = not self._domains or not lacking(self._catalog, self._domains, plan)
        if is_spread and all(speeds.get(node, 1.0) == 1.0 for node in nodes):
            return None
        everything, devices = frozenset(range(plan.num_layers)), range(self._catalog.most_devices)
        changes = Changes(
            lost=(),
            joined=(),
            leaving=(),
            resting=(),
            speeds=speeds,
            held={WorkerId(node, device): everything for node in nodes for device in devices},
            domains=self._domains,
            horizon_s=self.settings.mean_time_to_failure_s,
        )
        decision = reconfigure(self._catalog, self._propose, plan, changes)
        return decision.plan, decision.bound_step_s

    def _reason(self, plan: ExecutionPlan, *, redundant: bool) -> str:
        num_nodes = len(plan.nodes)
        reason = f"{counted(num_nodes, 'node')} form{'s' if num_nodes == 1 else ''} "
        reason += f"{counted(len(plan.pipelines), 'pipeline')} ({self._sizes(plan)})"
        if plan.spares:
            reason += f", {counted(len(plan.spares), 'spare')} left"
        threshold = self.settings.fault_threshold
        if len(plan.pipelines) <= threshold:
            reason += f"; f = {threshold} asks for {threshold + 1}"
        elif not redundant:
            reason += f"; {lack_of_domains(threshold)}"
        elif self._domains:
            reason += f"; the copies of each layer lie in {threshold + 1} failure domains or more"
        return reason

    def _sizes(self, plan: ExecutionPlan) -> str:
        if len(self.kinds) == 1:
            sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
            return ", ".join([*map(str, sizes[:-1]), counted(sizes[-1], "node")])
        forms: dict[str, int] = {}
        for pipeline in plan.pipelines:
            counts = self._catalog.count(pipeline.nodes)
            parts = [f"{number} {kind.name}" for number, kind in zip(counts, self.kinds, strict=True) if number]
            forms[" + ".join(parts)] = forms.get(" + ".join(parts), 0) + 1
        return ", ".join(form if times == 1 else f"{times} × ({form})" for form, times in forms.items())


def _seconds_a_node(kind: NodeKind) -> float:
    # Every profile has the times of 1 device; those of more are optional.
    seconds = math.fsum(layer.forward_s[1] + layer.backward_s[1] for layer in kind.profile.layers)
    return seconds / kind.devices_per_node


def _speeds_of(slow: Mapping[str, float] | None) -> dict[str, float]:
    """Return the speeds of nodes: 0.5 for one that takes twice as long."""
    speeds = {}
    for node, factor in (slow or {}).items():
        if not (math.isfinite(factor) and factor > 0):
            raise PlanningError(f"node {node} takes {factor} times as long; that must be finite and above 0")
        speeds[node] = 1 / factor
    return speeds
