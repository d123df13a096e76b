"""The templates of one profile under one set of settings, found when asked for and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline, PipelineTemplate

from .costs import StageCosts, Timing
from .cutter import Cutter
from .fastest import ExactTimes, FastPipelines
from .instantiation import SizeOption, Sizing, choose_sizes, distribute_microbatches, reduction_s
from .inventory import Holding, needed_holdings
from .profiles import Profile
from .settings import PlannerSettings
from .templates import MOST_STAGES, cut_for_speeds, find_templates

STILL_FAST = 1.05
"""A pipeline's own template may take this many times as long as the present one: to cut it again moves its layers."""


class Catalog:
    """All templates up to the most nodes asked for so far. The same answers in whatever order they are asked."""

    def __init__(
        self, profile: Profile, settings: PlannerSettings, *, make_cutter: Callable[[Profile], Cutter] | None = None
    ) -> None:
        """Templates are those of `find_templates`; `make_cutter` makes what cuts those of plans again, where wanted."""
        self.profile = profile
        self.settings = settings
        self.costs = StageCosts(
            profile,
            devices_per_node=settings.devices_per_node,
            max_devices_per_stage=settings.max_devices_per_stage,
            max_in_flight=settings.num_microbatches,
            reserved_bytes=settings.reserved_memory_bytes,
        )
        self.layer_bytes = tuple(layer.state_bytes for layer in profile.layers)
        self._searched = 0
        self._templates: dict[int, PipelineTemplate] = {}
        self._options: dict[int, SizeOption] = {}
        self._sizings: dict[tuple[int, int, int, int], Sizing] = {}
        self._needed: dict[int, tuple[PipelineTemplate, tuple[Holding, ...]]] = {}
        """By the identity of the template, which is kept with it: comparing templates takes long."""
        self._for_speeds: dict[tuple[object, ...], PipelineTemplate] = {}
        self._exact = ExactTimes(self.costs)
        self._cutter = None if make_cutter is None else make_cutter(profile)

    @property
    def most_nodes(self) -> int:
        """The most nodes that a pipeline can have: every stage needs a layer."""
        return self.costs.num_layers * self.costs.device_counts[-1] // self.settings.devices_per_node

    def options(self, num_nodes: int) -> Mapping[int, SizeOption]:
        """Return the sizes of pipelines up to `num_nodes` nodes that hold the model, smallest first."""
        limit = min(num_nodes, self.most_nodes)
        if limit > self._searched:
            found = find_templates(
                self.costs,
                range(self._searched + 1, limit + 1),
                microbatches_per_device=self.settings.microbatches_per_device,
            )
            for size, template in found.items():
                self._templates[size] = template
                self._options[size] = SizeOption(
                    timing=self.costs.timing(template), reduced_bytes=self.costs.reduced_bytes(template)
                )
            self._searched = limit
        if limit == self._searched:
            return self._options
        return {size: option for size, option in self._options.items() if size <= limit}

    def template(self, num_nodes: int) -> PipelineTemplate:
        """Return the template of a size that `options` named."""
        return self._templates[num_nodes]

    def template_in(self, num_nodes: int, size: int) -> PipelineTemplate:
        """Return the template of a size, cut for its share of the batch in a plan of so many nodes."""
        return self.cut(self._templates[size], self._share(size, num_nodes))

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template for a pipeline that takes so many microbatches."""
        return template if self._cutter is None else self._cutter.cut(template, num_microbatches)

    def cut_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return a plan whose pipelines are cut for their microbatches."""
        if self._cutter is None:
            return plan
        pipelines = (replace(each, template=self.cut(each.template, each.num_microbatches)) for each in plan.pipelines)
        return replace(plan, pipelines=tuple(pipelines))

    def needed(self, template: PipelineTemplate) -> tuple[Holding, ...]:
        """Return what each node of a pipeline of that template has to hold."""
        if id(template) not in self._needed:
            self._needed[id(template)] = template, needed_holdings(template, self.settings.devices_per_node)
        return self._needed[id(template)][1]

    def cut_for(
        self, template: PipelineTemplate, speeds: Sequence[float], holdings: Sequence[Holding], num_microbatches: int
    ) -> PipelineTemplate:
        """Return the template with the best stages for nodes of these speeds, which hold these layers.

        Pipelines with several chunks a stage stay as they are. Remembered once found.
        """
        if template.num_chunks > 1 or template.num_stages == 1:
            return template
        key = template.stages, tuple(speeds), tuple(holdings), num_microbatches
        if key not in self._for_speeds:
            self._for_speeds[key] = cut_for_speeds(
                [self.costs] * template.num_nodes, template, speeds, holdings, num_microbatches
            )
        return self._for_speeds[key]

    def usual_if_faster(self, template: PipelineTemplate, num_nodes: int, num_microbatches: int) -> PipelineTemplate:
        """Return the template that a new pipeline without slow nodes would have, if its own is slower than usual."""
        is_usual = template is self._templates[template.num_nodes]
        if is_usual or self._excess(template, num_microbatches) == 1.0:
            return template
        return self.template_in(num_nodes, template.num_nodes)

    def continued(
        self, template: PipelineTemplate, num_nodes: int, speeds: Sequence[float] | None = None
    ) -> PipelineTemplate:
        """Return the template with which a pipeline of a plan goes on, in a plan of so many nodes: mostly its own.

        A pipeline that was cut for its microbatches, or for slow nodes, stays as it is while that is about as fast as a
        template is now. `speeds` are those of its nodes, if any of them is slow.
        """
        size = template.num_nodes
        present, share = self.template_in(num_nodes, size), self._share(size, num_nodes)
        if template is present or template.stages == present.stages:
            return present
        is_possible = (
            template.num_layers == self.costs.num_layers
            and all(stage.num_devices in self.costs.device_counts for stage in template.stages)
            and self.costs.fits(template)
        )
        if not is_possible:
            return present
        if speeds is None:
            own_s, present_s = self._step_s(template, share), self._step_s(present, share)
        else:
            own_s, present_s = (self._timing(each, speeds, share).step_s(share) for each in (template, present))
        return template if own_s <= STILL_FAST * present_s else present

    def _share(self, size: int, num_nodes: int) -> int:
        """The microbatches of a pipeline of a size, in a plan of so many nodes."""
        return max(1, round(self.settings.num_microbatches * size / num_nodes))

    def _step_s(self, template: PipelineTemplate, num_microbatches: int) -> float:
        times = self._exact if self._cutter is None else self._cutter
        return times.step_s(template, num_microbatches)

    def faster(self, chosen: Sizing, num_nodes: int, fewest: int, most: int) -> FastPipelines | None:
        """Return pipelines that the event-exact time shows to be faster than the chosen ones, if it does."""
        options = self.options(num_nodes)
        return self._exact.faster(
            {size: self._templates[size] for size in options},
            options,
            chosen,
            num_nodes=num_nodes,
            fewest=fewest,
            most=most,
        )

    def num_pipelines(self, num_nodes: int) -> tuple[int, int]:
        """Return the fewest and the most pipelines that `num_nodes` nodes should have.

        Raises PlanningError where they cannot hold the model.
        """
        options = self.options(num_nodes)
        if not options:
            raise PlanningError(self._explain(num_nodes))
        most = min(num_nodes // min(options), self.settings.num_microbatches)
        if self.settings.num_pipelines is not None:
            wanted = min(self.settings.num_pipelines, most)
            return wanted, wanted
        return min(self.settings.fault_threshold + 1, most), most

    def choose(self, num_nodes: int, num_microbatches: int, fewest: int, most: int) -> Sizing:
        """Return the best pipelines of `num_nodes` nodes for so many microbatches; remembered once found."""
        key = num_nodes, num_microbatches, fewest, most
        if key not in self._sizings:
            self._sizings[key] = choose_sizes(
                self.options(num_nodes),
                num_nodes=num_nodes,
                num_microbatches=num_microbatches,
                network=self.profile.network,
                fewest=fewest,
                most=most,
            )
        return self._sizings[key]

    def build_plan(
        self,
        pipelines: Sequence[tuple[PipelineTemplate, Sequence[str]]],
        spares: Sequence[str],
        speeds: Mapping[str, float],
        *,
        before: ExecutionPlan | None = None,
        still_fast: float = STILL_FAST,
    ) -> tuple[ExecutionPlan, float]:
        """Return the plan of pipelines given as (template, nodes), and the seconds of its step at the given speeds.

        Pipelines that are as in the plan `before` are the same objects: they know their workers already. Those without
        slow nodes that take up to `still_fast` times as long as those of their size count as fast as these.
        """
        known = {each.nodes: each for each in before.pipelines} if before is not None else {}
        num_nodes = sum(len(nodes) for _, nodes in pipelines)
        # Thousands of pipelines share a few templates, which take long to compare.
        alike: dict[int, tuple[Timing, int]] = {}
        timings, reduced_bytes = [], 0
        for template, nodes in pipelines:
            share = self._share(len(nodes), num_nodes)
            if id(template) not in alike:
                usual = self._timing(template, None, share, still_fast)
                alike[id(template)] = usual, self._reduced_bytes(template, share)
            timing, own_bytes = alike[id(template)]
            if (slowed := _speeds_of(nodes, speeds)) is not None:
                timing = self._timing(template, slowed, share, still_fast)
            timings.append(timing)
            reduced_bytes = max(reduced_bytes, own_bytes)
        counts = distribute_microbatches(timings, self.settings.num_microbatches)
        slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
        plan = ExecutionPlan(
            pipelines=tuple(
                _pipeline(template, tuple(nodes), count, known)
                for (template, nodes), count in zip(pipelines, counts, strict=True)
            ),
            spares=tuple(spares),
        )
        return plan, slowest_s + reduction_s(self.profile.network, reduced_bytes, len(pipelines))

    def predicted_step_s(self, plan: ExecutionPlan, bound_s: float, speeds: Mapping[str, float]) -> float:
        """Return the seconds of a plan's step: the bound on it, or the event-exact ones of interleaved pipelines."""
        if self._cutter is None or all(pipeline.template.num_chunks == 1 for pipeline in plan.pipelines):
            return bound_s
        exact_s: dict[tuple[int, int], float] = {}
        slowest_s = 0.0
        for pipeline in plan.pipelines:
            template, count = pipeline.template, pipeline.num_microbatches
            if (slowed := _speeds_of(pipeline.nodes, speeds)) is not None:
                slowest_s = max(slowest_s, self._cutter.step_s(template, count, slowed))
                continue
            if (id(template), count) not in exact_s:
                exact_s[id(template), count] = self._cutter.step_s(template, count)
            slowest_s = max(slowest_s, exact_s[id(template), count])
        reduced_bytes = max(self.costs.reduced_bytes(pipeline.template) for pipeline in plan.pipelines)
        return slowest_s + reduction_s(self.profile.network, reduced_bytes, len(plan.pipelines))

    def rest_s(self, rests: Sequence[tuple[Pipeline, int, int]], speeds: Mapping[str, float]) -> float:
        """Return the seconds in which pipelines finish a step; see `Planner.rest_s`."""
        self.options(max(len(pipeline.nodes) for pipeline, _, _ in rests))
        slowest_s, most_bytes = 0.0, 0
        for each, own, others in rests:
            timing = self._timing(each.template, _speeds_of(each.nodes, speeds), each.num_microbatches)
            slowest_s = max(slowest_s, rest_of_step_s(timing, each.num_microbatches, own, others))
            most_bytes = max(most_bytes, self._reduced_bytes(each.template, each.num_microbatches))
        return slowest_s + reduction_s(self.profile.network, most_bytes, len(rests))

    def _timing(
        self, template: PipelineTemplate, speeds: Sequence[float] | None, share: int, still_fast: float = STILL_FAST
    ) -> Timing:
        """Return the bound on a pipeline's step of about `share` microbatches; `speeds` where nodes are slow.

        One that was cut by its event-exact time has that of its size, and one that was cut for slow nodes its own. One
        with several chunks a stage takes what the event-exact time says for `share` microbatches.
        """
        bound = self._options[template.num_nodes].timing
        if template is self._templates[template.num_nodes]:
            return bound if speeds is None else self.costs.timing(template, speeds)
        if template.num_chunks > 1 and self._cutter is not None:
            slowed = self.costs.timing(template, speeds or ())
            scale = self._cutter.step_s(template, share, speeds) / slowed.step_s(share)
            return Timing(first_s=scale * slowed.first_s, next_s=scale * slowed.next_s)
        excess = self._excess(template, share)
        if speeds is None and excess <= still_fast:
            return bound
        own = self.costs.timing(template)
        slowed = own if speeds is None else self.costs.timing(template, speeds)
        if excess == 1.0:
            return Timing(
                first_s=bound.first_s * slowed.first_s / own.first_s, next_s=bound.next_s * slowed.next_s / own.next_s
            )
        scale = min(1.0, excess * bound.step_s(share) / own.step_s(share))
        return Timing(first_s=scale * slowed.first_s, next_s=scale * slowed.next_s)

    def _excess(self, template: PipelineTemplate, share: int) -> float:
        """Return how many times as long a pipeline takes as that of its size, without slow nodes: 1 for about as long.

        More is the price of a cut for slow nodes, or for another share of the batch.
        """
        usual = self._templates[template.num_nodes]
        if template.num_chunks > 1:
            return 1.0
        if template.num_stages > MOST_STAGES:  # the event-exact time has cut none of these
            return self.costs.timing(template).step_s(share) / self.costs.timing(usual).step_s(share)
        return max(1.0, self._exact.step_s(template, share) / self._exact.step_s(usual, share))

    def _reduced_bytes(self, template: PipelineTemplate, share: int) -> int:
        """Return the most gradient bytes that a node reduces; those of its size, but after a cut for slow nodes."""
        usual = self._templates[template.num_nodes]
        if template is usual or self._excess(template, share) <= STILL_FAST:
            return self._options[template.num_nodes].reduced_bytes
        return self.costs.reduced_bytes(template)

    def _explain(self, num_nodes: int) -> str:
        """Say why no template exists for up to `num_nodes` nodes."""
        largest = self.costs.device_counts[-1]
        usable = largest * self.costs.usable_bytes
        each = f"a stage has {usable} bytes ({largest} × {self.profile.device.name})"
        for index, layer in enumerate(self.profile.layers):
            held = self.costs.footprint(index, index + 1, num_devices=largest)
            missing = held.static_bytes + held.activation_bytes - usable
            if missing > 0:
                return f"layer {index} ({layer.name}) fits on no number of nodes: {each}, {missing} bytes too few"
        if self.most_nodes < 1:
            return (
                f"{self.costs.num_layers} layers cannot be spread over the {self.settings.devices_per_node} devices "
                f"of a node with at most {largest} a stage"
            )
        if larger := self.options(self.most_nodes):
            return (
                f"the model needs at least {min(larger)} nodes of {self.settings.devices_per_node} × "
                f"{self.profile.device.name}; there {'is' if num_nodes == 1 else 'are'} {num_nodes}"
            )
        whole = self.costs.footprint(0, self.costs.num_layers, num_devices=largest)
        return (
            f"the model fits on no number of nodes: {each}, the model takes {whole.static_bytes} bytes and "
            f"{whole.activation_bytes} for each microbatch in flight"
        )


def _speeds_of(nodes: Sequence[str], speeds: Mapping[str, float]) -> list[float] | None:
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


def rest_of_step_s(timing: Timing, num_microbatches: int, own: int, others: int) -> float:
    """Return the seconds of what a pipeline has left: a pipeline that is filled takes one after the other."""
    own_s = timing.step_s(own) if own == num_microbatches else own * timing.next_s
    return own_s + (timing.step_s(others) if others else 0.0)
