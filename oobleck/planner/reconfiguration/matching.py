"""The matching of nodes to the positions of new pipelines that moves the fewest bytes: an assignment problem.

Most nodes already hold exactly what some position needs; `transport` solves the rest exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oobleck.planner.inventory import Holding, Inventory, missing_bytes
from oobleck.planner.tables import Floats

from .transport import transport

_POWER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One node's place in a new pipeline."""

    needed: Holding
    origin: int
    """The old pipeline that the new one continues, -1 for none; of equal matchings, the one where nodes stay wins."""


def match_nodes(
    positions: Sequence[Position],
    holdings: Mapping[str, Holding],
    origins: Mapping[str, int],
    layer_bytes: Sequence[int],
    *,
    evenly: bool = False,
) -> tuple[str, ...]:
    """Return the node for each position, with the fewest bytes to move in all, or `evenly` over the links.

    `holdings` are those of the candidates, at least as many as positions; `origins` the old pipelines of nodes that had
    one. `evenly` minimises the sum of a high power of each node's bytes. Of equal choices, nodes stay in their
    pipelines as far as possible, then the order of `holdings` decides.
    O(p + n), plus the transport of what changes.
    """
    assert len(holdings) >= len(positions), "every position gets a node"
    # Exact pairs may be fixed beforehand, because the bytes that turn one set of layers into another obey the triangle
    # inequality: if an optimal matching separates such a pair, swapping the partners costs no more.
    chosen = {} if evenly else _exact_pairs(positions, holdings, origins)
    taken = set(chosen.values())
    # The inner dictionaries are ordered sets.
    # Few kinds of nodes and positions are left, so kinds are matched instead of nodes.
    nodes: dict[Holding, dict[str, None]] = defaultdict(dict)
    for node, holding in holdings.items():
        if node not in taken:
            nodes[holding][node] = None
    waiting: dict[Holding, dict[int, None]] = defaultdict(dict)
    for index, position in enumerate(positions):
        if index not in chosen:
            waiting[position.needed][index] = None
    if waiting:
        # Sorted by layers, so that the order of pipelines does not decide between equal costs.
        rows, columns = sorted(waiting, key=_by_layers), sorted(nodes, key=_by_layers)
        if evenly:
            costs = _costs(rows, columns, holdings, layer_bytes)
        else:
            costs = np.array([[float(missing_bytes(needed, held, layer_bytes)) for held in columns] for needed in rows])
        flows = transport(costs, [len(waiting[needed]) for needed in rows], [len(nodes[held]) for held in columns])
        for row, needed in enumerate(rows):
            for column, held in enumerate(columns):
                _pair(int(flows[row, column]), waiting[needed], nodes[held], positions, origins, chosen)
    return tuple(chosen[index] for index in range(len(positions)))


def _costs(
    rows: Sequence[Holding], columns: Sequence[Holding], holdings: Mapping[str, Holding], layer_bytes: Sequence[int]
) -> Floats:
    """Return what it costs to give each kind of node each kind of position, where no link should be busy for long."""
    num_holders = Inventory(holdings, len(layer_bytes)).num_holders
    # Bytes that few nodes hold keep these busy.
    each = [size + size / max(1, number) for size, number in zip(layer_bytes, num_holders, strict=True)]
    busy = np.array([[missing_bytes(needed, held, each) for held in columns] for needed in rows])
    # A high power approaches the largest of all, which a transport cannot minimise.
    costs: Floats = (busy / max(1.0, float(busy.max()))) ** _POWER
    return costs


def _by_layers(holding: Holding) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(layers)) for layers in holding)


def _pair(
    number: int,
    indices: dict[int, None],
    nodes: dict[str, None],
    positions: Sequence[Position],
    origins: Mapping[str, int],
    chosen: dict[int, str],
) -> None:
    """Match `number` of the positions and nodes, and remove them; nodes that stay in their pipeline first."""
    for stay in (True, False):
        if not number:
            return
        by_origin: dict[int | None, list[str]] = defaultdict(list)
        # Reversed, so that `pop` takes the nodes in their order.
        for node in reversed(nodes):
            by_origin[origins.get(node) if stay else None].append(node)
        for index in list(indices):
            alike = by_origin[positions[index].origin if stay else None]
            if number and alike:
                number -= 1
                chosen[index] = node = alike.pop()
                del nodes[node], indices[index]


def _exact_pairs(
    positions: Sequence[Position], holdings: Mapping[str, Holding], origins: Mapping[str, int]
) -> dict[int, str]:
    """Return nodes that hold exactly what a position needs, by position; nodes of the same pipeline first."""
    chosen: dict[int, str] = {}
    taken: set[str] = set()
    for stay in (True, False):
        waiting: dict[tuple[Holding, int | None], list[str]] = {}
        for node in reversed(list(holdings)):
            if node not in taken:
                waiting.setdefault((holdings[node], origins.get(node) if stay else None), []).append(node)
        for index, position in enumerate(positions):
            nodes = waiting.get((position.needed, position.origin if stay else None))
            if nodes and index not in chosen:
                chosen[index] = node = nodes.pop()
                taken.add(node)
    return chosen
