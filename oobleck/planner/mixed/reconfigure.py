"""What follows a plan whose nodes are of several kinds.

The moves are fewer than for one kind: pipelines go on with spares of a lost node's kind, or with the nodes that they
have left; nodes outside whole pipelines form new ones; or all nodes are planned again. They are weighed as for one
kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan
from oobleck.planner import reconfiguration
from oobleck.planner.decision import Decision
from oobleck.planner.formatting import counted, listed

from .catalog import MixedCatalog
from .choice import Counts
from .cut_again import cut_again
from .kinds import MixedTemplate
from .situation import KindOf, Situation, count_kinds, look, sum_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """A proposal: the new pipelines, and the old one that each continues."""

    action: str
    pipelines: tuple[tuple[int | None, MixedTemplate], ...]
    detail: str
    """Completes the sentence of the decision."""


def reconfigure(
    catalog: MixedCatalog, kind_of: KindOf, plan: ExecutionPlan, changes: reconfiguration.Changes
) -> Decision:
    """Decide; see `MixedPlanner.reconfigure`."""
    living = reconfiguration.look_at(plan, changes, devices_per_node=catalog.most_devices)
    return reconfiguration.decision_of(_decide(catalog, kind_of, living), living, changes, catalog.settings)


def _decide(catalog: MixedCatalog, kind_of: KindOf, living: reconfiguration.LivingNodes) -> reconfiguration.Outcome:
    """Return the best outcome, of equal ones the gentlest. Raises PlanningError where no plan is possible."""
    number, exactly = catalog.num_pipelines(count_kinds(living.holdings, kind_of, catalog))
    best: reconfiguration.Outcome | None = None
    for set_aside in living.without_slowest():
        situation = look(catalog, kind_of, living, set_aside)
        for move in _moves(catalog, situation, number, exactly):
            if len(move.pipelines) > catalog.settings.num_microbatches:
                continue
            size = len(move.pipelines)
            astray = abs(size - number) if exactly else max(number - size, 0)
            nodes = _assign_nodes(catalog, kind_of, living, set_aside, move)
            templates = [mixed for _, mixed in move.pipelines]
            outcome = _weigh(catalog, living, move, templates, nodes, astray)
            if best is None or reconfiguration.beats(outcome.score, best.score):
                best = outcome
            for cut in cut_again(catalog, living, situation, templates, outcome.plan):
                outcome = _weigh(catalog, living, move, cut, nodes, astray)
                if reconfiguration.beats(outcome.score, best.score):
                    best = outcome
    if best is None:
        raise PlanningError("the nodes left cannot hold the model")
    return best


def _moves(catalog: MixedCatalog, situation: Situation, number: int, exactly: bool) -> Iterator[_Move]:
    """Yield the possible moves, the gentlest first."""
    if (move := _reinstantiate(catalog, situation)) is not None:
        yield move
    num_microbatches, total = catalog.settings.num_microbatches, situation.total
    everything = catalog.choose(situation.nodes, num_microbatches, number, exactly=exactly, total=total)
    if everything is None:
        everything = catalog.choose(situation.nodes, num_microbatches, 1, total=total)
    if everything is None:
        return
    whole = [index for index in range(len(situation.before)) if situation.is_whole(index)]
    pool = sum_counts([situation.free, *(each for i, each in enumerate(situation.alive) if i not in whole)])
    if whole and any(pool):
        taken = sum(
            max(0, int((everything.slowest_s - timing.first_s) / timing.next_s) + 1)
            for timing in (catalog.timing(situation.before[index]) for index in whole)
        )
        fewest = max(1, number - len(whole))
        if not (exactly and number <= len(whole)):
            share = max(fewest, num_microbatches - taken)
            own = catalog.choose(pool, share, fewest, exactly=exactly, total=total)
            if own is not None:
                kept = [(index, situation.before[index]) for index in whole]
                formed = _place(catalog, situation, own.pipelines, kept=whole)
                is_broken = len(whole) < len(situation.before)
                yield _Move(
                    action="rebuild" if is_broken else "absorb",
                    pipelines=tuple(sorted([*kept, *formed], key=_by_origin)),
                    detail=f"the other nodes form {counted(len(formed), 'pipeline')}",
                )
    placed = _place(catalog, situation, everything.pipelines, kept=())
    detail = f"all nodes are planned again: {counted(len(placed), 'pipeline')}"
    yield _Move(action="rebuild", pipelines=tuple(sorted(placed, key=_by_origin)), detail=detail)


def _reinstantiate(catalog: MixedCatalog, situation: Situation) -> _Move | None:
    """Let every pipeline continue with spares of the kinds that it lost, or with what it has left."""
    free = situation.free
    pipelines: list[tuple[int | None, MixedTemplate]] = []
    shrunk, filled = [], False
    for index, before in enumerate(situation.before):
        counts, wanted = situation.alive[index], situation.counts(before)
        if not any(counts):
            shrunk.append(f"the other pipelines take the microbatches of pipeline {index}")
            continue
        taken = tuple(min(have, want - left) for have, want, left in zip(free, wanted, counts, strict=True))
        full = sum_counts([counts, taken])
        if full == wanted:
            free = tuple(have - used for have, used in zip(free, taken, strict=True))
            filled = filled or any(taken)
            pipelines.append((index, before))
            continue
        smaller = _best_within(catalog, full, situation.total, before)
        if smaller is None:
            return None
        free = tuple(have - used for have, used in zip(free, taken, strict=True))
        pipelines.append((index, smaller))
        shrunk.append(f"pipeline {index} continues with {counted(len(smaller.kinds), 'node')}")
    if not pipelines:
        return None
    detail = "spares take the empty places" if filled else reconfiguration.UNCHANGED
    return _Move(action="reinstantiate", pipelines=tuple(pipelines), detail=listed(shrunk) if shrunk else detail)


def _best_within(catalog: MixedCatalog, nodes: Counts, total: Counts, before: MixedTemplate) -> MixedTemplate | None:
    """Return the fastest pipeline of some of the nodes, for four microbatches for each stage of before."""
    num_microbatches = 4 * before.template.num_stages
    steps_s = {
        counts: timing.step_s(num_microbatches)
        for counts, timing in catalog.timings(total).items()
        if all(number <= limit for number, limit in zip(counts, nodes, strict=True))
    }
    if not steps_s:
        return None
    return catalog.template(min(steps_s, key=lambda counts: (steps_s[counts], counts)), total)


def _place(
    catalog: MixedCatalog, situation: Situation, pipelines: Sequence[Counts], *, kept: Collection[int]
) -> list[tuple[int | None, MixedTemplate]]:
    """Say which old pipeline each new one continues: one of the same nodes, whole ones first."""
    left = [index for index in range(len(situation.before)) if index not in kept and any(situation.alive[index])]
    left.sort(key=lambda index: (not situation.is_whole(index), index))
    placed: list[tuple[int | None, MixedTemplate]] = []
    for counts in pipelines:
        origin = next((index for index in left if situation.counts(situation.before[index]) == counts), None)
        if origin is None:
            placed.append((None, catalog.template(counts, situation.total)))
        else:
            left.remove(origin)
            placed.append((origin, situation.before[origin]))
    return placed


def _weigh(
    catalog: MixedCatalog,
    living: reconfiguration.LivingNodes,
    move: _Move,
    templates: Sequence[MixedTemplate],
    nodes: Sequence[Sequence[str]],
    astray: int,
) -> reconfiguration.Outcome:
    """Weigh a move whose pipelines have the given templates, its own or cut again, and nodes."""
    used = {node for each in nodes for node in each}
    unused = (*living.free, *sorted(living.origins.keys() - used), *living.resting)
    idle = [node for node in unused if node not in used]
    pipelines = list(zip(templates, nodes, strict=True))
    plan, step_s = catalog.build_plan(pipelines, idle, living.speeds)
    arrivals = tuple(
        (node, needed)
        for mixed, each in pipelines
        for node, needed in zip(each, catalog.needed(mixed.template), strict=True)
        if living.holdings[node] != needed
    )
    transition_s = living.transition_s(catalog.costs.network, catalog.layer_bytes, arrivals)
    weighed_s = step_s * (1 + transition_s / catalog.settings.mean_time_to_failure_s)
    changed = [
        index for index, (own, (_, before)) in enumerate(zip(templates, move.pipelines, strict=True)) if own != before
    ]
    return reconfiguration.Outcome(
        action=move.action,
        detail=reconfiguration.detail_of(move.detail, changed),
        plan=plan,
        step_s=step_s,
        score=(astray, weighed_s),
        arrivals=arrivals,
    )


def _assign_nodes(
    catalog: MixedCatalog, kind_of: KindOf, living: reconfiguration.LivingNodes, set_aside: frozenset[str], move: _Move
) -> list[list[str]]:
    """Return the nodes of each new pipeline: places are matched with nodes of their kind, for the fewest bytes."""
    places: dict[int, list[tuple[int, int]]] = {}
    positions: dict[int, list[reconfiguration.Position]] = {}
    for index, (origin, mixed) in enumerate(move.pipelines):
        for place, (kind, needed) in enumerate(zip(mixed.kinds, catalog.needed(mixed.template), strict=True)):
            places.setdefault(kind, []).append((index, place))
            positions.setdefault(kind, []).append(
                reconfiguration.Position(needed=needed, origin=-1 if origin is None else origin)
            )
    candidates = [node for node in (*living.origins, *living.free) if node not in set_aside]
    nodes = [[""] * len(mixed.kinds) for _, mixed in move.pipelines]
    for kind, wanted in sorted(positions.items()):
        own = {node: living.holdings[node] for node in candidates if kind_of(node) == kind}
        matched = reconfiguration.match_nodes(wanted, own, living.origins, catalog.layer_bytes)
        for (index, place), node in zip(places[kind], matched, strict=True):
            nodes[index][place] = node
    return nodes


def _by_origin(pipeline: tuple[int | None, MixedTemplate]) -> tuple[bool, int]:
    origin, _ = pipeline
    return origin is None, origin or 0
