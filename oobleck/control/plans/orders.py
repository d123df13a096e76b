"""The order that each worker gets of a plan update, and the update that it rebuilds from its order.

    update_of(base, order) is the update, with the worker's own segments and transfers only

A worker needs the plan to find its peers, but it has the plan before. So an order has what changes, the same for all
workers with the same base, and little else. Its size depends on what changes, and not on the number of workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from oobleck.control import protocol
from oobleck.planner import ExecutionPlan, LayerTransfer, WorkerId

from .plan_delta import WrongBase, difference, nodes_of, places_of, rebuild


def orders_of(
    update: protocol.PlanUpdate,
    worker_ids: Iterable[WorkerId],
    *,
    bases: Mapping[WorkerId, protocol.PlanId],
    known: Mapping[int, protocol.OrderedPlan],
    in_force: ExecutionPlan | None,
    addresses: Iterable[tuple[int, protocol.WorkerAddress]] = (),
) -> Iterator[tuple[WorkerId, protocol.PlanOrder]]:
    """Yield the order of each worker.

    `bases` says which plan a worker has, if any; only those in `known`, by generation, can be used. `in_force` is the
    plan under which the step in flight is finished. `addresses` are where workers listen, with the generation in which
    each became ready. O(nodes) for each base, and O(1) for each worker.
    """
    ordered = update.ordered
    commons: dict[protocol.PlanId | None, protocol.CommonOrder] = {}
    transfers, segments = _by_worker(update.transfers), _by_pipeline(update.segments)
    places = places_of(ordered)
    for worker_id in worker_ids:
        said = bases.get(worker_id)
        base = None if said is None else known.get(said.generation)
        if base is not None and base.id != said:  # the worker has another plan of that generation: send the whole one
            base = None
        # One object serves all workers with the same base: the codec recognizes it by identity, and encodes it once.
        key = None if base is None else base.id
        if key not in commons:
            commons[key] = _common(update, ordered, base, addresses, places)
        located = None if in_force is None else in_force.locate(worker_id)
        yield (
            worker_id,
            protocol.PlanOrder(
                device=worker_id.device,
                generation=update.generation,
                common=commons[key],
                segments=() if located is None else tuple(segments.get(located[0], ())),
                transfers=_own(transfers.get(worker_id, ()), worker_id, places),
            ),
        )


def update_of(base: protocol.OrderedPlan | None, order: protocol.PlanOrder, worker_id: WorkerId) -> protocol.PlanUpdate:
    """Return the update that an order means to a worker with the plan `base`; O(nodes). Raises WrongBase."""
    common = order.common
    ordered = rebuild(base, common.delta, order.generation)
    nodes = nodes_of(ordered)
    try:
        lost = protocol.names_in(common.lost, nodes_of(None if common.delta.base is None else base))
        others_regrouped = _workers(common.others_regrouped, nodes)
        transfers = tuple(_transfers(order.transfers, worker_id, nodes))
    except ValueError as error:
        raise WrongBase(f"the order of generation {order.generation} names nodes that no plan has: {error}") from error
    return protocol.PlanUpdate(
        generation=order.generation,
        catch_up=common.catch_up,
        catch_up_section=common.catch_up_section,
        finish=common.finish,
        segments=order.segments,
        lost=lost,
        plan=ordered.plan,
        pipeline_generations=ordered.pipeline_generations,
        schedules=ordered.schedules,
        boundary=ordered.boundary,
        partial=ordered.partial,
        num_sections=ordered.num_sections,
        initial=common.initial,
        saves=common.saves,
        restore=common.restore,
        transfers=transfers,
        moving=tuple(protocol.numbers_in(common.moving)),
        regrouped=(
            *(ordered.plan.worker_ids[place] for place in protocol.numbers_in(common.regrouped)),
            *others_regrouped,
        ),
        assignment_version=common.assignment_version,
        sharding=common.sharding,
    )


def _common(
    update: protocol.PlanUpdate,
    ordered: protocol.OrderedPlan,
    base: protocol.OrderedPlan | None,
    addresses: Iterable[tuple[int, protocol.WorkerAddress]],
    places: Mapping[str, int],
) -> protocol.CommonOrder:
    # Regrouped workers without a part in the plan have no place in it, and are named by their nodes.
    worker_places = {worker_id: place for place, worker_id in enumerate(update.plan.worker_ids)}
    others = (worker_id for worker_id in update.regrouped if worker_id not in worker_places)
    return protocol.CommonOrder(
        catch_up=update.catch_up,
        catch_up_section=update.catch_up_section,
        finish=update.finish,
        lost=protocol.named(update.lost, places_of(base)),
        delta=difference(base, ordered),
        initial=update.initial,
        saves=update.saves,
        restore=update.restore,
        moving=protocol.runs_of(update.moving),
        regrouped=protocol.runs_of(
            sorted(worker_places[worker_id] for worker_id in update.regrouped if worker_id in worker_places)
        ),
        others_regrouped=_named(
            sorted(others, key=lambda each: (each.device, places.get(each.node, len(places)), each.node)), places
        ),
        assignment_version=update.assignment_version,
        sharding=update.sharding,
        # A worker that became ready in the base's generation was too late for the base's order, hence not `>`.
        addresses=tuple(address for since, address in addresses if base is None or since >= base.generation),
    )


def _by_worker(transfers: Iterable[LayerTransfer]) -> Mapping[WorkerId, list[LayerTransfer]]:
    found: defaultdict[WorkerId, list[LayerTransfer]] = defaultdict(list)
    for item in transfers:
        for worker_id in {item.source, item.target}:
            found[worker_id].append(item)
    return found


def _own(transfers: Sequence[LayerTransfer], worker_id: WorkerId, places: Mapping[str, int]) -> protocol.OwnTransfers:
    peers: dict[WorkerId, int] = {}
    items: list[tuple[int, int, int, int]] = []
    for item in transfers:
        is_sent = item.source == worker_id
        index = peers.setdefault(item.target if is_sent else item.source, len(peers))
        items.append((item.layer, -1 - index if is_sent else index, item.part, item.num_parts))
    return protocol.OwnTransfers(peers=_named(peers, places), items=tuple(items))


def _transfers(own: protocol.OwnTransfers, worker_id: WorkerId, nodes: Sequence[str]) -> Iterator[LayerTransfer]:
    peers = _workers(own.peers, nodes)
    for layer, index, part, num_parts in own.items:
        source, target = (worker_id, peers[-1 - index]) if index < 0 else (peers[index], worker_id)
        yield LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=num_parts)


def _named(worker_ids: Iterable[WorkerId], places: Mapping[str, int]) -> protocol.WorkerNames:
    return tuple(
        (device, protocol.named((worker_id.node for worker_id in alike), places))
        for device, alike in groupby(worker_ids, key=lambda worker_id: worker_id.device)
    )


def _workers(said: protocol.WorkerNames, nodes: Sequence[str]) -> tuple[WorkerId, ...]:
    return tuple(
        WorkerId(node=node, device=device) for device, names in said for node in protocol.names_in(names, nodes)
    )


def _by_pipeline(segments: Iterable[protocol.Segment]) -> Mapping[int, list[protocol.Segment]]:
    found: defaultdict[int, list[protocol.Segment]] = defaultdict(list)
    for segment in segments:
        found[segment.pipeline].append(segment)
    return found
