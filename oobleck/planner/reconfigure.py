"""Reconfiguration: a plan and what happened to its nodes in, the plan that serves best from there on out.

Each move (see `moves`) is weighed by `step_s * (1 + transition_s / horizon_s)`: the seconds a step costs when a
time of `horizon_s` until the next change pays for one transition. More pipelines than asked for, or fewer, come
before that: redundancy is not for sale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from oobleck.errors import PlanningError

from .batches import deal_microbatches
from .catalog import Catalog
from .decision import Decision
from .matching import Holding, Position, match_nodes, missing_bytes
from .moves import Move, Situation, all_moves
from .plan import ExecutionPlan, Pipeline, PipelineTemplate, Place
from .sizes import reduction_s, sizing_of
from .transfers import holders_of, plan_transfers

__all__ = ["build_plan", "reconfigure"]

_NOTHING: frozenset[int] = frozenset()
_SLOW_VARIANTS = 3
"""Leaving out the slowest nodes is tried for this many lowest speeds."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """A move carried out on paper."""

    move: Move
    plan: ExecutionPlan
    step_s: float
    score: tuple[int, float]
    idle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What is left after the losses."""

    plan: ExecutionPlan
    free: tuple[str, ...]
    """Spares and joined nodes."""
    living: frozenset[str]
    origins: Mapping[str, int]
    holdings: Mapping[str, Holding]
    num_holders: tuple[int, ...]
    speeds: Mapping[str, float]


def build_plan(
    catalog: Catalog,
    pipelines: Sequence[tuple[int, Sequence[str]]],
    spares: Sequence[str],
    speeds: Mapping[str, float],
) -> tuple[ExecutionPlan, float]:
    """Return the plan of pipelines given as (size, nodes), batches dealt for their speeds, and its step's seconds."""
    costs = catalog.costs
    timings = []
    for size, nodes in pipelines:
        factors = [speeds.get(node, 1.0) for node in nodes]
        nominal = all(factor == 1.0 for factor in factors)
        timings.append(catalog.options(size)[size].timing if nominal else costs.timing(catalog.template(size), factors))
    counts = deal_microbatches(timings, catalog.settings.num_microbatches)
    slowest_s = max(timing.step_s(count) for timing, count in zip(timings, counts, strict=True))
    reduced_bytes = max(catalog.options(size)[size].reduced_bytes for size, _ in pipelines)
    plan = ExecutionPlan(
        pipelines=tuple(
            Pipeline(template=catalog.template(size), nodes=tuple(nodes), num_microbatches=count)
            for (size, nodes), count in zip(pipelines, counts, strict=True)
        ),
        spares=tuple(spares),
    )
    return plan, slowest_s + reduction_s(catalog.profile.network, reduced_bytes, len(pipelines))


def reconfigure(
    catalog: Catalog,
    plan: ExecutionPlan,
    *,
    lost: Collection[str],
    joined: Collection[str],
    speeds: Mapping[str, float],
    held: Mapping[Place, frozenset[int]] | None,
) -> Decision:
    """Decide; see `Planner.reconfigure`."""
    world = _look(catalog, plan, lost, joined, speeds, held)
    best: _Outcome | None = None
    for set_aside in _variants(world):
        situation = _situation(catalog, world, set_aside)
        if situation is None:
            continue
        for move in all_moves(situation, partial(_choose, catalog, situation)):
            best = _better(catalog, world, set_aside, move, best)
    if best is None:
        catalog.num_pipelines(len(world.living))
        raise PlanningError(f"no plan for {len(world.living)} nodes")
    living_held = {
        Place(node=node, device=device): layers
        for node, holding in world.holdings.items()
        for device, layers in enumerate(holding)
    }
    transfers = plan_transfers(best.plan, living_held, catalog.layer_bytes, max_sources=catalog.settings.max_sources)
    return Decision(
        plan=best.plan,
        action=best.move.action,
        reason=_reason(world, lost, joined, best, len({transfer.layer for transfer in transfers})),
        transfers=transfers,
        predicted_step_s=best.step_s,
        redundant=len(best.plan.pipelines) > catalog.settings.fault_threshold,
    )


