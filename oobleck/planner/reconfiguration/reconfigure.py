"""Reconfiguration: a plan and what happened to its nodes in, the plan that serves best from there on out.

Each move (see `moves`) is weighed by `step_s * (1 + transition_s / horizon_s)`: the seconds that a step costs
when the time until the next change has to pay for one transition. The number of pipelines asked for comes before
that: redundancy is not for sale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from oobleck.plan import ExecutionPlan, PipelineTemplate
from oobleck.planner.catalog import STILL_FAST, Catalog
from oobleck.planner.decision import Decision
from oobleck.planner.instantiation import sizing_of

from .changes import Changes
from .cut_again import cut_again
from .gather import gather_slow_nodes
from .living_nodes import LivingNodes, look_at
from .matching import Position, match_nodes
from .moves import Move, Situation, all_moves, continue_pipelines, described
from .outcome import Outcome, Score, beats, decision_of
from .wording import detail_of

_MOST_COMPANY = 2
"""Slow nodes' own pipelines are tried with up to this many other nodes."""
_WORTH = 0.01
"""Where nodes are lost, pipelines that lost none are changed if that makes steps shorter by more than this share.

All wait for it, and predictions are hardly better than that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """A move, without the nodes that it sets aside."""

    move: Move
    set_aside: frozenset[str]
    least: Score
    """No way to carry it out scores better."""


def reconfigure(catalog: Catalog, plan: ExecutionPlan, changes: Changes) -> Decision:
    """Decide; see `Planner.reconfigure`."""
    living = look_at(plan, changes, devices_per_node=catalog.settings.devices_per_node)
    best = _decide(catalog, living)
    step_s = catalog.predicted_step_s(best.plan, best.step_s, living.speeds)
    return decision_of(replace(best, step_s=step_s), living, changes, catalog.settings)


def _decide(catalog: Catalog, living: LivingNodes) -> Outcome:
    """Return the best outcome. Raises PlanningError where the nodes left cannot hold the model."""
    fewest, most = catalog.num_pipelines(living.num_nodes)
    proposals = [
        proposal
        for set_aside in living.without_slowest()
        for proposal in _proposals(catalog, living, set_aside, fewest, most)
    ]
    continued = _continued(catalog, living)
    intact = _intact(catalog, living, continued)

    def carried_out(proposal: _Proposal) -> Outcome:
        templates = _templates(catalog, continued, proposal.move, living.num_nodes)
        return _carry_out(catalog, living, intact, proposal, templates)

    best: Outcome | None = None
    # Gentler moves come first among those of equal promise, and stay unless a later one is truly better.
    for proposal in sorted(proposals, key=lambda proposal: proposal.least):
        if best is None or beats(proposal.least, best.score):
            outcome = carried_out(proposal)
            if best is None or beats(outcome.score, best.score):
                best, chosen = outcome, proposal
    assert best is not None, "a rebuild with all nodes is possible"
    if living.is_whole:
        return best
    astray, weighed_s = best.score
    enough = astray, weighed_s * (1 + _WORTH)
    for gentler in proposals[: proposals.index(chosen)]:
        if gentler.least <= enough and len(gentler.move.pipelines) == len(chosen.move.pipelines):
            outcome = carried_out(gentler)
            if outcome.score <= enough and _num_kept(living, outcome) > _num_kept(living, best):
                return outcome
    return best


def _num_kept(living: LivingNodes, outcome: Outcome) -> int:
    """Return how many of the old pipelines are as they were."""
    before, after = (
        {(pipeline.nodes, pipeline.template.stages) for pipeline in plan.pipelines}
        for plan in (living.plan, outcome.plan)
    )
    return len(before & after)


def _proposals(
    catalog: Catalog, living: LivingNodes, set_aside: frozenset[str], fewest: int, most: int
) -> Iterator[_Proposal]:
    """Yield the moves without some nodes, when `fewest` to `most` pipelines are wanted."""
    alive = Counter(living.origins.values())
    alive.subtract(living.origins[node] for node in set_aside if node in living.origins)
    num_free = sum(node not in set_aside for node in living.free)
    situation = Situation(
        before=tuple(len(pipeline.nodes) for pipeline in living.plan.pipelines),
        alive=tuple(alive[index] for index in range(len(living.plan.pipelines))),
        num_free=num_free,
        sizes=tuple(catalog.options(alive.total() + num_free)),
    )
    if not situation.sizes:
        return
    num_microbatches = catalog.settings.num_microbatches
    quickest = max([1.0, *living.speeds.values()])
    moves = all_moves(situation, partial(_choose, catalog, situation))
    for move in [*moves, *_separate(catalog, living, situation, set_aside)]:
        number = len(move.pipelines)
        if number > num_microbatches:
            continue
        astray = max(fewest - number, number - most if catalog.settings.num_pipelines is not None else 0, 0)
        nominal = sizing_of(catalog.options(living.num_nodes), move.sizes, num_microbatches, catalog.profile.network)
        yield _Proposal(move=move, set_aside=set_aside, least=(astray, nominal.step_s / quickest))


def _separate(catalog: Catalog, living: LivingNodes, situation: Situation, set_aside: frozenset[str]) -> Iterator[Move]:
    """Yield moves that give slow nodes pipelines of their own, with none or a few of the other nodes."""
    slow = [living.speeds[node] for node in sorted(living.slow - set_aside)]
    if not slow:
        return
    fewest, most = catalog.num_pipelines(situation.num_nodes)
    total, smallest = catalog.settings.num_microbatches, situation.sizes[0]
    least = max(len(slow), smallest)
    for number in range(least, min(least + _MOST_COMPANY, situation.num_nodes - smallest) + 1):
        rest = situation.num_nodes - number
        # Nodes that wait for the slowest of them are as slow.
        share = max(1, round(total * number * min(slow) / (number * min(slow) + rest)))
        most_apart = min(most - 1, number // smallest, share)
        if most_apart < 1 or share == total:
            continue
        apart = catalog.choose(number, share, 1, most_apart).sizes
        most_others = min(most - len(apart), rest // smallest, total - share)
        fewest_others = max(1, min(fewest - len(apart), most_others))
        others = catalog.choose(rest, total - share, fewest_others, most_others).sizes
        placed = continue_pipelines((*others, *apart), situation, among=range(len(situation.before)))
        yield Move(action="rebuild", pipelines=placed, detail=f"slow nodes form {described(apart)}")


def _choose(catalog: Catalog, situation: Situation, num_nodes: int, num_kept: int) -> tuple[int, ...]:
    """Return the best sizes for some of the nodes, when `num_kept` pipelines of the others stay as they are."""
    wanted = catalog.settings.num_pipelines
    num_microbatches = catalog.settings.num_microbatches
    fewest, most = catalog.num_pipelines(situation.num_nodes)
    if num_kept:
        num_microbatches = max(1, round(num_microbatches * num_nodes / situation.num_nodes))
        most = min(most - num_kept, num_nodes // situation.sizes[0], num_microbatches)
        fewest = most if wanted is not None else max(1, min(fewest - num_kept, most))
    return catalog.choose(num_nodes, num_microbatches, fewest, most).sizes if most >= 1 else ()


def _continued(catalog: Catalog, living: LivingNodes) -> dict[int, PipelineTemplate]:
    """Return the template with which each old pipeline goes on, if it goes on with as many nodes."""
    sizes = catalog.options(living.num_nodes)
    known: dict[tuple[int, tuple[float, ...]], PipelineTemplate] = {}
    found: dict[int, PipelineTemplate] = {}
    for index, pipeline in enumerate(living.plan.pipelines):
        template = pipeline.template
        if template.num_nodes not in sizes:
            continue
        is_slowed = not living.slow.isdisjoint(pipeline.nodes)
        speeds = tuple(living.speeds.get(node, 1.0) for node in pipeline.nodes) if is_slowed else ()
        key = id(template), speeds
        if key not in known:
            known[key] = catalog.continued(template, living.num_nodes, speeds or None)
        found[index] = known[key]
    return found


def _templates(
    catalog: Catalog, continued: Mapping[int, PipelineTemplate], move: Move, num_nodes: int
) -> list[PipelineTemplate]:
    """Return the template of each pipeline of a move."""
    templates = []
    for origin, size in move.pipelines:
        own = None if origin is None else continued.get(origin)
        templates.append(own if own is not None and own.num_nodes == size else catalog.template_in(num_nodes, size))
    return templates


def _carry_out(
    catalog: Catalog,
    living: LivingNodes,
    intact: frozenset[int],
    proposal: _Proposal,
    templates: Sequence[PipelineTemplate],
) -> Outcome:
    nodes = _assign_nodes(catalog, living, intact, proposal, templates)
    gathered = gather_slow_nodes(
        nodes,
        [catalog.needed(template) for template in templates],
        living.slow,
        living.holdings,
        catalog.layer_bytes,
    )
    best: Outcome | None = None
    for grouped in chain([nodes], gathered):
        outcome = _weigh(catalog, living, intact, proposal, templates, grouped)
        if best is None or beats(outcome.score, best.score):
            best = outcome
        for cut in cut_again(catalog, living, templates, outcome.plan):
            outcome = _weigh(catalog, living, intact, proposal, cut, grouped, usual=templates)
            if beats(outcome.score, best.score):
                best = outcome
    assert best is not None, "the nodes as they are assigned are weighed first"
    return best


def _weigh(
    catalog: Catalog,
    living: LivingNodes,
    intact: frozenset[int],
    proposal: _Proposal,
    templates: Sequence[PipelineTemplate],
    nodes: Sequence[Sequence[str]],
    *,
    usual: Sequence[PipelineTemplate] = (),
) -> Outcome:
    """Weigh a move whose pipelines have the given templates and nodes; `usual` are those before some were cut again."""
    move = proposal.move
    others = [index for index, (own, before) in enumerate(zip(templates, usual, strict=False)) if own is not before]
    pipelines = list(zip(templates, nodes, strict=True))
    holdings, used = living.holdings, frozenset(chain.from_iterable(nodes))
    unused = (*living.free, *sorted(living.origins.keys() - used), *living.resting)
    idle = tuple(node for node in unused if node not in used)
    # Where nodes are lost, others are not to wait for layers to move that make a step shorter by little.
    still_fast = 1.0 if living.is_whole else STILL_FAST
    plan, step_s = catalog.build_plan(pipelines, idle, living.speeds, before=living.plan, still_fast=still_fast)
    arrivals = tuple(
        (node, needed)
        for index, ((origin, _), template, chosen) in enumerate(zip(move.pipelines, templates, nodes, strict=True))
        if origin not in intact or chosen is not living.plan.pipelines[origin].nodes or index in others
        for node, needed in zip(chosen, catalog.needed(template), strict=True)
        if holdings[node] != needed
    )
    transition_s = living.transition_s(catalog.profile.network, catalog.layer_bytes, arrivals)
    weighed_s = step_s * (1 + transition_s / catalog.settings.mean_time_to_failure_s)
    return Outcome(
        action=move.action,
        detail=detail_of(move.detail, others),
        plan=plan,
        step_s=step_s,
        score=(proposal.least[0], weighed_s),
        arrivals=arrivals,
    )


def _assign_nodes(
    catalog: Catalog,
    living: LivingNodes,
    intact: frozenset[int],
    proposal: _Proposal,
    templates: Sequence[PipelineTemplate],
) -> list[tuple[str, ...]]:
    """Return the nodes of each new pipeline. Pipelines that continue whole keep theirs, as exact pairs may."""
    pipelines = living.plan.pipelines
    nodes: list[tuple[str, ...] | None] = []
    kept: set[int] = set()
    for origin, size in proposal.move.pipelines:
        old = pipelines[origin].nodes if origin is not None and origin in intact else ()
        stays = len(old) == size and proposal.set_aside.isdisjoint(old)
        nodes.append(old if stays else None)
        if stays and origin is not None:
            kept.add(origin)
    others = (node for index, each in enumerate(pipelines) if index not in kept for node in each.nodes)
    free = (*filter(living.origins.__contains__, others), *living.free)
    candidates = {node: living.holdings[node] for node in free if node not in proposal.set_aside}
    positions = [
        Position(needed=needed, origin=-1 if origin is None else origin)
        for (origin, _), template, chosen in zip(proposal.move.pipelines, templates, nodes, strict=True)
        if chosen is None
        for needed in catalog.needed(template)
    ]
    matched = iter(match_nodes(positions, candidates, living.origins, catalog.layer_bytes))
    return [
        tuple(next(matched) for _ in range(size)) if chosen is None else chosen
        for (_, size), chosen in zip(proposal.move.pipelines, nodes, strict=True)
    ]


def _intact(catalog: Catalog, living: LivingNodes, continued: Mapping[int, PipelineTemplate]) -> frozenset[int]:
    """Return the old pipelines that are as their template wants them: all alive, and holding what they need."""
    origins, holdings = living.origins, living.holdings
    return frozenset(
        index
        for index, pipeline in enumerate(living.plan.pipelines)
        if index in continued
        and all(map(origins.__contains__, pipeline.nodes))
        and tuple(map(holdings.get, pipeline.nodes)) == catalog.needed(continued[index])
    )
