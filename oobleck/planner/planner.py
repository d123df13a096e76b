"""The planner as one object: a profile and settings in, decisions out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate, WorkerId

from .catalog import Catalog
from .cutter import Cutter
from .decision import Decision
from .fastest import FastPipelines
from .formatting import counted
from .profiles import Profile
from .reconfiguration import Changes, reconfigure
from .settings import PlannerSettings
from .speeds import speeds_of
from .start import check_nodes, started


class Planner:
    """Plans for one model on one kind of cluster. A function of its arguments; it only remembers templates."""

    def __init__(
        self, profile: Profile, settings: PlannerSettings, *, make_cutter: Callable[[Profile], Cutter] | None = None
    ) -> None:
        """`make_cutter` makes, from the profile that is planned with, what cuts pipelines into chunks."""
        self.profile = profile
        self.settings = settings
        self._catalog = Catalog(profile, settings, make_cutter=make_cutter)

    def templates(self, num_nodes: int) -> dict[int, PipelineTemplate]:
        """Return the templates of all sizes up to `num_nodes` nodes that hold the model."""
        return {size: self._catalog.template(size) for size in self._catalog.options(num_nodes)}

    def template_step_s(self, num_nodes: int, num_microbatches: int) -> float:
        """Return the seconds in which a pipeline of so many nodes takes so many microbatches."""
        return self._catalog.options(num_nodes)[num_nodes].timing.step_s(num_microbatches)

    def profile_of(self, node: str) -> Profile:
        """Return the profile of any node."""
        return self.profile

    def can_hold(self, nodes: Sequence[str]) -> bool:
        """Return whether so many nodes hold the model at least once."""
        return bool(self._catalog.options(len(nodes)))

    def best_first(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes as they are: all are alike."""
        return list(nodes)

    def fewest_nodes(self, nodes: Sequence[str]) -> int:
        """Return how many of the nodes hold the model as often as was asked for.

        Where not even all do, that is all of them. Raises PlanningError where they cannot hold the model once.
        """
        fewest, _ = self._catalog.num_pipelines(len(nodes))
        return min(len(nodes), fewest * min(self._catalog.options(len(nodes))))

    def step_s(self, nodes: Sequence[str]) -> float:
        """Return the seconds of a step under the best plan for so many nodes, none of them slow.

        Remembered once found. Raises PlanningError where they cannot hold the model.
        """
        fewest, most = self._catalog.num_pipelines(len(nodes))
        return self._catalog.choose(len(nodes), self.settings.num_microbatches, fewest, most).step_s

    def initial_plan(self, nodes: Sequence[str], *, slow: Mapping[str, float] | None = None) -> Decision:
        """Plan the start of a job on named nodes.

        `slow` says how many times as long as in the profile a node takes to compute (2.0: twice as long); nodes not
        named take 1.0. Nodes of like speed come together; the slowest become the spares, if there are any. Raises
        PlanningError.
        """
        speeds = speeds_of(slow)
        check_nodes(nodes)
        wanted = self.settings.num_pipelines
        if wanted is not None and wanted > len(nodes):
            raise PlanningError(f"{wanted} pipelines need at least {wanted} nodes; there are {len(nodes)}")
        ordered = sorted(nodes, key=lambda node: -speeds.get(node, 1.0))
        best: tuple[ExecutionPlan, float] | None = None
        for num_nodes in self._counts_to_try(ordered, speeds):
            fewest, most = self._catalog.num_pipelines(num_nodes)
            sizing = self._catalog.choose(num_nodes, self.settings.num_microbatches, fewest, most)
            if not speeds and (faster := self._catalog.faster(sizing, num_nodes, fewest, most)) is not None:
                best = _instantiate(faster, ordered), sizing.step_s  # a bound, as all predictions are
                continue
            pipelines, start = [], 0
            for size in sizing.sizes:
                pipelines.append((self._catalog.template(size), ordered[start : start + size]))
                start += size
            plan, step_s = self._catalog.build_plan(pipelines, ordered[start:], speeds)
            if best is None or (len(plan.pipelines) >= len(best[0].pipelines) and step_s < best[1]):
                best = plan, step_s
        assert best is not None, "all nodes were tried"
        plan, step_s = self._catalog.cut_plan(best[0]), best[1]
        step_s = self._catalog.predicted_step_s(plan, step_s, speeds)
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
        """Decide what follows a plan once nodes were lost, have joined, or have changed their speeds.

        `slow` says how many times as long as in the profile a node takes to compute (2.0: twice as long); nodes not
        named take 1.0, whatever they took before, so all that are still slow have to be named each time. A pipeline
        with a slow node gets fewer microbatches, which moves no state; slow nodes are left out as spares, or gathered
        in few pipelines, where the faster step repays what has to move.
        `held` says which layers each living worker holds whole; by default, what the plan gives it. A node both
        lost and joined holds nothing; one that is `leaving` gets no place, and is read from; so is one that is
        `resting`, and it becomes a spare. Raises Unrecoverable
        with the layers that no living worker holds, and PlanningError where the nodes left cannot hold the model.
        """
        return reconfigure(
            self._catalog,
            plan,
            Changes(lost=lost, joined=joined, leaving=leaving, resting=resting, speeds=speeds_of(slow), held=held),
        )

    def rest_s(
        self, plan: ExecutionPlan, rests: Mapping[int, tuple[int, int]], *, slow: Mapping[str, float] | None = None
    ) -> float:
        """Return the seconds in which pipelines of a plan finish the step that they are in, reduction included.

        `rests` says for each pipeline that does, by its index, how many of its own microbatches it has left, and how
        many of others it takes after them, in a run of their own. `slow` is as in `reconfigure`.
        """
        return self._catalog.rest_s([(plan.pipelines[index], *rest) for index, rest in rests.items()], speeds_of(slow))

    def has_room(self, plan: ExecutionPlan, *, gradient_copies: int) -> bool:
        """Return whether every device under a plan holds so many copies of its gradients beside all else."""
        templates = {id(pipeline.template): pipeline.template for pipeline in plan.pipelines}
        return all(self._catalog.costs.fits(each, more_copies=gradient_copies) for each in templates.values())

    def _counts_to_try(self, ordered: Sequence[str], speeds: Mapping[str, float]) -> list[int]:
        """Return numbers of nodes to plan for: all, and all without those at or below each low speed."""
        factors = [speeds.get(node, 1.0) for node in ordered]
        counts = [len(ordered)]
        for speed in sorted({factor for factor in factors if factor < 1.0}):
            count = sum(factor > speed for factor in factors)
            if count and self._catalog.options(count):
                counts.append(count)
        return counts

    def _sizes(self, plan: ExecutionPlan) -> str:
        sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
        return ", ".join(map(str, sizes[:-1])) + (", " if len(sizes) > 1 else "") + counted(sizes[-1], "node")


def _instantiate(pipelines: FastPipelines, nodes: Sequence[str]) -> ExecutionPlan:
    """Give each pipeline the next of the nodes; those left over are spares."""
    instantiated, start = [], 0
    for template, count in zip(pipelines.templates, pipelines.num_microbatches, strict=True):
        stop = start + template.num_nodes
        instantiated.append(Pipeline(template=template, nodes=tuple(nodes[start:stop]), num_microbatches=count))
        start = stop
    return ExecutionPlan(pipelines=tuple(instantiated), spares=tuple(nodes[start:]))
