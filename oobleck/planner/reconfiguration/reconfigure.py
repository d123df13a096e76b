"""Reconfiguration: a plan and what happened to its nodes in, the plan that serves best from there on out.

Each move (see `moves`) is weighed by `step_s * (1 + transition_s / horizon_s)`: the seconds that a step costs
when the time until the next change has to pay for one transition. The number of pipelines asked for comes before
that: redundancy is not for sale.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from oobleck.planner.catalog import Catalog
from oobleck.planner.decision import Decision
from oobleck.planner.formatting import counted, named
from oobleck.planner.instantiation import sizing_of
from oobleck.planner.inventory import Holding, missing_bytes
from oobleck.planner.plan import ExecutionPlan, WorkerId
from oobleck.planner.transfers import LayerTransfer, plan_transfers

from .gather import gather_slow_nodes
from .living_nodes import LivingNodes, look_at
from .matching import Position, match_nodes
from .moves import Move, Situation, all_moves, continue_pipelines, described

__all__ = ["reconfigure"]

_SLOW_VARIANTS = 3
"""Leaving out the slowest nodes is tried for this many lowest speeds."""
_MOST_COMPANY = 2
"""Slow nodes' own pipelines are tried with up to this many other nodes."""
_TOLERANCE = 1e-9
"""A move has to be better than a gentler one by more than this share."""

_Score = tuple[int, float]
"""Pipelines too few or too many, then the weighed seconds of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proposal:
    """A move, without the nodes that it sets aside."""

    move: Move
    set_aside: frozenset[str]
    least: _Score
    """No way to carry it out scores better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A move carried out on paper."""

    move: Move
    plan: ExecutionPlan
    step_s: float
    score: _Score
    arrivals: tuple[tuple[str, Holding], ...]
    """Nodes that have to receive layers, and what they have to hold."""


def reconfigure(
    catalog: Catalog,
    plan: ExecutionPlan,
    *,
    lost: Collection[str],
    joined: Collection[str],
    leaving: Collection[str],
    resting: Collection[str],
    speeds: Mapping[str, float],
    held: Mapping[WorkerId, frozenset[int]] | None,
) -> Decision:
    """Decide; see `Planner.reconfigure`."""
    living = look_at(
        plan,
        lost=lost,
        joined=joined,
        leaving=leaving,
        resting=resting,
        speeds=speeds,
        held=held,
        devices_per_node=catalog.settings.devices_per_node,
    )
    living.inventory.check_complete()
    best = _decide(catalog, living)
    transfers = plan_transfers(best.arrivals, living.inventory, max_sources=catalog.settings.max_sources)
    return Decision(
        plan=best.plan,
        action=best.move.action,
        reason=_reason(living, lost, joined, leaving, best, transfers),
        transfers=transfers,
        predicted_step_s=best.step_s,
        redundant=len(best.plan.pipelines) > catalog.settings.fault_threshold,
    )


def _decide(catalog: Catalog, living: LivingNodes) -> _Outcome:
    """Return the best outcome. Raises PlanningError where the nodes left cannot hold the model."""
    fewest, most = catalog.num_pipelines(living.num_nodes)
    proposals = [
        proposal for set_aside in _variants(living) for proposal in _proposals(catalog, living, set_aside, fewest, most)
    ]
    intact = _intact(catalog, living)
    best: _Outcome | None = None
    # Gentler moves come first among those of equal promise, and stay unless a later one is truly better.
    for proposal in sorted(proposals, key=lambda proposal: proposal.least):
        if best is None or _beats(proposal.least, best.score):
            outcome = _carry_out(catalog, living, intact, proposal)
            if best is None or _beats(outcome.score, best.score):
                best = outcome
    assert best is not None, "a rebuild with all nodes is possible"
    return best


def _beats(score: _Score, other: _Score) -> bool:
    return score < (other[0], other[1] * (1 - _TOLERANCE))


def _variants(living: LivingNodes) -> list[frozenset[str]]:
    """Return the sets of slow nodes to try without: none, then all up to each of the lowest speeds."""
    slow = sorted({living.speeds[node] for node in living.slow})
    limits = [0.0, *slow[:_SLOW_VARIANTS]]
    return [frozenset(node for node in living.speeds if living.speeds[node] <= limit) for limit in limits]


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


def _carry_out(catalog: Catalog, living: LivingNodes, intact: frozenset[int], proposal: _Proposal) -> _Outcome:
    nodes = _assign_nodes(catalog, living, intact, proposal)
    best = _weigh(catalog, living, intact, proposal, nodes)
    for gathered in gather_slow_nodes(
        nodes,
        [catalog.needed(size) for _, size in proposal.move.pipelines],
        living.slow,
        living.holdings,
        catalog.layer_bytes,
    ):
        outcome = _weigh(catalog, living, intact, proposal, gathered)
        if _beats(outcome.score, best.score):
            best = outcome
    return best


def _weigh(
    catalog: Catalog,
    living: LivingNodes,
    intact: frozenset[int],
    proposal: _Proposal,
    nodes: Sequence[Sequence[str]],
) -> _Outcome:
    """Weigh a move whose pipelines have the given nodes."""
    move = proposal.move
    pipelines = [(size, chosen) for (_, size), chosen in zip(move.pipelines, nodes, strict=True)]
    holdings, used = living.holdings, frozenset(chain.from_iterable(nodes))
    unused = (*living.free, *sorted(living.origins.keys() - used), *living.resting)
    idle = tuple(node for node in unused if node not in used)
    plan, step_s = catalog.build_plan(pipelines, idle, living.speeds, before=living.plan)
    arrivals = tuple(
        (node, needed)
        for (origin, size), chosen in zip(move.pipelines, nodes, strict=True)
        if origin not in intact or chosen is not living.plan.pipelines[origin].nodes
        for node, needed in zip(chosen, catalog.needed(size), strict=True)
        if holdings[node] != needed
    )
    transition_s = _transition_s(catalog, living, arrivals)
    weighed_s = step_s * (1 + transition_s / catalog.settings.mean_time_to_failure_s)
    return _Outcome(move=move, plan=plan, step_s=step_s, score=(proposal.least[0], weighed_s), arrivals=arrivals)


def _assign_nodes(
    catalog: Catalog, living: LivingNodes, intact: frozenset[int], proposal: _Proposal
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
        for (origin, size), chosen in zip(proposal.move.pipelines, nodes, strict=True)
        if chosen is None
        for needed in catalog.needed(size)
    ]
    matched = iter(match_nodes(positions, candidates, living.origins, catalog.layer_bytes))
    return [
        tuple(next(matched) for _ in range(size)) if chosen is None else chosen
        for (_, size), chosen in zip(proposal.move.pipelines, nodes, strict=True)
    ]


def _intact(catalog: Catalog, living: LivingNodes) -> frozenset[int]:
    """Return the old pipelines that are as their template wants them: all alive, and holding what they need."""
    sizes, origins, holdings = catalog.options(living.num_nodes), living.origins, living.holdings
    return frozenset(
        index
        for index, pipeline in enumerate(living.plan.pipelines)
        if len(pipeline.nodes) in sizes
        and all(map(origins.__contains__, pipeline.nodes))
        and tuple(map(holdings.get, pipeline.nodes)) == catalog.needed(len(pipeline.nodes))
    )


def _transition_s(catalog: Catalog, living: LivingNodes, arrivals: Sequence[tuple[str, Holding]]) -> float:
    """Return the seconds of all transfers: the busiest link's, in or out, with reads spread over all holders."""
    if not arrivals:
        return 0.0
    network, layer_bytes = catalog.profile.network, catalog.layer_bytes
    busiest = 0.0
    sent = [0.0] * len(layer_bytes)
    for node, needed in arrivals:
        held = living.holdings[node]
        busiest = max(busiest, missing_bytes(needed, held, layer_bytes))
        for device, layers in enumerate(needed):
            for layer in layers - held[device]:
                sent[layer] += layer_bytes[layer] / living.inventory.num_holders[layer]
    for holding in living.inventory.kinds:
        busiest = max(busiest, math.fsum(sent[layer] for layers in holding for layer in sorted(layers)))
    return network.inter_node_latency_s + busiest / network.inter_node_bytes_per_s


