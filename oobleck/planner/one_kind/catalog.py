"""The templates of one profile, by size: the pipelines of nodes that are all alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from oobleck.plan import ExecutionPlan, PipelineTemplate, StageTemplate
from oobleck.planner import instantiation
from oobleck.planner.catalog import STILL_FAST, Catalog, speeds_among
from oobleck.planner.costs import StageCosts, Timing, footprint, stage_footprint
from oobleck.planner.formatting import counted, size_text
from oobleck.planner.kinds import Counts, Form, KindCosts
from oobleck.planner.profiles import Profile
from oobleck.planner.templates import MOST_STAGES, find_templates, lighter_templates
from oobleck.planner.values import Cutter, NodeKind, PlannerSettings

from .fastest import ExactTimes, FastPipelines

# A bound on fresh plans is that of up to a 256th more nodes.
_FINENESS = 256
_LESS_MEMORY = (
    "give each node more memory, or let more devices share a stage, make microbatch_size or the model smaller, or set "
    "recompute"
)


class OneKindCatalog(Catalog):
    """The templates up to the most nodes of any call so far; `make_cutter` makes the cutter of a plan's templates."""

    def __init__(
        self, profile: Profile, settings: PlannerSettings, *, make_cutter: Callable[[Profile], Cutter] | None = None
    ) -> None:
        kind = NodeKind(name=profile.device.name, profile=profile, devices_per_node=settings.devices_per_node)
        super().__init__(KindCosts([kind], settings))
        self.profile = profile
        self._costs = self.costs.of[0]
        self._searched = self._searched_short = 0
        self._templates: dict[int, PipelineTemplate] = {}
        self._options: dict[int, instantiation.SizeOption] = {}
        # The sizes that have no memory for as many microbatches as stages.
        self._short: dict[int, instantiation.SizeOption] = {}
        self._possible: dict[Counts, Sequence[int]] = {}
        self._sizings: dict[tuple[int, int, int, int], instantiation.Sizing] = {}
        # Keyed by the identity of the template, which the value keeps alive.
        self._forms: dict[int, Form] = {}
        self._excesses: dict[tuple[int, int], tuple[PipelineTemplate, float]] = {}
        self._cutter = None if make_cutter is None else make_cutter(_without_reserve(profile, settings))
        self._exact = ExactTimes(self._costs, self._lighter_than, self._cutter)
        self._lighter: dict[int, Sequence[PipelineTemplate]] = {}
        self._fast: dict[Counts, FastPipelines] = {}

    def kind(self, node: str) -> int:
        return 0

    def count(self, nodes: Collection[str]) -> Counts:
        return (len(nodes),)

    def by_kind(self, nodes: Collection[str]) -> Sequence[Sequence[str]]:
        return [list(nodes)]

    def timings(self, nodes: Counts) -> Mapping[Counts, Timing]:
        return {(size,): option.timing for size, option in self.options(*nodes).items()}

    def template_timing(self, num_nodes: int) -> Timing:
        self.options(num_nodes)
        if num_nodes not in self._options:
            self._find_short(min(num_nodes, self.most_nodes))
        return (self._options | self._short)[num_nodes].timing

    def form(self, counts: Counts, total: Counts) -> Form:
        (size,) = counts
        if size not in self._templates:
            self.options(*total)
        template = self._templates[size]
        cut = self._cut(template, self.share(size, *total))
        # Shares in whole numbers differ, and each pipeline of this size gets these chunks.
        if cut is not template and self._exact.most_microbatches(cut) < (most := self._most_of_share(size, *total)):
            cut = self._cut(template, most)
        return self._form(cut)

    def kinds_of(self, nodes: Sequence[str]) -> tuple[int, ...]:
        return (0,) * len(nodes)

    def counts_of(self, form: Form) -> Counts:
        return (len(form.kinds),)

    def best(self, total: Counts) -> tuple[tuple[Counts, ...], float]:
        sizing = self._best(*total)
        return tuple((size,) for size in sizing.sizes), sizing.step_s

    def start(self, total: Counts, *, is_slowed: bool) -> tuple[list[Form], Sequence[int] | None]:
        sizing = self._best(*total)
        if not is_slowed and not (fastest := self._fastest(total)).are_chosen:
            pairs = zip(fastest.templates, fastest.num_microbatches, strict=True)
            return [self._form(self._cut(*pair)) for pair in pairs], fastest.num_microbatches
        # Not cut into chunks yet: `cut_plan` does that once their microbatches are known.
        return [self._form(self._templates[size]) for size in sizing.sizes], None

    def least_start_s(self, total: Counts) -> float:
        # More nodes form no slower pipelines, unless they have to form more of them. One search serves several totals,
        # and which one does not depend on what was planned before.
        (num_nodes,) = total
        unit = max(1, num_nodes // _FINENESS)
        more = (-(-num_nodes // unit) * unit,)
        return self._fastest(more).step_s if self.num_pipelines(more)[0] <= self.num_pipelines(total)[0] else 0.0

    def _fastest(self, total: Counts) -> FastPipelines:
        if total not in self._fast:
            fewest, most = self.num_pipelines(total)
            self._fast[total] = self._exact.fastest(
                self.templates(*total),
                self.options(*total),
                self._best(*total),
                num_nodes=total[0],
                fewest=fewest,
                most=most,
            )
        return self._fast[total]

    def _lighter_than(self, template: PipelineTemplate) -> Sequence[PipelineTemplate]:
        if template.num_nodes not in self._lighter:
            new = {size: each for size, each in self._templates.items() if size not in self._lighter}
            found = lighter_templates(self._costs, new, microbatches_per_device=self.settings.microbatches_per_device)
            self._lighter |= {size: found.get(size, ()) for size in (*new, template.num_nodes)}
        return self._lighter[template.num_nodes]

    def exact_step_s(self, plan: ExecutionPlan, speeds: Mapping[str, float]) -> float | None:
        alike = {
            (id(each.template), each.num_microbatches, tuple(speeds_among(each.nodes, speeds) or ())): each.template
            for each in plan.pipelines
        }
        reduce_s = self._reduce_s(plan)
        slowest_s = max(self._exact.step_s(each, *key[1:], reduce_s=reduce_s) for key, each in alike.items())
        return slowest_s + reduce_s

    def least_exact_s(self, forms: Sequence[Form], num_microbatches: Sequence[int]) -> float:
        templates = [form.template for form in forms]
        reduce_s = self._reduction_of(templates)
        alike = dict.fromkeys(zip(templates, num_microbatches, strict=True))
        return max(self._exact.step_s(each, count, reduce_s=reduce_s) for each, count in alike) + reduce_s

    def _reduce_s(self, plan: ExecutionPlan) -> float:
        return self._reduction_of([each.template for each in plan.pipelines])

    def _reduction_of(self, templates: Sequence[PipelineTemplate]) -> float:
        distinct = {id(each): each for each in templates}
        reduced_bytes = max(map(self._costs.reduced_bytes, distinct.values()))
        return instantiation.reduction_s(self.profile.network, reduced_bytes, len(templates))

    def exact_shares(self, plan: ExecutionPlan, speeds: Mapping[str, float]) -> tuple[int, ...]:
        reduce_s = self._reduce_s(plan)
        timings = [
            self._exact.timing(
                each.template, each.num_microbatches, tuple(speeds_among(each.nodes, speeds) or ()), reduce_s=reduce_s
            )
            for each in plan.pipelines
        ]
        return instantiation.distribute_microbatches(timings, self.settings.num_microbatches)

    def cut_again(self, form: Form, num_microbatches: int, num_pipelines: int, speeds: tuple[float, ...] = ()) -> Form:
        template = form.template
        if template.num_chunks > 1:
            if speeds:  # pipelines with several chunks a stage stay as they are
                return form
            template = self._templates[template.num_nodes]  # begin with whole stages again
        cut = self._exact.cut_again(template, num_microbatches, num_pipelines, speeds)
        cut = cut if speeds else self._cut(cut, num_microbatches)
        return form if cut.stages == form.template.stages else self._form(cut)

    def least_s(self, pipelines: Sequence[Counts], total: Counts) -> float:
        sizes = [size for (size,) in pipelines]
        # Some of the nodes may have so small a share that their pipelines are short, where those of all need not be.
        options = {**self._short, **self.options(*total)}
        return instantiation.sizing_of(options, sizes, self.settings.num_microbatches, self.profile.network).step_s

    def most_pipelines(self, total: Counts) -> int:
        numbers = self._numbers(total)
        return numbers[-1] if numbers else 0

    def possible_number(self, total: Counts, wanted: int) -> int:
        numbers = self._numbers(total)
        return max((number for number in numbers if number <= wanted), default=numbers[0])

    def _numbers(self, total: Counts) -> Sequence[int]:
        if total not in self._possible:
            self._possible[total] = instantiation.possible_numbers(
                self.options(*total), num_nodes=total[0], num_microbatches=self.settings.num_microbatches
            )
        return self._possible[total]

    def can_hold(self, total: Counts) -> bool:
        return bool(self._numbers(total))

    @property
    def most_nodes(self) -> int:
        """The most nodes that a pipeline can have, since every stage needs a layer."""
        return self.most_stages * self._costs.device_counts[-1] // self.settings.devices_per_node

    def options(self, num_nodes: int, num_microbatches: int | None = None) -> Mapping[int, instantiation.SizeOption]:
        """Return the sizes of pipelines that hold the model, up to `num_nodes` nodes, smallest first.

        `num_microbatches` are those of all these nodes, by default a whole step's.
        """
        limit = min(num_nodes, self.most_nodes)
        if limit > self._searched:
            # Known sizes keep their templates, which other tables recognise by identity.
            self._options |= self._found(self._costs, range(self._searched + 1, limit + 1))
            self._searched = limit
        options = self._options
        # With a microbatch for each device, some pipeline takes as many as it has stages, so none need be short.
        if (num_microbatches or self.settings.num_microbatches) < num_nodes * self.settings.devices_per_node:
            self._find_short(limit)
            options = dict(sorted((options | self._short).items()))
        elif limit == self._searched:
            return options
        return {size: option for size, option in options.items() if size <= limit}

    def _found(self, costs: StageCosts, sizes: Iterable[int]) -> dict[int, instantiation.SizeOption]:
        """Find the templates of these sizes, and return them as options."""
        found = find_templates(costs, sizes, microbatches_per_device=self.settings.microbatches_per_device)
        self._templates |= found
        return {
            size: instantiation.SizeOption(
                timing=self._costs.timing(template), reduced_bytes=self._costs.reduced_bytes(template)
            )
            for size, template in found.items()
        }

    def _find_short(self, limit: int) -> None:
        """Find pipelines of the other sizes, each for the most microbatches in flight that fit its memory."""
        per_node, new = self.settings.devices_per_node, range(self._searched_short + 1, limit + 1)
        missing = {size for size in new if size not in self._options}
        self._searched_short = max(self._searched_short, limit)
        if not missing:
            return
        alone = self._found(self._costs.with_most_in_flight(1), missing)
        for most in range(min(self.settings.num_microbatches, max(missing) * per_node) - 1, 1, -1):
            costs = self._costs.with_most_in_flight(most)
            found = self._found(costs, [size for size in alone if size * per_node > most])
            self._short |= found
            alone = {size: option for size, option in alone.items() if size not in found}
        self._short |= alone

    def templates(self, num_nodes: int) -> dict[int, PipelineTemplate]:
        return {size: self._templates[size] for size in self.options(num_nodes)}

    def _form(self, template: PipelineTemplate) -> Form:
        if id(template) not in self._forms:
            self._forms[id(template)] = Form(template=template, kinds=(0,) * template.num_nodes)
        return self._forms[id(template)]

    def _cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        return self._exact.in_chunks(template, num_microbatches, self._reduction_s(template, num_microbatches))

    def cut_plan(self, plan: ExecutionPlan) -> ExecutionPlan:
        if self._cutter is None:
            return plan
        pipelines = (replace(each, template=self._cut(each.template, each.num_microbatches)) for each in plan.pipelines)
        return replace(plan, pipelines=tuple(pipelines))

    def marked(self, plan: ExecutionPlan) -> ExecutionPlan:
        return plan.with_templates(self._costs.marked) if self._costs.recomputes else plan

    def unmarked(self, plan: ExecutionPlan) -> ExecutionPlan:
        return plan.with_templates(_unmarked) if self._costs.recomputes else plan

    def usual_if_faster(self, form: Form, total: Counts, num_microbatches: int) -> Form:
        template = form.template
        is_usual = template is self._templates[template.num_nodes]
        if is_usual or self._excess(template, num_microbatches) == 1.0:
            return form
        return self.form((template.num_nodes,), total)

    def continued(self, own: Form, total: Counts, num_microbatches: int, speeds: Sequence[float] | None) -> Form | None:
        template, size = own.template, own.template.num_nodes
        if size not in self.options(*total):
            return None
        present, share = self.form((size,), total), self.share(size, *total)
        if template is present.template or template.stages == present.template.stages:
            return present
        is_possible = template.num_layers == self._costs.num_layers and all(
            stage.num_devices in self._costs.device_counts for stage in template.stages
        )
        if not is_possible:
            return present
        own_most, present_most = map(self._exact.most_microbatches, (template, present.template))
        needed = max(num_microbatches, self._most_of_share(size, *total))
        if not own_most or own_most < min(present_most, needed):
            return present
        if speeds is None:
            own_s, present_s = (self._whole_s(each, share) for each in (template, present.template))
        else:
            own_s, present_s = (self.timing(each, speeds, share).step_s(share) for each in (own, present))
        # A pipeline that was cut for its microbatches, or for slow nodes, stays as it is while it is fast enough.
        return own if own_s <= STILL_FAST * present_s else present

    def _most_of_share(self, size: int, num_nodes: int) -> int:
        """Return the microbatches of a pipeline's nodes, rounded up."""
        return -(-self.settings.num_microbatches * size // num_nodes)

    def _best(self, num_nodes: int) -> instantiation.Sizing:
        return self.choose(num_nodes, self.settings.num_microbatches, *self.num_pipelines((num_nodes,)))

    def best_step_s(self, total: Counts, fewest: int, most: int) -> float:
        return self.choose(total[0], self.settings.num_microbatches, fewest, most).step_s

    def best_for(self, nodes: Counts, total: Counts, number: int | None = None) -> tuple[Counts, ...] | None:
        share = self.share(*nodes, *total)
        most = min(self.most_pipelines(nodes), share)
        if most < (number or 1):
            return None
        return tuple((each,) for each in self.choose(nodes[0], share, number or 1, number or most).sizes) or None

    def choose(self, num_nodes: int, num_microbatches: int, fewest: int, most: int) -> instantiation.Sizing:
        """Return the best `fewest` to `most` pipelines of `num_nodes` nodes."""
        key = num_nodes, num_microbatches, fewest, most
        if key not in self._sizings:
            self._sizings[key] = instantiation.choose_sizes(
                self.options(num_nodes, num_microbatches),
                num_nodes=num_nodes,
                num_microbatches=num_microbatches,
                network=self.profile.network,
                fewest=fewest,
                most=most,
            )
        return self._sizings[key]

    def predicted_step_s(self, plan: ExecutionPlan, bound_s: float, speeds: Mapping[str, float]) -> float:
        own_s = self.exact_step_s(plan, speeds)
        assert own_s is not None, "nodes of one kind have a timeline"
        return own_s

    def timing(self, form: Form, speeds: Sequence[float] | None, share: int, still_fast: float = STILL_FAST) -> Timing:
        template = form.template
        if template.num_chunks > 1 and self._cutter is not None:
            slowed = self._costs.timing(template, speeds or ())
            # The bound knows nothing of interleaving, so it is scaled to the event-exact time.
            scale = self._cutter.step_s(template, share, speeds) / slowed.step_s(share)
            return Timing(
                first_s=scale * slowed.first_s,
                next_s=scale * slowed.next_s,
                most_microbatches=self._cutter.most_microbatches(template),
            )
        if self._searched < template.num_nodes:
            self.options(template.num_nodes)
        if template.num_nodes not in self._options:
            # A pipeline of an earlier plan, from when so few nodes were taken to have enough memory.
            return self._costs.timing(template, speeds or ())
        bound = self._options[template.num_nodes].timing
        if template is self._templates[template.num_nodes]:
            return bound if speeds is None else self._costs.timing(template, speeds)
        excess = self._excess(template, share)
        own = self._costs.timing(template)
        # A pipeline that was cut by its event-exact time counts with the bound of its size, but for its memory.
        if speeds is None and excess <= still_fast:
            return replace(own, first_s=bound.first_s, next_s=bound.next_s)
        slowed = own if speeds is None else self._costs.timing(template, speeds)
        if excess == 1.0:
            # What slow nodes do to the pipeline's own bound, they do to that of its size.
            first_s, next_s = bound.first_s * slowed.first_s / own.first_s, bound.next_s * slowed.next_s / own.next_s
            return replace(own, first_s=first_s, next_s=next_s)
        scale = min(1.0, excess * bound.bound_s(share) / own.bound_s(share))
        return replace(own, first_s=scale * slowed.first_s, next_s=scale * slowed.next_s)

    def _excess(self, template: PipelineTemplate, share: int) -> float:
        """Return the step time, reduction included, relative to the usual template, without slow nodes; at least 1.

        The excess is the price of a cut for slow nodes, or for another share of the batch.
        """
        usual = self._templates[template.num_nodes]
        if template is usual or template.num_chunks > 1:
            return 1.0
        known, excess = self._excesses.get((id(template), share), (None, 1.0))
        if known is not template:

            def step_s(each: PipelineTemplate) -> float:
                # Longer ones are never cut by the event-exact time.
                is_short = each.num_stages <= MOST_STAGES
                if is_short:
                    return self._whole_s(each, share)
                return self._costs.timing(each).bound_s(share) + self._reduction_s(each, share)

            excess = max(1.0, step_s(template) / step_s(usual))
            self._excesses[id(template), share] = template, excess
        return excess

    def _whole_s(self, template: PipelineTemplate, share: int) -> float:
        reduce_s = self._reduction_s(template, share)
        return self._exact.step_s(template, share, reduce_s=reduce_s) + reduce_s

    def _reduction_s(self, template: PipelineTemplate, share: int) -> float:
        num_pipelines = max(1, round(self.settings.num_microbatches / share))
        return self._costs.reduced_bytes(template) * instantiation.bytes_reduction_s(
            self.profile.network, num_pipelines
        )

    def reduced_bytes(self, form: Form, share: int) -> int:
        template = form.template
        # As in `timing`, what was cut by its timeline counts as a usual template while moves are compared; predictions
        # and the comparison by timelines take its own bytes.
        if template.num_nodes in self._options and self._excess(template, share) <= STILL_FAST:
            return self._options[template.num_nodes].reduced_bytes
        # A cut for slow nodes may leave far more layers on one node.
        return self._costs.reduced_bytes(template)

    def explain(self, total: Counts) -> str:
        largest = self._costs.device_counts[-1]
        usable = largest * self._costs.usable_bytes
        each = f"a stage has {size_text(usable)} ({largest} × {self.profile.device.name})"
        for index, layer in enumerate(self.profile.layers):
            alone = StageTemplate(
                first_layer=index,
                stop_layer=index + 1,
                node_index=0,
                num_devices=largest,
                num_recomputed=int(bool(layer.recomputed)),
            )
            held = stage_footprint(self.profile, alone)
            needed = held.static_bytes + held.activation_bytes
            if needed > usable:
                return (
                    f"layer {index} ({layer.name}) fits on no number of nodes: it needs {size_text(needed)}, and "
                    f"{each}; {_LESS_MEMORY}"
                )
        if self.most_nodes < 1:
            what = counted(self.most_stages, "stage" if self.settings.num_stages else "layer")
            return (
                f"{what} cannot be spread over the {self.settings.devices_per_node} devices of a node with at most "
                f"{largest} a stage; name each device as a node of its own, by a line `HOST devices=NUMBER` of the "
                "hostfile"
            )
        num_microbatches, are_short = self.settings.num_microbatches, bool(self.options(*total))
        possible = self.options(max(*total, self.most_nodes, num_microbatches + 1))
        if not are_short and self._options:
            return (
                f"the model needs at least {min(self._options)} nodes of {self.settings.devices_per_node} × "
                f"{self.profile.device.name}; there {'is' if total == (1,) else 'are'} {total[0]}"
            )
        if self._short:
            size = max(self._short, key=lambda size: possible[size].timing.most_microbatches / size)
            return (
                f"a pipeline of {counted(size, 'node')} has memory for "
                f"{possible[size].timing.most_microbatches:.0f} of a step's {num_microbatches} microbatches, and "
                f"{counted(total[0], 'node')} cannot take the others; add nodes, or take fewer or smaller microbatches"
            )
        whole = footprint(self.profile, 0, self._costs.num_layers, num_devices=largest)
        return (
            f"the model fits on no number of nodes: {each}, the model takes {size_text(whole.static_bytes)} and "
            f"{size_text(whole.activation_bytes)} for each microbatch in flight; {_LESS_MEMORY}"
        )


def _unmarked(template: PipelineTemplate) -> PipelineTemplate:
    return PipelineTemplate(
        stages=tuple(replace(stage, num_selective=0, num_recomputed=0) for stage in template.stages)
    )


def _without_reserve(profile: Profile, settings: PlannerSettings) -> Profile:
    """Return the profile of devices that have only the memory that the model may use."""
    device = profile.device
    most = max(0, device.memory_bytes - settings.reserved_memory_bytes)
    return replace(profile, device=replace(device, memory_bytes=most))