def _look(
    catalog: Catalog,
    plan: ExecutionPlan,
    lost: Collection[str],
    joined: Collection[str],
    speeds: Mapping[str, float],
    held: Mapping[Place, frozenset[int]] | None,
) -> _World:
    gone = frozenset(lost)
    arrived = [node for node in sorted(set(joined)) if node not in plan.nodes or node in gone]
    spares = [node for node in plan.spares if node not in gone and node not in arrived]
    free = (*spares, *arrived)
    origins = {
        node: index for index, pipeline in enumerate(plan.pipelines) for node in pipeline.nodes if node not in gone
    }
    living = frozenset(origins) | frozenset(free)
    if held is None:
        held = {
            place: frozenset(stage.layers)
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for place in stage.places
        }
    per_node: dict[str, dict[int, frozenset[int]]] = defaultdict(dict)
    for place, layers in held.items():
        if place.node in living and place.node not in gone:
            per_node[place.node][place.device] = layers
    holdings = {
        node: tuple(
            per_node[node].get(device, _NOTHING)
            for device in range(max(catalog.settings.devices_per_node, *(d + 1 for d in per_node[node]), 0))
        )
        for node in (*origins, *free)
    }
    holders = holders_of(
        {
            Place(node=node, device=device): layers
            for node, holding in holdings.items()
            for device, layers in enumerate(holding)
        },
        catalog.costs.num_layers,
    )
    return _World(
        plan=plan,
        free=free,
        living=living,
        origins=origins,
        holdings=holdings,
        num_holders=tuple(map(len, holders)),
        speeds=speeds,
    )


def _variants(world: _World) -> list[frozenset[str]]:
    """Return the sets of slow nodes to try without: none, then those up to each of the lowest speeds."""
    slow = sorted({world.speeds.get(node, 1.0) for node in world.living} - {1.0})
    limits = [0.0, *(speed for speed in slow if speed < 1.0)][: _SLOW_VARIANTS + 1]
    return [frozenset(node for node in world.living if world.speeds.get(node, 1.0) <= limit) for limit in limits]


def _situation(catalog: Catalog, world: _World, set_aside: frozenset[str]) -> Situation | None:
    alive = tuple(
        sum(node in world.living and node not in set_aside for node in pipeline.nodes)
        for pipeline in world.plan.pipelines
    )
    num_free = sum(node not in set_aside for node in world.free)
    sizes = tuple(catalog.options(sum(alive) + num_free))
    if not sizes:
        return None
    before = tuple(len(pipeline.nodes) for pipeline in world.plan.pipelines)
    return Situation(before=before, alive=alive, num_free=num_free, sizes=sizes)


