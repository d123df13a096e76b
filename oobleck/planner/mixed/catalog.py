"""The pipelines over several kinds of nodes, by their number of nodes of each kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, PipelineTemplate
from oobleck.planner.catalog import STILL_FAST, Catalog, speeds_among
from oobleck.planner.costs import Timing
from oobleck.planner.formatting import counted, listed
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.kinds import Counts, Form, KindCosts
from oobleck.planner.makespan import PassTimes, step_over_kinds_s
from oobleck.planner.values import NodeKind, PlannerSettings

from .choice import Choice, Chooser
from .reduction import choose_with_reduction
from .search import MixedSearch

_FEWEST = 8
# Beyond this many combinations of numbers of nodes, each pipeline has nodes of one kind.
_MOST_TOGETHER = 2_048

_Reach = tuple[Counts, bool]
"""The most nodes of each kind in a pipeline, and whether some may have memory for a few microbatches only."""


class MixedCatalog(Catalog):
    def __init__(
        self, kinds: Sequence[NodeKind], settings: PlannerSettings, kind_of: Mapping[str, str], *, mixes: bool = True
    ) -> None:
        super().__init__(KindCosts(kinds, settings))
        self._mixes = mixes
        self._kind_of = kind_of
        self._numbers = {kind.name: number for number, kind in enumerate(kinds)}
        self._searches: dict[_Reach, dict[Counts, MixedSearch]] = {}
        self._timings: dict[_Reach, dict[Counts, Timing]] = {}
        self._forms: dict[tuple[Counts, _Reach], Form] = {}
        self._choices: dict[tuple[Counts, int, int, bool, _Reach], Choice | None] = {}
        self._most: dict[Counts, int] = {}
        self._times = [PassTimes(costs) for costs in self.costs.of]
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
            searches = sorted(self._search(reach).items())
            self._timings[reach] = {
                counts: replace(search.timing(counts), most_microbatches=search.most_microbatches)
                for counts, search in searches
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
        if total not in self._most:
            timings = self.timings(total)
            chooser = Chooser(timings, self.settings.num_microbatches) if timings else None
            self._most[total] = chooser.most_pipelines(total) if chooser else 0
        return self._most[total]

    def possible_number(self, total: Counts, wanted: int) -> int:
        timings, most = self.timings(total), self.most_pipelines(total)
        if all(timing.most_microbatches == math.inf for timing in timings.values()):
            return wanted
        chooser = Chooser(timings, self.settings.num_microbatches)
        for number in chain(range(wanted, 0, -1), range(wanted + 1, most + 1)):
            if chooser.can_take(total, number, exactly=True):
                return number
        raise AssertionError("some number of pipelines takes the batch")

    def can_hold(self, total: Counts) -> bool:
        return self.most_pipelines(total) > 0

    def continued(self, own: Form, total: Counts, num_microbatches: int, speeds: Sequence[float] | None) -> Form | None:
        counts, present = self.counts_of(own), self.timings(total)
        if counts not in present:
            return own
        if own.template.num_layers == self.costs.num_layers:
            timing, usual = self.timing(own, None, num_microbatches), present[counts]
            holds_as_many = 0 < timing.most_microbatches >= min(usual.most_microbatches, num_microbatches)
            # A pipeline with slow nodes may be cut for them: its speed without them says nothing.
            is_fast = speeds is not None or timing.bound_s(num_microbatches) <= STILL_FAST * usual.bound_s(
                num_microbatches
            )
            if holds_as_many and is_fast:
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

    def predicted_step_s(self, plan: ExecutionPlan, bound_s: float, speeds: Mapping[str, float]) -> float:
        forms = [self.form_of(each) for each in plan.pipelines]
        distinct = {
            (id(each.template), form.kinds, each.num_microbatches, tuple(speeds_among(each.nodes, speeds) or ())): form
            for each, form in zip(plan.pipelines, forms, strict=True)
        }
        # Pipelines in chunks are of a plan that was made while there was one kind.
        if any(form.template.num_chunks > 1 for form in forms):
            return bound_s
        slowest_s = max(
            step_over_kinds_s([self._times[kind] for kind in form.kinds], form.template, count, own)
            for (_, _, count, own), form in distinct.items()
        )
        most_bytes = max(self.reduced_bytes(form, 0) for form in distinct.values())
        return slowest_s + reduction_s(self.costs.network, most_bytes, len(forms))

    def _reach(self, nodes: Counts) -> _Reach:
        """Return what pipelines of a plan of these nodes may be."""
        # Powers of two, so that a few more nodes need no new search.
        most = tuple(
            min(self.most_stages // devices, 1 << (max(number, _FEWEST) - 1).bit_length()) if number else 0
            for number, devices in zip(nodes, self.costs.devices, strict=True)
        )
        # With a microbatch for each device, some pipeline takes as many as it has stages, so none need be short.
        return most, self.settings.num_microbatches < self._num_stages(nodes)

    def _num_stages(self, counts: Counts) -> int:
        return sum(number * devices for number, devices in zip(counts, self.costs.devices, strict=True))

    def _search(self, reach: _Reach) -> Mapping[Counts, MixedSearch]:
        """Return the search that covers each pipeline."""
        if reach not in self._searches:
            most, may_be_short = reach
            if may_be_short:
                whole = self._search((most, False))
                self._searches[reach] = {**self._find_short(most, whole), **whole}
            else:
                self._searches[reach] = self._find(self.costs, most)
        return self._searches[reach]

    def _find(self, costs: KindCosts, most: Counts) -> dict[Counts, MixedSearch]:
        """Search pipelines of at most `most` nodes: in one for all kinds together, or one for each kind alone."""
        limits = [most]
        if not self._mixes or math.prod(number + 1 for number in most) > _MOST_TOGETHER:
            limits = [tuple(number if k == kind else 0 for k, number in enumerate(most)) for kind in range(len(most))]
        searches = [MixedSearch(costs, limit) for limit in limits if any(limit)]
        return {
            counts: search
            for search in searches
            for counts in search.counts()
            # The limit is on each kind, and not on all of them together.
            if self._num_stages(counts) <= self.most_stages
        }

    def _find_short(self, most: Counts, whole: Mapping[Counts, MixedSearch]) -> dict[Counts, MixedSearch]:
        """Search the other pipelines, each for the most microbatches in flight that fit its memory."""
        alone = self._find(self.costs.with_most_in_flight(1), most)
        left, found = {counts for counts in alone if counts not in whole}, dict[Counts, MixedSearch]()
        largest = max(map(self._num_stages, left), default=0)
        for number in range(min(self.settings.num_microbatches, largest) - 1, 1, -1):
            if not left:
                break
            limit = tuple(max(numbers) for numbers in zip(*left, strict=True))
            searches = self._find(self.costs.with_most_in_flight(number), limit)
            found |= {counts: search for counts, search in searches.items() if counts in left}
            left -= found.keys()
        return found | {counts: alone[counts] for counts in left}

    def explain(self, total: Counts) -> str:
        there = listed(
            f"{counted(number, 'node')} of {kind.devices_per_node} × {kind.name}"
            for number, kind in zip(total, self.costs.kinds, strict=True)
            if number
        )
        for index, layer in enumerate(self.costs.kinds[0].profile.layers):
            if not any(costs.most_in_flight(1)[index, index + 1] >= 1 for costs in self.costs.of):
                return f"layer {index} ({layer.name}) fits on a device of no kind: more memory is needed than any has"
        if self.timings(total):
            return (
                f"{there} have no memory for a step's {self.settings.num_microbatches} microbatches; add nodes, or "
                "take fewer or smaller microbatches"
            )
        if self.most_stages < min(self.costs.devices):
            return (
                f"{there}: {counted(self.most_stages, 'stage')} cannot be spread over all devices of a node; name "
                "each device as a node of its own, by a line `HOST devices=NUMBER` of the hostfile"
            )
        return f"{there} cannot hold the model; add nodes, or take smaller microbatches"
