"""Reconfiguration: a plan and the changes to its nodes in, the best next plan out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, Pipeline
from oobleck.planner.catalog import STILL_FAST, Catalog, speeds_among
from oobleck.planner.inventory import Holding, plan_transfers
from oobleck.planner.kinds import Form
from oobleck.planner.values import Decision

from .domains import Domains
from .gather import gather_slow_nodes
from .living_nodes import Changes, LivingNodes, look_at
from .matching import Position, match_nodes
from .placing import Move, Placing, lacking
from .wording import UNCHANGED, describe, detail_of, lack_of_domains

# A move has to be better than a gentler one by more than this share.
_TOLERANCE = 1e-9
# After a loss, whole pipelines change only if that makes steps shorter by more than this share. Training waits for the
# change, and predictions are hardly more exact.
_WORTH = 0.01

# Up to this many nodes, they are also matched so that no link is busy for long, and pipelines with slow ones are cut by
# the timeline; beyond that, layers have many holders, and one pipeline hardly matters.
_FEW_NODES = 512
# More bytes may move in all if the copies are done sooner by this share.
_LEAST_SOONER = 0.05
# By the timeline a plan has to be shorter by these shares to replace one whose copies are done sooner, or no sooner:
# last digits move no layers.
_LEAST_GAIN = 0.005
_LEAST_EQUAL = 0.001
# Stages are cut for slow nodes, and the batch shared out again, in at most this many rounds.
_MOST_ROUNDS = 3
# On few nodes, slow ones included, so many of the outcomes that are best by their bounds are compared by timelines. The
# bound of stages that were cut for slow nodes may be too short by up to this share.
_FEW_COMPARED = 64
_MOST_COMPARED = 8
_MOST_TOO_SHORT = 0.05

# A score has the pipelines too few or too many, the domains that layers lack, then the weighed seconds of a step.
_Score = tuple[int, int, float]


Propose = Callable[[LivingNodes, Mapping[int, Form], frozenset[str]], Iterator[Move]]
"""Yields moves that leave some nodes out, the gentlest first, given the forms in which old pipelines can continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    move: Move
    set_aside: frozenset[str]
    least: _Score
    """A lower bound on the score of every way to carry the move out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    move: Move
    action: str
    detail: str
    plan: ExecutionPlan
    step_s: float
    transition_s: float
    score: _Score
    arrivals: tuple[tuple[str, Holding], ...]
    """Nodes that receive layers, with all that they have to hold."""
    forms: Sequence[Form]
    usual: Sequence[Form]
    usual_nodes: Sequence[Sequence[str]]
    """The forms and nodes before some were cut and placed again."""


def reconfigure(catalog: Catalog, propose: Propose, plan: ExecutionPlan, changes: Changes) -> Decision:
    """Decide the plan that follows changes; see `Planner.reconfigure`."""
    living = look_at(plan, changes, devices_per_node=catalog.most_devices, dissolved=_without_devices(catalog, plan))
    best = _affordable(catalog, propose, living, changes)
    transfers = plan_transfers(best.arrivals, living.inventory, max_sources=catalog.settings.max_sources)
    reason, threshold = describe(living, changes, best.detail, best.plan, transfers), catalog.settings.fault_threshold
    lacks = lacking(catalog, changes.domains, best.plan)
    return Decision(
        plan=best.plan,
        action=best.action,
        reason=f"{reason}; {lack_of_domains(threshold)}" if lacks and len(best.plan.pipelines) > threshold else reason,
        transfers=transfers,
        predicted_step_s=catalog.predicted_step_s(best.plan, best.step_s, living.speeds),
        bound_step_s=best.step_s,
        redundant=not lacks,
    )


def _without_devices(catalog: Catalog, plan: ExecutionPlan) -> frozenset[int]:
    """Return the pipelines with a node that has come back as one of a smaller kind: their stages have no device."""
    if len(catalog.costs.kinds) == 1:
        return frozenset()
    return frozenset(
        index
        for index, pipeline in enumerate(plan.pipelines)
        if not catalog.costs.has_devices(catalog.form_of(pipeline))
    )


def _affordable(catalog: Catalog, propose: Propose, living: LivingNodes, changes: Changes) -> _Outcome:
    """Return the best outcome over domains, or without regard to them where that costs more than redundancy may."""
    best = _Search(catalog, propose, living, changes.domains, changes.horizon_s).best()
    most_percent = catalog.settings.max_redundancy_percent
    if not changes.domains or most_percent is None:
        return best
    anywhere = _Search(catalog, propose, living, Domains({}, 0), changes.horizon_s).best()
    return best if best.step_s <= anywhere.step_s * (1 + most_percent / 100) else anywhere


class _Search:
    def __init__(
        self, catalog: Catalog, propose: Propose, living: LivingNodes, domains: Domains, horizon_s: float
    ) -> None:
        self._catalog, self._propose, self._living = catalog, propose, living
        self._horizon_s = horizon_s
        self._slow = living.slow
        self._total = catalog.count(living.holdings)
        self._templates = {pipeline.nodes: pipeline.template for pipeline in living.plan.pipelines}
        self._continued = self._go_on()
        self._intact = self._untouched()
        self._placing = Placing(catalog, living, domains, self._continued, self._intact)
        # Several kinds have no timeline.
        self._compares = bool(self._slow) and len(self._total) == 1 and len(living.holdings) <= _FEW_COMPARED
        self._weighed: list[_Outcome] = []

    def best(self) -> _Outcome:
        """Return the best outcome. Raises PlanningError where the nodes left cannot hold the model."""
        return self._with_even_links(self._best_by_timeline(self._best_by_bounds()))

    def _best_by_bounds(self) -> _Outcome:
        proposals = list(self._proposals())
        best: _Outcome | None = None
        slack = 1 + _MOST_TOO_SHORT if self._compares else 1.0
        # Of moves with equal bounds the gentler come first, and stay unless a later one is truly better.
        for proposal in sorted(proposals, key=lambda proposal: proposal.least):
            if best is None or _beats(proposal.least, (*best.score[:2], best.score[2] * slack)):
                outcome = self._carry_out(proposal)
                if best is None or _beats(outcome.score, best.score):
                    best, chosen = outcome, proposal
        if best is None or best.step_s == math.inf:
            raise PlanningError("the nodes left cannot hold the model and a step's microbatches")
        if len(self._total) > 1:  # with several kinds the score decides
            return self._or_as_it_is(best) if self._living.is_whole else best
        if self._living.is_whole:
            return best
        enough = *best.score[:2], best.score[2] * (1 + _WORTH)
        # Unlike the sorted ones, `proposals` are still in the order of gentleness.
        for gentler in proposals[: proposals.index(chosen)]:
            if gentler.least <= enough and len(gentler.move.pipelines) == len(chosen.move.pipelines):
                outcome = self._carry_out(gentler)
                if outcome.score <= enough and self._num_kept(outcome) > self._num_kept(best):
                    return outcome
        return best

    def _or_as_it_is(self, best: _Outcome) -> _Outcome:
        """Return the outcome, or the plan as it is, if the step of that is no longer by its timeline."""
        pipelines = self._living.plan.pipelines
        forms = [self._catalog.form_of(own) for own in pipelines]
        same = tuple((index, self._catalog.counts_of(form)) for index, form in enumerate(forms))
        own = self._weigh(
            Move(action="reinstantiate", pipelines=same, detail=UNCHANGED),
            forms,
            [each.nodes for each in pipelines],
            num_microbatches=[each.num_microbatches for each in pipelines],
        )
        if own.score[:2] > best.score[:2]:
            return best
        own_s, best_s = (
            self._catalog.predicted_step_s(each.plan, each.step_s, self._living.speeds) for each in (own, best)
        )
        return own if own_s <= best_s else best

    def _best_by_timeline(self, best: _Outcome) -> _Outcome:
        """Return the outcome, or one whose step is truly shorter by its timeline and repays what has to move."""
        if self._slow and len(self._living.holdings) > _FEW_NODES:
            return best
        own_s = self._catalog.exact_step_s(best.plan, self._living.speeds)
        if own_s is None:
            return best
        found, weighed_s = best, own_s * (1 + best.transition_s / self._horizon_s)
        planned_again = self._planned_again(best, lambda: weighed_s * (1 - _LEAST_EQUAL))
        cut_further = self._cut_further(best, lambda: found)
        others = [iter((best,)), self._cut_by_timeline(best), self._runners_up(best), planned_again, cut_further]
        for other in self._shared_out(chain.from_iterable(others)):
            if other.score[:2] > found.score[:2]:
                continue
            step_s = self._catalog.exact_step_s(other.plan, self._living.speeds)
            assert step_s is not None, "it has a timeline if the outcome has one"
            other_s = step_s * (1 + other.transition_s / self._horizon_s)
            if other_s < weighed_s and other_s <= weighed_s * (1 - self._least_gain(found, other)):
                found, weighed_s = other, other_s
        # A plan that is truly faster has no longer bound.
        return replace(found, step_s=min(found.step_s, best.step_s))

    def _shared_out(self, outcomes: Iterator[_Outcome]) -> Iterator[_Outcome]:
        """Yield outcomes, and those with slow nodes also with the shares of the batch that suit their timelines."""
        for outcome in outcomes:
            yield outcome
            if self._slow:
                counts = self._catalog.exact_shares(outcome.plan, self._living.speeds)
                if counts != tuple(own.num_microbatches for own in outcome.plan.pipelines):
                    yield self._weigh_again(outcome, outcome.forms, counts)

    def _least_gain(self, before: _Outcome, other: _Outcome) -> float:
        if self._num_kept(other) < self._num_kept(before):
            return _WORTH
        return _LEAST_GAIN if other.transition_s > before.transition_s else _LEAST_EQUAL

    def _with_even_links(self, best: _Outcome) -> _Outcome:
        """Return the outcome with nodes matched so that the busiest link is done first, where that is sooner."""
        pipelines = best.plan.pipelines
        if self._slow or not best.arrivals or len(self._living.holdings) > _FEW_NODES:
            return best
        nodes = self._placing.assign(best.move, best.forms, evenly=True)
        other = self._weigh(best.move, best.forms, nodes, num_microbatches=[own.num_microbatches for own in pipelines])
        if other.transition_s >= best.transition_s * (1 - _LEAST_SOONER) or other.score[1] > best.score[1]:
            return best
        return replace(best, plan=other.plan, arrivals=other.arrivals, transition_s=other.transition_s)

    def _cut_by_timeline(self, outcome: _Outcome) -> Iterator[_Outcome]:
        """Yield the outcome with pipelines cut again by the timeline, the changed ones, then all."""
        pipelines, forms, catalog = outcome.plan.pipelines, outcome.forms, self._catalog
        nodes, counts = [own.nodes for own in pipelines], [own.num_microbatches for own in pipelines]
        known: dict[tuple[object, ...], Form] = {}
        again = []
        for form, own in zip(forms, pipelines, strict=True):
            speeds = tuple(speeds_among(own.nodes, self._living.speeds) or ())
            key = id(own.template), own.num_microbatches, speeds
            if key not in known:
                known[key] = catalog.cut_again(form, own.num_microbatches, len(pipelines), speeds)
            again.append(known[key])
        old = {own.nodes for own in self._living.plan.pipelines}
        for changed in (True, False):
            cut = [
                new if own not in old or not changed else form
                for new, form, own in zip(again, forms, nodes, strict=True)
            ]
            if any(new.template is not own.template for new, own in zip(cut, pipelines, strict=True)):
                yield self._weigh_again(outcome, cut, counts)

    def _cut_further(self, best: _Outcome, found: Callable[[], _Outcome]) -> Iterator[_Outcome]:
        """Yield the best so far, if it is not `best`, cut again for its shares of the batch, while that helps."""
        before = best
        for _ in range(_MOST_ROUNDS if self._slow else 0):
            if (own := found()) is before:
                return
            yield from self._cut_by_timeline(own)
            before = own

    def _weigh_again(self, outcome: _Outcome, forms: Sequence[Form], num_microbatches: Sequence[int]) -> _Outcome:
        return self._weigh(
            outcome.move,
            forms,
            [own.nodes for own in outcome.plan.pipelines],
            usual=outcome.usual,
            usual_nodes=outcome.usual_nodes,
            num_microbatches=num_microbatches,
        )

    def _runners_up(self, best: _Outcome) -> Iterator[_Outcome]:
        """Yield the other outcomes that bounds put first, each as it is and cut again by the timeline."""
        distinct = {best.plan.pipelines}
        for outcome in sorted(self._weighed, key=lambda outcome: outcome.score):
            if outcome.score[0] > best.score[0] or len(distinct) == _MOST_COMPARED:
                return
            if outcome.plan.pipelines not in distinct:
                distinct.add(outcome.plan.pipelines)
                yield outcome
                yield from self._cut_by_timeline(outcome)

    def _planned_again(self, best: _Outcome, most_s: Callable[[], float]) -> Iterator[_Outcome]:
        """Yield a fresh plan of the living nodes that are not slow, if they can form as many pipelines.

        None is yielded whose step alone takes longer than `most_s` returns, whatever has to move for it.
        """
        catalog = self._catalog
        total = catalog.count(self._living.holdings.keys() - self._slow)
        if not catalog.most_pipelines(total) or (not self._slow and catalog.least_start_s(total) > most_s()):
            return
        fresh, shares = catalog.start(total, is_slowed=False)
        # With slow nodes the batch is shared out again afterwards.
        if not self._slow and shares is not None and catalog.least_exact_s(fresh, shares) > most_s():
            return
        if self._astray(len(fresh)) <= best.score[0]:
            origins = self._origins_of(fresh)
            move = Move(
                action="rebuild",
                pipelines=tuple((origin, catalog.counts_of(form)) for origin, form in zip(origins, fresh, strict=True)),
                detail=f"all {'other ' if self._slow else ''}nodes are planned again",
            )
            nodes = self._placing.assign(move, fresh, set_aside=self._slow)
            yield self._weigh(move, fresh, nodes, num_microbatches=shares)

    def _origins_of(self, forms: Sequence[Form]) -> list[int | None]:
        """Return the old pipeline that each new one continues: one of equal stages, else one of equally many nodes."""
        old, origins = self._living.plan.pipelines, list[int | None]([None] * len(forms))
        waiting = dict.fromkeys(sorted(range(len(old)), key=lambda index: (index not in self._intact, index)))
        for is_alike in (True, False):
            by_key: dict[object, list[int]] = {}
            for index in reversed(waiting):
                by_key.setdefault(old[index].template if is_alike else len(old[index].nodes), []).append(index)
            for place, form in enumerate(forms):
                if origins[place] is not None:
                    continue
                if indices := by_key.get(form.template if is_alike else form.template.num_nodes):
                    origins[place] = index = indices.pop()
                    del waiting[index]
        return origins

    def _num_kept(self, outcome: _Outcome) -> int:
        """Return how many pipelines keep their nodes and stages."""
        kept = 0
        for own in outcome.plan.pipelines:
            before = self._templates.get(own.nodes)
            # Comparing stages takes long, and most templates are the same object.
            kept += before is own.template or (before is not None and before.stages == own.template.stages)
        return kept

    def _proposals(self) -> Iterator[_Proposal]:
        settings = self._catalog.settings
        self._catalog.num_pipelines(self._total)  # raises PlanningError if there can be none
        quickest = max([1.0, *self._living.speeds.values()])
        for set_aside in self._living.without_slowest():
            moves = self._propose(self._living, self._continued, set_aside)
            for move in chain(moves, self._placing.apart(set_aside)):
                number = len(move.pipelines)
                if number > settings.num_microbatches:
                    continue
                astray = self._astray(number)
                # Bounds hold at nominal speed, and a node may be faster than its profile.
                least_s = self._catalog.least_s([counts for _, counts in move.pipelines], self._total)
                yield _Proposal(move=move, set_aside=set_aside, least=(astray, 0, least_s / quickest))

    def _astray(self, number: int) -> int:
        """Return how many pipelines a number is away from the wanted ones."""
        fewest, most = self._catalog.num_pipelines(self._total)
        # The wanted number takes precedence over time: redundancy is not for sale.
        return max(fewest - number, number - most if self._catalog.settings.num_pipelines is not None else 0, 0)

    def _go_on(self) -> dict[int, Form]:
        """Return the form in which each old pipeline continues with unchanged numbers of nodes of each kind."""
        living = self._living
        known: dict[tuple[object, ...], Form | None] = {}
        found: dict[int, Form] = {}
        for index, pipeline in enumerate(living.plan.pipelines):
            template, kinds = pipeline.template, self._catalog.kinds_of(pipeline.nodes)
            is_slowed = not self._slow.isdisjoint(pipeline.nodes)
            speeds = tuple(living.speeds.get(node, 1.0) for node in pipeline.nodes) if is_slowed else None
            key = id(template), kinds, speeds, pipeline.num_microbatches
            if key not in known:
                own = Form(template=template, kinds=kinds)
                known[key] = self._catalog.continued(own, self._total, pipeline.num_microbatches, speeds)
            if (form := known[key]) is not None:
                found[index] = form
        return found

    def _untouched(self) -> frozenset[int]:
        """Return the old pipelines whose nodes all live and hold exactly what their template needs."""
        origins, holdings = self._living.origins, self._living.holdings
        return frozenset(
            index
            for index, pipeline in enumerate(self._living.plan.pipelines)
            if index in self._continued
            and all(map(origins.__contains__, pipeline.nodes))
            and tuple(map(holdings.get, pipeline.nodes)) == self._catalog.needed(self._continued[index].template)
        )

    def _carry_out(self, proposal: _Proposal) -> _Outcome:
        living, catalog = self._living, self._catalog
        forms = []
        for origin, counts in proposal.move.pipelines:
            own = None if origin is None else self._continued.get(origin)
            forms.append(own if own and catalog.counts_of(own) == counts else catalog.form(counts, self._total))
        nodes = self._placing.assign(proposal.move, forms, set_aside=proposal.set_aside)
        gathered: Iterator[Sequence[Sequence[str]]] = iter(())
        if len(self._total) == 1:  # any node may be swapped for any other
            needed = [catalog.needed(form.template) for form in forms]
            gathered = gather_slow_nodes(nodes, needed, self._slow, living.holdings, catalog.costs.layer_bytes)
        best: _Outcome | None = None
        for grouped in chain([nodes], gathered):
            found = self._weigh(proposal.move, forms, grouped)
            weighed = [found]
            # Cuts change the shares of the batch, for which stages are cut.
            for _ in range(_MOST_ROUNDS):
                before = found
                for cut, placed in self._cut_again(forms, before.plan):
                    outcome = self._weigh(proposal.move, cut, placed, usual=forms, usual_nodes=grouped)
                    weighed.append(outcome)
                    if _beats(outcome.score, found.score):
                        found = outcome
                if found is before or not self._slow:
                    break
            if self._compares:
                self._weighed += weighed
            if best is None or _beats(found.score, best.score):
                best = found
        assert best is not None, "the assigned nodes were weighed"
        return best

    def _cut_again(
        self, forms: Sequence[Form], plan: ExecutionPlan
    ) -> Iterator[tuple[Sequence[Form], Sequence[tuple[str, ...]]]]:
        """Yield proposals, as (forms, nodes): a plan's pipelines with some of them cut again, or nodes in other places.

        The caller weighs the bytes.
        """
        nodes = [pipeline.nodes for pipeline in plan.pipelines]
        cut, moved, placed = list(forms), list(forms), list(nodes)
        for index, pipeline in enumerate(plan.pipelines if self._slow else ()):
            if not self._slow.isdisjoint(pipeline.nodes):
                cut[index] = self._cut_for(forms[index], pipeline.nodes, pipeline.num_microbatches)
                moved[index], placed[index] = self._place_again(forms[index], pipeline) or (cut[index], nodes[index])
        proposals = [(cut, nodes)] if _others(cut, forms) else []
        if placed != nodes:
            kept = [
                usual if chosen is not before else own
                for own, usual, chosen, before in zip(moved, forms, placed, nodes, strict=True)
            ]
            proposals += [(kept, placed), (moved, placed)]
        yield from proposals
        # After a loss the other pipelines keep their forms, so that no more layers move than necessary.
        if not self._living.is_whole:
            return
        for own, chosen in proposals or [(cut, nodes)]:
            known: dict[int, Form] = {}
            all_cut = list(own)
            for index, (form, pipeline) in enumerate(zip(own, plan.pipelines, strict=True)):
                if self._slow.isdisjoint(pipeline.nodes):
                    if id(form) not in known:
                        # It was cut for nodes that are slow no longer, or for another share of the batch.
                        usual = self._catalog.usual_if_faster(form, self._total, pipeline.num_microbatches)
                        known[id(form)] = usual
                    all_cut[index] = known[id(form)]
            if _others(all_cut, own):
                yield all_cut, chosen

    def _cut_for(self, form: Form, nodes: Sequence[str], num_microbatches: int) -> Form:
        speeds = [self._living.speeds.get(node, 1.0) for node in nodes]
        holdings = [self._living.holdings[node] for node in nodes]
        return self._catalog.cut_for(form, speeds, holdings, num_microbatches)

    def _place_again(self, form: Form, pipeline: Pipeline) -> tuple[Form, tuple[str, ...]] | None:
        """Return a pipeline with its nodes in the best order, and cut for that; None where they are in that order."""
        living, nodes = self._living, pipeline.nodes
        speeds = [living.speeds.get(node, 1.0) for node in nodes]
        order = self._catalog.order_for(form, speeds, pipeline.num_microbatches)
        if order is None:
            return None
        placed = [nodes[place] for place in order]
        cut = self._cut_for(form, placed, pipeline.num_microbatches)
        # Nodes of one kind and speed are interchangeable, so each goes where it has to receive least.
        needed = self._catalog.needed(cut.template)
        alike: dict[tuple[int, float], list[int]] = {}
        for index, place in enumerate(order):
            alike.setdefault((form.kinds[index], speeds[place]), []).append(index)
        for places in alike.values():
            positions = [Position(needed=needed[index], origin=-1) for index in places]
            held = {placed[index]: living.holdings[placed[index]] for index in places}
            chosen = match_nodes(positions, held, living.origins, self._catalog.costs.layer_bytes)
            for index, node in zip(places, chosen, strict=True):
                placed[index] = node
        return cut, tuple(placed)

    def _weigh(
        self,
        move: Move,
        forms: Sequence[Form],
        nodes: Sequence[Sequence[str]],
        *,
        usual: Sequence[Form] = (),
        usual_nodes: Sequence[Sequence[str]] = (),
        num_microbatches: Sequence[int] | None = None,
    ) -> _Outcome:
        """Weigh a move; its wording compares with `usual` and `usual_nodes`, before some were cut and placed again."""
        living, catalog = self._living, self._catalog
        others = _others(forms, usual)
        moved = [i for i, (own, before) in enumerate(zip(nodes, usual_nodes, strict=False)) if own != before]
        holdings, used = living.holdings, frozenset(chain.from_iterable(nodes))
        unused = (*living.free, *sorted(living.origins.keys() - used), *living.resting)
        idle = tuple(node for node in unused if node not in used)
        # After a loss, training should not wait for layers whose move makes a step only a little shorter.
        still_fast = 1.0 if living.is_whole else STILL_FAST
        pipelines = list(zip(forms, nodes, strict=True))
        plan, step_s = catalog.build_plan(
            pipelines,
            idle,
            living.speeds,
            before=living.plan,
            still_fast=still_fast,
            num_microbatches=num_microbatches,
        )
        arrivals = tuple(
            (node, needed)
            for (origin, _), form, chosen in zip(move.pipelines, forms, nodes, strict=True)
            if not self._placing.stays_whole(origin, form, chosen)
            for node, needed in zip(chosen, catalog.needed(form.template), strict=True)
            if holdings[node] != needed
        )
        transition_s = living.transition_s(catalog.costs.network, catalog.costs.layer_bytes, arrivals)
        # The seconds of a step if the time until the next change pays for one transition.
        weighed_s = step_s * (1 + transition_s / self._horizon_s)
        return _Outcome(
            move=move,
            action=move.action,
            detail=detail_of(move.detail, others, moved),
            plan=plan,
            step_s=step_s,
            transition_s=transition_s,
            score=(self._astray(len(forms)), self._placing.lacking(forms, nodes), weighed_s),
            arrivals=arrivals,
            forms=forms,
            usual=usual or forms,
            usual_nodes=usual_nodes or nodes,
        )


def _beats(score: _Score, other: _Score) -> bool:
    return score < (*other[:2], other[2] * (1 - _TOLERANCE))


def _others(forms: Sequence[Form], before: Sequence[Form]) -> list[int]:
    pairs = enumerate(zip(forms, before, strict=False))
    return [index for index, (own, usual) in pairs if own is not usual]
