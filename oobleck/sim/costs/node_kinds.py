"""The kinds of a simulation's nodes, each with a profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from oobleck.job import DEFAULT_KIND, NodeSpec
from oobleck.planner import NodeKind, Profile, with_shared_links


class NodeKinds:
    """The kind of each node, with the links between nodes that all share."""

    def __init__(
        self,
        kinds: Sequence[NodeKind],
        device_of: Mapping[str, str] | None = None,
        domain_of: Mapping[str, str] | None = None,
    ) -> None:
        """Take the kind's name of each node, by its devices; nodes that `device_of` omits are of the first kind.

        `domain_of` has the failure domains that are known.
        """
        profiles = with_shared_links([kind.profile for kind in kinds])
        self._device_of = device_of or {}
        self.domain_of = domain_of or {}
        self._kinds = {kind.name: replace(kind, profile=profile) for kind, profile in zip(kinds, profiles, strict=True)}
        self._first = next(iter(self._kinds.values()))

    @classmethod
    def alike(
        cls, profile: Profile, *, devices_per_node: int = 1, domain_of: Mapping[str, str] | None = None
    ) -> NodeKinds:
        """Return the single kind of nodes that are all alike."""
        kind = NodeKind(name=DEFAULT_KIND, profile=profile, devices_per_node=devices_per_node)
        return cls([kind], domain_of=domain_of)

    @property
    def profile(self) -> Profile:
        """The profile of the first kind; the layers of all kinds have equal sizes."""
        return self._first.profile

    def __getitem__(self, node: str) -> NodeKind:
        return self._kinds[self._device_of[node]] if node in self._device_of else self._first

    def profile_of(self, node: str) -> Profile:
        return self[node].profile

    @property
    def own_profile_of(self) -> Callable[[str], Profile] | None:
        """`profile_of` for several kinds; None where all nodes have `profile`."""
        return self.profile_of if len(self._kinds) > 1 else None

    def devices_of(self, node: str) -> range:
        return range(self[node].devices_per_node)

    def num_workers(self, nodes: Collection[str]) -> int:
        if not self._device_of:
            return len(nodes) * self._first.devices_per_node
        return sum(self[node].devices_per_node for node in nodes)

    def spec(self, node: str) -> NodeSpec:
        return NodeSpec(
            name=node,
            host=node,
            devices=tuple(self.devices_of(node)),
            device=self[node].name,
            domain=self.domain_of.get(node, ""),
        )

    @cached_property
    def named(self) -> tuple[NodeKind, ...]:
        """The kinds with their names in a run."""
        return tuple(replace(kind, name=_name(kind)) for kind in self._kinds.values())

    def kind_of(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return the name of each node's kind, as in `named`."""
        return {node: _name(self[node]) for node in nodes}


def _name(kind: NodeKind) -> str:
    return NodeSpec(name="", host="", devices=tuple(range(kind.devices_per_node)), device=kind.name).kind
