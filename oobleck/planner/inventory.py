"""The layers that each node holds, and the transfers of missing ones, read evenly from all their holders."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from oobleck.errors import Unrecoverable
from oobleck.plan import LayerTransfer, PipelineTemplate, WorkerId

Holding = tuple[frozenset[int], ...]
"""The layers that each device of a node holds whole, or needs."""


def needed_holdings(template: PipelineTemplate, devices_per_node: int) -> tuple[Holding, ...]:
    """Return the layers that each node of a pipeline has to hold."""
    nothing: frozenset[int] = frozenset()
    nodes = [[nothing] * devices_per_node for _ in range(template.num_nodes)]
    for stage, layers in zip(template.stages, template.layer_sets, strict=False):  # a stage's chunks have like devices
        for device in range(stage.first_device, stage.first_device + stage.num_devices):
            nodes[stage.node_index][device] = layers
    return tuple(tuple(node) for node in nodes)


def missing_bytes(needed: Holding, held: Holding, layer_bytes: Sequence[float]) -> float:
    """Return the bytes that a node with `held` has to receive to hold `needed`."""
    return sum(
        layer_bytes[layer]
        for device, layers in enumerate(needed)
        for layer in (layers - held[device] if device < len(held) else layers)
    )


class Inventory:
    """The layers that living nodes hold. Nodes that leave (`leaving`) get no place in a plan, but serve as sources."""

    def __init__(
        self, holdings: Mapping[str, Holding], num_layers: int, *, leaving: Mapping[str, Holding] | None = None
    ) -> None:
        self.holdings = holdings
        # Nodes with equal holdings stay together: thousands of nodes have few different holdings.
        self.kinds: dict[Holding, list[str]] = defaultdict(list)
        for node, holding in {**(leaving or {}), **holdings}.items():
            self.kinds[holding].append(node)
        counts: Counter[int] = Counter()
        for holding, nodes in self.kinds.items():
            for layers in holding:
                for layer in layers:
                    counts[layer] += len(nodes)
        self.num_holders = tuple(counts[layer] for layer in range(num_layers))
        self._worker_ids: dict[tuple[tuple[Holding, int], ...], list[WorkerId]] = {}

    def check_complete(self) -> None:
        """Raise Unrecoverable with the layers that no worker holds."""
        if lost := tuple(layer for layer, number in enumerate(self.num_holders) if not number):
            raise Unrecoverable(lost)

    def holders(self, layer: int) -> list[WorkerId]:
        """Return the devices that hold a layer, sorted; O(kinds of holdings + holders · log holders).

        Layers that lie together everywhere share one list, which callers must not change.
        """
        found = tuple(
            (holding, device) for holding in self.kinds for device, layers in enumerate(holding) if layer in layers
        )
        if found not in self._worker_ids:
            self._worker_ids[found] = sorted(
                WorkerId(node, device) for holding, device in found for node in self.kinds[holding]
            )
        return self._worker_ids[found]


def plan_transfers(
    arrivals: Sequence[tuple[str, Holding]], inventory: Inventory, *, max_sources: int
) -> tuple[LayerTransfer, ...]:
    """Return the transfers after which each arriving node holds what it has to, given as (node, needed).

    A node reads a layer in equal parts from up to `max_sources` of its holders. O(transfers + holders · log holders).
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
            # Readers of one layer share the holders out, so that none of these serves all of them.
            num_parts = max(1, min(max_sources, num_parts // len(targets)))
        # The readers take the holders in turn, and each layer starts at another holder: the load stays even.
        turn = layer * num_parts
        for target in sorted(targets):
            for part in range(num_parts):
                source = holders[(turn + part) % len(holders)]
                transfers.append(
                    LayerTransfer(layer=layer, source=source, target=target, part=part, num_parts=num_parts)
                )
            turn += num_parts
    return tuple(transfers)