def _choose(catalog: Catalog, situation: Situation, num_nodes: int, share: int | None) -> tuple[int, ...]:
    num_microbatches = catalog.settings.num_microbatches
    if share is None:
        fewest, most = catalog.num_pipelines(num_nodes)
        return catalog.choose(num_nodes, num_microbatches, fewest, most).sizes
    smallest = situation.sizes[0]
    num_microbatches = max(1, round(num_microbatches * share / situation.num_nodes))
    most = min(num_nodes // smallest, num_microbatches)
    if catalog.settings.num_pipelines is not None:
        whole = sum(alive == before for alive, before in zip(situation.alive, situation.before, strict=True))
        most = min(most, catalog.settings.num_pipelines - whole)
    if most < 1:
        return ()
    fewest = most if catalog.settings.num_pipelines is not None else 1
    return catalog.choose(num_nodes, num_microbatches, fewest, most).sizes


def _better(
    catalog: Catalog, world: _World, set_aside: frozenset[str], move: Move, best: _Outcome | None
) -> _Outcome | None:
    """Return the move's outcome if it beats `best`, else `best`."""
    num_microbatches = catalog.settings.num_microbatches
    if len(move.pipelines) > num_microbatches:
        return best
    fewest, most = catalog.num_pipelines(len(world.living))
    number = len(move.pipelines)
    shortfall = max(fewest - number, number - most if catalog.settings.num_pipelines is not None else 0, 0)
    quickest = max([1.0, *world.speeds.values()])
    nominal_s = sizing_of(catalog.options(move.sizes[0]), move.sizes, num_microbatches, catalog.profile.network).step_s
    if best is not None and (shortfall, nominal_s / quickest) >= _just_below(best.score):
        return best
    outcome = _carry_out(catalog, world, set_aside, move, shortfall)
    return outcome if best is None or outcome.score < _just_below(best.score) else best


def _just_below(score: tuple[int, float]) -> tuple[int, float]:
    return score[0], score[1] * (1 - _TOLERANCE)


def _carry_out(catalog: Catalog, world: _World, set_aside: frozenset[str], move: Move, shortfall: int) -> _Outcome:
    needed = {size: _needed(catalog, catalog.template(size)) for size in set(move.sizes)}
    positions = [Position(needed=holding, origin=origin) for origin, size in move.pipelines for holding in needed[size]]
    usable = {node: holding for node, holding in world.holdings.items() if node not in set_aside}
    chosen = match_nodes(positions, usable, world.origins, catalog.layer_bytes)
    pipelines: list[tuple[int, tuple[str, ...]]] = []
    start = 0
    for _, size in move.pipelines:
        pipelines.append((size, chosen[start : start + size]))
        start += size
    used = set(chosen)
    idle = tuple(node for node in (*world.free, *sorted(world.origins)) if node not in used)
    plan, step_s = build_plan(catalog, pipelines, idle, world.speeds)
    transition_s = _transition_s(catalog, world, positions, chosen)
    horizon_s = catalog.settings.mean_time_to_failure_s
    return _Outcome(
        move=move, plan=plan, step_s=step_s, score=(shortfall, step_s * (1 + transition_s / horizon_s)), idle=idle
    )


def _needed(catalog: Catalog, template: PipelineTemplate) -> list[Holding]:
    """Return what each node of a template has to hold, by device."""
    nodes = [[_NOTHING] * catalog.settings.devices_per_node for _ in range(template.num_nodes)]
    for stage in template.stages:
        for device in range(stage.first_device, stage.first_device + stage.num_devices):
            nodes[stage.node_index][device] = frozenset(stage.layers)
    return [tuple(node) for node in nodes]


def _transition_s(catalog: Catalog, world: _World, positions: Sequence[Position], chosen: Sequence[str]) -> float:
    """Return the seconds of all transfers: the busiest link's, in or out, with reads spread over all holders."""
    network = catalog.profile.network
    busiest = 0
    sent = np.zeros(catalog.costs.num_layers)
    for position, node in zip(positions, chosen, strict=True):
        held = world.holdings[node]
        if position.needed == held:
            continue
        busiest = max(busiest, missing_bytes(position.needed, held, catalog.layer_bytes))
        for device, layers in enumerate(position.needed):
            for layer in layers - held[device]:
                sent[layer] += catalog.layer_bytes[layer] / world.num_holders[layer]
    if not sent.any():
        return 0.0
    busiest_out = max(
        sum(float(sent[layer]) for layers in set(holding) for layer in sorted(layers))
        for holding in set(world.holdings.values())
    )
    return network.inter_node_latency_s + max(busiest, busiest_out) / network.inter_node_bytes_per_s


def _reason(
    world: _World, lost: Collection[str], joined: Collection[str], best: _Outcome, num_layers_moved: int
) -> str:
    happened = []
    if lost:
        happened.append(f"{_names(lost)} lost")
    if joined:
        happened.append(f"{_names(joined)} joined")
    slow = sorted(node for node, speed in world.speeds.items() if speed < 1.0 and node in world.living)
    if slow:
        happened.append(f"{_names(slow)} slow")
    left_out = [node for node in slow if node in best.idle]
    parts = [", ".join(happened), best.move.detail]
    if left_out:
        parts.append(f"{_names(left_out)} left out")
    if num_layers_moved:
        parts.append(f"{num_layers_moved} layer{'s' if num_layers_moved != 1 else ''} to copy")
    return "; ".join(part for part in parts if part)


def _names(nodes: Collection[str]) -> str:
    ordered = sorted(nodes)
    return ", ".join(ordered) if len(ordered) <= 8 else f"{len(ordered)} nodes"
