"""Which layers move where: every missing layer is read from its living holders, evenly."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.errors import Unrecoverable

from .plan import ExecutionPlan, Place

__all__ = ["LayerTransfer", "holders_of", "plan_transfers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTransfer:
    """Part `part` of `num_parts` of a layer's flat state goes from `source` to `target`."""

    layer: int
    source: Place
    target: Place
    part: int = 0
    num_parts: int = 1


def holders_of(held: Mapping[Place, frozenset[int]], num_layers: int) -> tuple[tuple[Place, ...], ...]:
    """Return the places that hold each layer, sorted; raise Unrecoverable with the layers that none holds."""
    holders: list[list[Place]] = [[] for _ in range(num_layers)]
    for place in sorted(held):
        for layer in sorted(held[place]):
            holders[layer].append(place)
    if lost := tuple(layer for layer, places in enumerate(holders) if not places):
        raise Unrecoverable(lost)
    return tuple(map(tuple, holders))


def plan_transfers(
    plan: ExecutionPlan,
    held: Mapping[Place, frozenset[int]],
    layer_bytes: Sequence[int],
    *,
    max_sources: int,
) -> tuple[LayerTransfer, ...]:
    """Return the transfers that bring every worker of the plan the layers it needs and does not hold.

    A layer is read in equal parts from all its holders, or where it has more than `max_sources`, from those that
    have the fewest bytes to send so far. Raises Unrecoverable. O(transfers · log holders).
    """
    nothing: frozenset[int] = frozenset()
    wanted: dict[int, list[Place]] = defaultdict(list)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for place in stage.places:
                has = held.get(place, nothing)
                for layer in stage.layers:
                    if layer not in has:
                        wanted[layer].append(place)
    holders = holders_of(held, plan.num_layers)
    sending: dict[Place, float] = defaultdict(float)
    transfers: list[LayerTransfer] = []
    for layer, targets in sorted(wanted.items()):
        for target in targets:
            sources = holders[layer]
            if len(sources) > max_sources:
                sources = tuple(heapq.nsmallest(max_sources, sources, key=lambda place: (sending[place], place)))
            for part, source in enumerate(sources):
                sending[source] += layer_bytes[layer] / len(sources)
                transfers.append(
                    LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=len(sources))
                )
    return tuple(transfers)
