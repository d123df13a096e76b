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

__all__ = ["Holding", "Position", "match_nodes", "missing_bytes"]

Holding = tuple[frozenset[int], ...]
"""The layers that each device of a node holds, or has to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """One node's place in a new pipeline."""

    needed: Holding
    origin: int | None
    """The old pipeline that it continues; of equal matchings the one with fewest nodes changing theirs wins."""


def missing_bytes(needed: Holding, held: Holding, layer_bytes: Sequence[int]) -> int:
    """Return the bytes that a node which holds `held` has to receive to hold `needed`."""
    return sum(
        layer_bytes[layer]
        for device, layers in enumerate(needed)
        for layer in (layers - held[device] if device < len(held) else layers)
    )


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
    chosen: list[str | None] = [None] * len(positions)
    left = dict.fromkeys(holdings)
    for stay in (True, False):
        waiting: dict[tuple[Holding, int | None], list[str]] = {}
        for node in reversed(list(left)):
            waiting.setdefault((holdings[node], origins.get(node) if stay else None), []).append(node)
        for index, position in enumerate(positions):
            if chosen[index] is None and (nodes := waiting.get((position.needed, position.origin if stay else None))):
                chosen[index] = node = nodes.pop()
                del left[node]
    rest = [index for index, node in enumerate(chosen) if node is None]
    if rest:
        nodes_left = list(left)
        costs = _costs([positions[index] for index in rest], [holdings[node] for node in nodes_left], layer_bytes)
        for row, index in enumerate(rest):
            for column, node in enumerate(nodes_left):
                costs[row, column] += origins.get(node, -1) != positions[index].origin
        for index, column in zip(rest, assign(costs), strict=True):
            chosen[index] = nodes_left[column]
    return tuple(node for node in chosen if node is not None)


def _costs(positions: Sequence[Position], holdings: Sequence[Holding], layer_bytes: Sequence[int]) -> Floats:
    """Return the bytes to move, doubled to leave room below for ties: [position, node]."""
    num_devices = max(len(position.needed) for position in positions)
    weights = 2.0 * len(positions) * np.tile(np.asarray(layer_bytes, dtype=np.float64), num_devices)
    needed = _indicator([position.needed for position in positions], num_devices, len(layer_bytes))
    held = _indicator(holdings, num_devices, len(layer_bytes))
    costs: Floats = (needed * weights) @ (1 - held).T
    return costs


def _indicator(holdings: Sequence[Holding], num_devices: int, num_layers: int) -> Floats:
    table = np.zeros((len(holdings), num_devices * num_layers))
    for row, holding in enumerate(holdings):
        for device, layers in enumerate(holding[:num_devices]):
            table[row, [device * num_layers + layer for layer in sorted(layers)]] = 1
    return table
