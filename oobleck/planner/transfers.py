"""Which layers move where: every missing layer is read from its living holders, evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from oobleck.plan import LayerTransfer, WorkerId

from .inventory import Holding, Inventory


def plan_transfers(
    arrivals: Sequence[tuple[str, Holding]], inventory: Inventory, *, max_sources: int
) -> tuple[LayerTransfer, ...]:
    """Return the transfers that bring nodes, given with what they have to hold, what they do not hold yet.

    A layer is read in equal parts from all its holders. Where it has more than `max_sources`, they are shared out
    among the readers in turn, at most `max_sources` to each, and different layers start at different holders, so
    that the load stays even. O(transfers + holders · log holders).
    """
    wanted: dict[int, list[WorkerId]] = defaultdict(list)
    for node, needed in arrivals:
        held = inventory.holdings[node]
        for device, layers in enumerate(needed):
            for layer in layers - held[device] if device < len(held) else layers:
                wanted[layer].append(WorkerId(node=node, device=device))
    transfers: list[LayerTransfer] = []
    for layer, targets in sorted(wanted.items()):
        holders = inventory.holders(layer)
        num_parts = len(holders)
        if num_parts > max_sources:
            num_parts = max(1, min(max_sources, num_parts // len(targets)))
        turn = layer * num_parts
        for target in sorted(targets):
            for part in range(num_parts):
                source = holders[(turn + part) % len(holders)]
                transfers.append(
                    LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=num_parts)
                )
            turn += num_parts
    return tuple(transfers)
