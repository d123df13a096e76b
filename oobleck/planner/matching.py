"""Matching nodes to the positions of new pipelines, so that the fewest bytes have to move.

An assignment problem. Most nodes already hold exactly what some position needs; such pairs may be fixed
beforehand, because the bytes to make one set of layers into another obey the triangle inequality: if an optimal
matching separates an exact pair, swapping the partners costs no more. What remains is small after a failure,
and is solved exactly (see `assignment`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .assignment import assign
from .costs import Floats
from .inventory import Holding

__all__ = ["Position", "match_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One node's place in a new pipeline."""

    needed: Holding
    origin: int
    """The old pipeline that it continues, -1 for none; equal matchings are settled by who stays in theirs."""


def match_nodes(
    positions: Sequence[Position],
    holdings: Mapping[str, Holding],
    origins: Mapping[str, int],
    layer_bytes: Sequence[int],
) -> tuple[str, ...]:
    """Return the node for each position, with the fewest bytes to move in all.

    `holdings` names the candidates, at least as many as positions, and what they hold; `origins` the old
    pipelines of those that had one. Equal costs are settled by staying in the pipeline, then by the order of
    `holdings`. O(p) for what stays, plus O(r³) for the r positions that change.
    """
    assert len(holdings) >= len(positions), "every position gets a node"
    chosen = _exact_pairs(positions, holdings, origins)
    taken = set(chosen.values())
    nodes = [node for node in holdings if node not in taken]
    rest = [index for index in range(len(positions)) if index not in chosen]
    if rest:
        costs = _costs([positions[index] for index in rest], [holdings[node] for node in nodes], layer_bytes)
        came_from = np.array([origins.get(node, -2) for node in nodes])
        costs += came_from[None, :] != np.array([positions[index].origin for index in rest])[:, None]
        for index, column in zip(rest, assign(costs), strict=True):
            chosen[index] = nodes[column]
    return tuple(chosen[index] for index in range(len(positions)))


def _exact_pairs(
    positions: Sequence[Position], holdings: Mapping[str, Holding], origins: Mapping[str, int]
) -> dict[int, str]:
    """Return nodes for positions that need exactly what they hold, those in their own pipeline first."""
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


def _costs(positions: Sequence[Position], holdings: Sequence[Holding], layer_bytes: Sequence[int]) -> Floats:
    """Return the bytes to move, scaled so that all ties together weigh less than one byte: [position, node]."""
    num_devices = max(len(position.needed) for position in positions)
    weights = 2.0 * len(positions) * np.tile(np.asarray(layer_bytes, dtype=np.float64), num_devices)
    needed = _indicator([position.needed for position in positions], num_devices, len(layer_bytes))
    held = _indicator(holdings, num_devices, len(layer_bytes))
    costs: Floats = (needed * weights) @ (1 - held).T
    return costs


def _indicator(holdings: Sequence[Holding], num_devices: int, num_layers: int) -> Floats:
    rows: dict[Holding, int] = {}
    which = [rows.setdefault(holding, len(rows)) for holding in holdings]
    table = np.zeros((len(rows), num_devices * num_layers))
    for holding, row in rows.items():
        for device, layers in enumerate(holding[:num_devices]):
            table[row, [device * num_layers + layer for layer in sorted(layers)]] = 1
    return table[which]