def _reason(
    living: LivingNodes,
    lost: Collection[str],
    joined: Collection[str],
    leaving: Collection[str],
    best: _Outcome,
    transfers: Sequence[LayerTransfer],
) -> str:
    slow = sorted(living.slow)
    back = set(lost) & set(joined)
    rested = {node for node in living.resting if node in living.plan.nodes}
    events = (
        (set(lost) - back, "lost"),
        (set(joined) - back, "joined"),
        (back, "started again"),
        (set(leaving), "leaving"),
        (rested, "set aside"),
        (set(slow), "slow"),
    )
    happened = [f"{named(nodes)} {verb}" for nodes, verb in events if nodes]
    parts = [", ".join(happened), best.move.detail]
    if number := _fewer_microbatches(living.plan, best.plan):
        parts.append(f"{counted(number, 'pipeline')} {'takes' if number == 1 else 'take'} fewer microbatches")
    if left_out := [node for node in slow if node in best.plan.spares]:
        parts.append(f"{named(left_out)} left out")
    if number := len({transfer.layer for transfer in transfers}):
        parts.append(f"{counted(number, 'layer')} to copy")
    return "; ".join(part for part in parts if part)


def _fewer_microbatches(before: ExecutionPlan, after: ExecutionPlan) -> int:
    """Return how many pipelines take fewer microbatches than before, where the pipelines are the same."""
    if [pipeline.nodes for pipeline in before.pipelines] != [pipeline.nodes for pipeline in after.pipelines]:
        return 0
    return sum(
        now.num_microbatches < then.num_microbatches
        for then, now in zip(before.pipelines, after.pipelines, strict=True)
    )
