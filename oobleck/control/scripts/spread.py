"""Which nodes hold the parts of a saved state, and parities of them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from oobleck.control.protocol import ScriptProgress

Group = tuple[int, ...]
"""Ranks, in ascending order, whose parts lie on different nodes."""


@dataclass(slots=True)
class Parities:
    """Which nodes hold parities."""

    _nodes: dict[Group, set[str]] = field(default_factory=dict)
    _groups_of: dict[int, set[Group]] = field(default_factory=dict)

    def add(self, group: Group, node: str) -> None:
        self._nodes.setdefault(group, set()).add(node)
        for rank in group:
            self._groups_of.setdefault(rank, set()).add(group)

    def remove(self, group: Group, node: str) -> None:
        self._nodes[group].discard(node)
        if not self._nodes[group]:
            del self._nodes[group]
            for rank in group:
                self._groups_of[rank].discard(group)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def load(self) -> Counter[str]:
        """Count the parities of each node."""
        return Counter(node for nodes in self._nodes.values() for node in nodes)

    def covers(self, rank: int, holders: Mapping[int, Collection[str]], leaving: Collection[str]) -> bool:
        """Whether a rank's part survives the loss of any node; those that leave do not count."""
        staying = _without(holders.get(rank, ()), leaving)
        if len(staying) != 1:
            return bool(staying)
        gone = (*leaving, *staying)
        return any(
            _without(self._nodes[group], gone)
            and all(each == rank or _without(holders.get(each, ()), gone) for each in group)
            for group in self._groups_of.get(rank, ())
        )

    def source_of(self, rank: int, holders: Mapping[int, Collection[str]]) -> tuple[Group, str] | None:
        """Return a parity from which a lost part follows with the other parts of its group, and its node."""
        for group in sorted(self._groups_of.get(rank, ())):
            if all(each == rank or holders.get(each) for each in group):
                return group, min(self._nodes[group])
        return None


def _without(nodes: Iterable[str], others: Collection[str]) -> list[str]:
    return [node for node in nodes if node not in others]


@dataclass(slots=True)
class Spread:
    world_size: int
    is_sharded: bool
    holders: dict[int, set[str]] = field(default_factory=dict)
    """Keyed by the rank that saved the part."""
    parities: Parities = field(default_factory=Parities)
    num_bytes: dict[int, int] = field(default_factory=dict)
    """Of each rank's part."""
    can_stay: bool = True
    progress: ScriptProgress | None = None
    """Rank 0's."""

    @property
    def is_whole(self) -> bool:
        return len(self.holders) == self.world_size

    @property
    def missing(self) -> list[int]:
        return [] if self.is_whole else [rank for rank in range(self.world_size) if rank not in self.holders]
