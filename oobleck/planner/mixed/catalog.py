"""The pipelines over several kinds of nodes, by their number of nodes of each kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from oobleck.errors import PlanningError
from oobleck.plan import PipelineTemplate
from oobleck.planner.catalog import STILL_FAST, Catalog
from oobleck.planner.costs import Timing
from oobleck.planner.formatting import counted, listed
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.kinds import Counts, Form, KindCosts
from oobleck.planner.values import NodeKind, PlannerSettings

from .choice import Choice, Chooser
from .reduction import choose_with_reduction
from .search import MixedSearch

_FEWEST = 8
# Beyond this many combinations of numbers of nodes, each pipeline has nodes of one kind.
_MOST_TOGETHER = 2_048


class MixedCatalog(Catalog):
    def __init__(
        self, kinds: Sequence[NodeKind], settings: PlannerSettings, kind_of: Mapping[str, str], *, mixes: bool = True
    ) -> None:
        super().__init__(KindCosts(kinds, settings))
        self._mixes = mixes
        self._kind_of = kind_of
        self._numbers = {kind.name: number for number, kind in enumerate(kinds)}
        self._searches: dict[Counts, dict[Counts, MixedSearch]] = {}
        self._timings: dict[Counts, dict[Counts, Timing]] = {}
        self._forms: dict[tuple[Counts, Counts], Form] = {}
        self._choices: dict[tuple[Counts, int, int, bool, Counts], Choice | None] = {}
        self._nominal: dict[tuple[int, tuple[int, ...]], tuple[PipelineTemplate, Timing]] = {}

    def kind(self, node: str) -> int:
        if (name := self._kind_of.get(node)) is None:
            raise PlanningError(f"node {node} has no kind; kinds are {listed(self._numbers)}")
        if name not in self._numbers:
            raise PlanningError(
                f"node {node} is of kind {name}, which has no profile; there is one of {listed(self._numbers)}"
            )
        return self._numbers[name]

    def count(self, nodes: Collection[str]) -> Counts:
        numbers = Counter(map(self.kind, nodes))
        return tuple(numbers[kind] for kind in range(len(self._numbers)))

    def timings(self, nodes: Counts, total: Counts | None = None) -> Mapping[Counts, Timing]:
        """Return the step times of every pipeline that these nodes can form, in a plan of `total` nodes (`nodes`)."""
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

    def form(self, counts: Counts, total: Counts) -> Form:
        return self.forms([counts], total)[counts]

    def forms(self, wanted: Collection[Counts], total: Counts) -> dict[Counts, Form]:
        """Return the form of each wanted pipeline in a plan of `total` nodes."""
        reach = self._reach(total)
        missing = [counts for counts in wanted if (counts, reach) not in self._forms]
        searches = self._search(reach)
        for search in dict.fromkeys(searches[counts] for counts in missing):
            found = search.templates([counts for counts in missing if searches[counts] is search])
            self._forms.update(((counts, reach), form) for counts, form in found.items())
        return {counts: self._forms[counts, reach] for counts in wanted}

    def best(self, total: Counts) -> tuple[tuple[Counts, ...], float]:
        fewest, _ = self.num_pipelines(total)
        exactly = self.settings.num_pipelines is not None
        return self._best(total, fewest, exactly=exactly)

    def best_step_s(self, total: Counts, fewest: int, most: int) -> float:
        return self._best(total, fewest)[1]

    def _best(self, total: Counts, fewest: int, *, exactly: bool = False) -> tuple[tuple[Counts, ...], float]:
        choice = self.choose(total, self.settings.num_microbatches, fewest, exactly=exactly)
        assert choice is not None, "the nodes can form the fewest pipelines"
        bytes_of = max(self.reduced_bytes(self.form(counts, total), 0) for counts in choice.pipelines)
        return choice.pipelines, choice.slowest_s + reduction_s(self.costs.network, bytes_of, len(choice.pipelines))

    def most_pipelines(self, total: Counts) -> int:
        timings = self.timings(total)
        return Chooser(timings, self.settings.num_microbatches).most_pipelines(total) if timings else 0

    def continued(self, own: Form, total: Counts, num_microbatches: int, speeds: Sequence[float] | None) -> Form | None:
        counts, present = self.counts_of(own), self.timings(total)
        if counts not in present:
            return own
        if own.template.num_layers == self.costs.num_layers and self.costs.fits(own):
            own_s = self.timing(own, None, num_microbatches).step_s(num_microbatches)
            # A pipeline with slow nodes may be cut for them: its speed without them says nothing.
            if speeds is not None or own_s <= STILL_FAST * present[counts].step_s(num_microbatches):
                return own
        return self.form(counts, total)

    def usual_if_faster(self, form: Form, total: Counts, num_microbatches: int) -> Form:
        counts = self.counts_of(form)
        usual = self.form(counts, total) if counts in self.timings(total) else form
        own_s, usual_s = (self.timing(each, None, 0).step_s(num_microbatches) for each in (form, usual))
        # The nodes keep their places, so only a form with their kinds in this order will do.
        return usual if usual.kinds == form.kinds and usual_s < own_s else form

    def best_for(self, nodes: Counts, total: Counts, number: int | None = None) -> tuple[Counts, ...] | None:
        share = self.share(sum(nodes), sum(total))
        choice = self.choose(nodes, share, number or 1, exactly=number is not None, total=total)
        return None if choice is None else choice.pipelines

    def choose(
        self, nodes: Counts, num_microbatches: int, fewest: int, *, exactly: bool = False, total: Counts | None = None
    ) -> Choice | None:
        """Return the best `fewest` or more pipelines (or exactly as many) of the nodes, in a plan of `total` nodes."""
        key = nodes, num_microbatches, fewest, exactly, self._reach(total or nodes)
        if key not in self._choices:
            timings, reach = self.timings(nodes, total), total or nodes
            found = None
            if timings and fewest <= num_microbatches:
                found = choose_with_reduction(
                    timings,
                    num_microbatches,
                    nodes,
                    self.costs.network,
                    lambda wanted: {
                        each: self.reduced_bytes(form, 0) for each, form in self.forms(wanted, reach).items()
                    },
                    sum(layer.trained_bytes for layer in self.costs.of[0].profile.layers),
                    fewest=fewest,
                    exactly=exactly,
                )
            self._choices[key] = found
        return self._choices[key]

    def timing(self, form: Form, speeds: Sequence[float] | None, share: int, still_fast: float = STILL_FAST) -> Timing:
        if speeds is not None:
            return self.costs.timing(form, speeds)
        key = id(form.template), form.kinds
        if key not in self._nominal:
            # The value keeps the template alive, whose identity is in the key.
            self._nominal[key] = form.template, self.costs.timing(form)
        return self._nominal[key][1]

    @property
    def _most_stages(self) -> int:
        return min(self.costs.num_layers, self.costs.settings.num_stages or self.costs.num_layers)

    def _reach(self, nodes: Counts) -> Counts:
        """Return the most nodes of each kind in a pipeline."""
        # Powers of two, so that a few more nodes need no new search.
        return tuple(
            min(self._most_stages // devices, 1 << (max(number, _FEWEST) - 1).bit_length()) if number else 0
            for number, devices in zip(nodes, self.costs.devices, strict=True)
        )

    def _search(self, reach: Counts) -> Mapping[Counts, MixedSearch]:
        """Return the search that covers each pipeline: one for all kinds together, or one for each kind alone."""
        if reach not in self._searches:
            limits = [reach]
            if not self._mixes or math.prod(number + 1 for number in reach) > _MOST_TOGETHER:
                limits = [
                    tuple(number if k == kind else 0 for k, number in enumerate(reach)) for kind in range(len(reach))
                ]
            searches = [MixedSearch(self.costs, limit) for limit in limits]
            self._searches[reach] = {
                counts: search
                for search in searches
                for counts in search.counts()
                # The reach limits each kind, and not all of them together.
                if sum(number * devices for number, devices in zip(counts, self.costs.devices, strict=True))
                <= self._most_stages
            }
        return self._searches[reach]

    def explain(self, total: Counts) -> str:
        there = listed(
            f"{counted(number, 'node')} of {kind.devices_per_node} × {kind.name}"
            for number, kind in zip(total, self.costs.kinds, strict=True)
            if number
        )
        for index, layer in enumerate(self.costs.kinds[0].profile.layers):
            if not any(costs.most_in_flight(1)[index, index + 1] >= 1 for costs in self.costs.of):
                return f"layer {index} ({layer.name}) fits on a device of no kind: more memory is needed than any has"
        if self._most_stages < min(self.costs.devices):
            return (
                f"{there}: {counted(self._most_stages, 'stage')} cannot be spread over so many devices of a node; name "
                "each device as a node of its own, by a line `HOST devices=NUMBER` of the hostfile"
            )
        return f"{there} cannot hold the model; add nodes, or take smaller microbatches"
