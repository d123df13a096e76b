"""Kinds of nodes, as values, and the network that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oobleck.errors import PlanningError

from .profiles import NetworkProfile, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes with equal devices."""

    name: str
    profile: Profile
    """The model on one device of theirs."""
    devices_per_node: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise PlanningError(f"kind {self.name} has {self.devices_per_node} devices a node; it needs at least 1")


def shared_network(profiles: Sequence[Profile]) -> NetworkProfile:
    """Return the network between nodes of several kinds: that of the slowest, for all."""
    return replace(
        profiles[0].network,
        inter_node_bytes_per_s=min(each.network.inter_node_bytes_per_s for each in profiles),
        inter_node_latency_s=max(each.network.inter_node_latency_s for each in profiles),
    )


def with_shared_links(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Return profiles with the links between nodes that they share; links within nodes stay their own."""
    shared = shared_network(profiles)
    return tuple(
        replace(
            profile,
            network=replace(
                profile.network,
                inter_node_bytes_per_s=shared.inter_node_bytes_per_s,
                inter_node_latency_s=shared.inter_node_latency_s,
            ),
        )
        for profile in profiles
    )
