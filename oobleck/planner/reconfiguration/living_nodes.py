"""The changes to the nodes of a plan, and the nodes that are left."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from oobleck.plan import ExecutionPlan, WorkerId
from oobleck.planner.inventory import Holding, Inventory, missing_bytes, needed_holdings
from oobleck.planner.profiles import NetworkProfile

from .domains import Domains

# Nodes at or below each of this many lowest speeds are left out on trial: each trial adds all its moves.
_SLOW_VARIANTS = 3
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changes that a plan is reconfigured for; see `Planner.reconfigure`."""

    lost: Collection[str]
    joined: Collection[str]
    leaving: Collection[str]
    resting: Collection[str]
    speeds: Mapping[str, float]
    """The speeds of nodes relative to the profile (0.5 takes twice as long); 1.0 for nodes not named."""
    held: Mapping[WorkerId, frozenset[int]] | None
    domains: Domains
    horizon_s: float
    """The expected seconds to the next change, within which what moves has to repay itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingNodes:
    """The nodes of the old pipelines that live, and the free ones."""

    plan: ExecutionPlan
    free: tuple[str, ...]
    """Spares, then joined nodes, then those of dissolved pipelines."""
    origins: Mapping[str, int]
    """The old pipeline of each node that had one."""
    inventory: Inventory
    speeds: Mapping[str, float]
    resting: tuple[str, ...]
    """Nodes that get no place although they could take one, but serve as sources."""

    @property
    def holdings(self) -> Mapping[str, Holding]:
        return self.inventory.holdings

    @property
    def slow(self) -> frozenset[str]:
        """The living nodes that are slower than the profile."""
        return frozenset(node for node, speed in self.speeds.items() if speed < 1.0 and node in self.holdings)

    def without_slowest(self) -> list[frozenset[str]]:
        """Return the sets of nodes to leave out on trial: none, then all up to each of the lowest speeds."""
        slow = sorted({self.speeds[node] for node in self.slow})
        limits = [0.0, *slow[:_SLOW_VARIANTS]]
        return [frozenset(node for node in self.speeds if self.speeds[node] <= limit) for limit in limits]

    def transition_s(
        self, network: NetworkProfile, layer_bytes: Sequence[int], arrivals: Sequence[tuple[str, Holding]]
    ) -> float:
        """Return the seconds until nodes, given as (node, needed), hold what they need.

        These are the seconds of the busiest link, in or out, with reads spread over all holders.
        """
        if not arrivals:
            return 0.0
        busiest = 0.0
        sent = [0.0] * len(layer_bytes)
        for node, needed in arrivals:
            held = self.holdings[node]
            busiest = max(busiest, missing_bytes(needed, held, layer_bytes))
            for device, layers in enumerate(needed):
                for layer in layers - held[device]:
                    sent[layer] += layer_bytes[layer] / self.inventory.num_holders[layer]
        # Reads are spread evenly, so nodes with equal holdings send equally many bytes.
        for holding in self.inventory.kinds:
            busiest = max(busiest, math.fsum(sent[layer] for layers in holding for layer in sorted(layers)))
        return network.inter_node_latency_s + busiest / network.inter_node_bytes_per_s

    @property
    def is_whole(self) -> bool:
        """Whether all nodes of the old pipelines live."""
        return len(self.origins) == len(self.plan.nodes)


def look_at(
    plan: ExecutionPlan, changes: Changes, *, devices_per_node: int, dissolved: Collection[int] = ()
) -> LivingNodes:
    """Apply changes to a plan's nodes. Raises Unrecoverable with the layers that no living worker holds.

    Pipelines that are dissolved cannot continue with any nodes: theirs are free, and hold what they held.
    """
    lost, leaving = frozenset(changes.lost), frozenset(changes.leaving) | frozenset(changes.resting)
    gone = lost | leaving
    origins = dict(plan.pipeline_of)
    for node in gone:
        origins.pop(node, None)
    spares = [node for node in plan.spares if node not in gone]
    # A node that was lost and joined again has no origin any more, so it arrives empty.
    arrived = sorted(set(changes.joined) - set(origins) - set(spares))
    freed = [node for node in plan.nodes if node in origins and origins[node] in dissolved] if dissolved else []
    expected = _expected(plan, devices_per_node)
    empty: Holding = (_NOTHING,) * devices_per_node
    holdings = {node: expected[node] for node in origins} | dict.fromkeys((*spares, *arrived), empty)
    for node in freed:
        del origins[node]
    departing = {node: expected.get(node, empty) for node in sorted(leaving - lost)}
    if changes.held is not None:
        holdings = _reported(holdings, changes.held, gone, empty)
        departing = _reported(departing, changes.held, lost, empty)
    living = LivingNodes(
        plan=plan,
        free=(*spares, *arrived, *freed),
        origins=origins,
        inventory=Inventory(holdings, plan.num_layers, leaving=departing),
        speeds=changes.speeds,
        resting=tuple(sorted(set(changes.resting))),
    )
    living.inventory.check_complete()
    return living


def _expected(plan: ExecutionPlan, devices_per_node: int) -> dict[str, Holding]:
    known: dict[int, tuple[Holding, ...]] = {}
    expected: dict[str, Holding] = {}
    for pipeline in plan.pipelines:
        if (needed := known.get(id(pipeline.template))) is None:
            known[id(pipeline.template)] = needed = needed_holdings(pipeline.template, devices_per_node)
        expected.update(zip(pipeline.nodes, needed, strict=True))
    return expected


def _reported(
    holdings: Mapping[str, Holding], held: Mapping[WorkerId, frozenset[int]], gone: frozenset[str], empty: Holding
) -> dict[str, Holding]:
    """Return the holdings that workers report in `held`; where equal, the objects of the expected ones."""
    if not holdings:
        return {}
    found = dict.fromkeys(holdings, empty)
    for (node, device), layers in held.items():
        if layers and node in found and node not in gone:
            before = found[node] + (_NOTHING,) * (device + 1 - len(found[node]))
            found[node] = (*before[:device], layers, *before[device + 1 :])
    return {node: expected if found[node] == expected else found[node] for node, expected in holdings.items()}
