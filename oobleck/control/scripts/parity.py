"""Parity in place of copies: of which ranks' parts, on which node, and which lost part follows from it. Pure.

The parity of a group lies on a node that has none of its parts, so that any one node may be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from oobleck.control import protocol
from oobleck.control.protocol import Mix, ScriptState

Group = tuple[int, ...]
"""Ranks, in ascending order, whose parts lie on different nodes."""

_MOST_TRIES = 3  # to make a lost part again


@dataclass(slots=True)
class Parities:
    """Which nodes hold parities of one state."""

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


def groups(sources: Mapping[int, str], size: int, domains: Mapping[str, str]) -> Iterator[Group]:
    """Yield groups of up to `size` ranks on different nodes, of different domains where there are enough of these."""
    ranks: dict[str, list[int]] = {}
    for rank, node in sorted(sources.items()):
        ranks.setdefault(node, []).append(rank)
    ring = sorted(ranks, key=lambda node: (domains.get(node, node), node))
    number = -(-len(ring) // size)
    for first in range(number):
        nodes = ring[first::number]  # nodes of one domain are neighbours
        for index in range(max(len(ranks[node]) for node in nodes)):
            yield tuple(sorted(ranks[node][index] for node in nodes if index < len(ranks[node])))


def size_of_groups(most: int, nodes: Collection[str], domains: Mapping[str, str]) -> int:
    """Return how many nodes a group may have, so that one more is left for its parity; of another domain, if any."""
    num_domains = len({domains.get(node, node) for node in nodes})
    return max(1, min(most, (num_domains if num_domains > 1 else len(nodes)) - 1))


def place_of(
    sources: Collection[str], nodes: Collection[str], domains: Mapping[str, str], load: Counter[str]
) -> str | None:
    """Return the node for a group's parity, one with few others; None if each has a part of the group."""
    near = {domains.get(node, node) for node in sources}
    others = [node for node in nodes if node not in sources]
    return min(others, key=lambda node: (domains.get(node, node) in near, load[node], node), default=None)


@dataclass(frozen=True, slots=True)
class Mixing:
    """Parts of a state that are sent to one node to be mixed there."""

    state: ScriptState
    mix: Mix
    target: str


class Mixings:
    """What is under way. A part that did not arrive is asked for again; what has arrived counts."""

    def __init__(self) -> None:
        self._asked: dict[Mixing, dict[int, str]] = {}
        """The nodes that were asked to send, keyed by rank."""
        self._num_failed: Counter[tuple[ScriptState, int | None]] = Counter()

    def begin(self, mixing: Mixing) -> None:
        self._asked.setdefault(mixing, {})

    def of(self, state: ScriptState) -> list[Mixing]:
        return [mixing for mixing in self._asked if mixing.state == state]

    def ranks_of(self, state: ScriptState) -> set[int]:
        """Return the ranks whose parts become parts of a parity."""
        return {rank for mixing in self.of(state) if mixing.mix.missing is None for rank in mixing.mix.ranks}

    def load(self) -> Counter[str]:
        return Counter(mixing.target for mixing in self._asked)

    def is_busy(self, mixing: Mixing) -> bool:
        """Whether the target still mixes an older state of these ranks: it has room for one at a time."""
        return any(
            (each.target, each.mix.ranks, each.state.start) == (mixing.target, mixing.mix.ranks, mixing.state.start)
            and each.state != mixing.state
            for each in self._asked
        )

    def ask(self, mixing: Mixing, sources: Mapping[int, str]) -> list[int]:
        """Note that these nodes send, and return the ranks of those that have not been asked yet."""
        asked = self._asked[mixing]
        new = sorted(mixing.mix.senders - asked.keys() & sources.keys())
        asked |= {rank: sources[rank] for rank in new}
        return new

    def is_hopeless(self, state: ScriptState, missing: int) -> bool:
        return self._num_failed[state, missing] >= _MOST_TRIES

    def arrive(self, state: ScriptState, node: str, *, group: Group = (), missing: int | None = None) -> None:
        """Note that a node holds a parity, or a part that was missing."""
        self._asked = {
            mixing: sources
            for mixing, sources in self._asked.items()
            if (mixing.state, mixing.target, mixing.mix.missing) != (state, node, missing)
            or (missing is None and mixing.mix.ranks != group)
        }

    def fail(self, failed: protocol.PartNotCopied) -> bool:
        """Note that a part did not arrive; return whether it was to be mixed."""
        found = [mixing for mixing in self.of(failed.state) if mixing.target == failed.target]
        found = [mixing for mixing in found if self._asked[mixing].pop(failed.rank, None) is not None]
        self._num_failed.update((mixing.state, mixing.mix.missing) for mixing in found)
        return bool(found)

    def forget_asked(self, node: str) -> None:
        """Note that a node may have missed what it was asked for."""
        for sources in self._asked.values():
            for rank in [rank for rank, source in sources.items() if source == node]:
                del sources[rank]

    def drop(self, node: str) -> None:
        """Forget what a lost node was to mix, and what others mix with its parts."""
        self._asked = {
            mixing: sources
            for mixing, sources in self._asked.items()
            if mixing.target != node and node not in sources.values()
        }

    def keep_only(self, states: Collection[ScriptState]) -> None:
        self._asked = {mixing: sources for mixing, sources in self._asked.items() if mixing.state in states}
