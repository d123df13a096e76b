"""Parity in place of copies: of which ranks' parts, on which node, and which lost part follows from it. Pure.

The parity of a group lies on a node that has none of its parts, so that any one node may be lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from oobleck.control import protocol
from oobleck.control.protocol import CopyDoor, Mix, PartCopies, ScriptState

from .spread import Group, Spread

BySource = dict[str, list[PartCopies]]
"""What nodes are asked to send."""

_MOST_TRIES = 3  # to make a lost part again


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
        self._num_failed: Counter[tuple[ScriptState, int]] = Counter()
        """Of lost parts, how often one that they follow from did not arrive."""

    def plan(
        self,
        state: ScriptState,
        spread: Spread,
        lacking: Collection[int],
        *,
        nodes: Collection[str],
        most: int,
        domains: Mapping[str, str],
    ) -> list[int]:
        """Plan parities on these nodes of the parts that lack one; return the ranks whose parts are to be copied."""
        # What only leaving nodes hold is handed on as it is.
        sources = {rank: min(on) for rank in lacking if (on := spread.holders[rank].intersection(nodes))}
        copied = [rank for rank in lacking if rank not in sources]
        for mixing in self._of(state):
            for rank in mixing.mix.ranks:
                sources.pop(rank, None)
        load = spread.parities.load() + Counter(mixing.target for mixing in self._asked)
        for group in groups(sources, size_of_groups(most, nodes, domains), domains):
            target = place_of([sources[rank] for rank in group], nodes, domains, load)
            if len(group) == 1 or target is None:
                copied += group
                continue
            mix = Mix(ranks=group, num_bytes=max(spread.num_bytes[rank] for rank in group))
            mixing = Mixing(state, mix, target)
            if not self._is_busy(mixing):
                self._asked[mixing] = {}
                load[target] += 1
        return sorted(copied)

    def plan_missing(self, state: ScriptState, spread: Spread) -> None:
        """Plan to make the parts again that follow from others."""
        for rank in spread.missing:
            found = spread.parities.source_of(rank, spread.holders)
            assert found is not None, "it is recoverable"
            group, target = found
            num_bytes = max(spread.num_bytes[each] for each in group if each != rank)
            self._asked.setdefault(Mixing(state, Mix(ranks=group, num_bytes=num_bytes, missing=rank), target), {})

    def ask(
        self,
        state: ScriptState,
        spread: Spread,
        doors: Mapping[str, CopyDoor],
        may_send: Callable[[str, str], bool],
        by_source: BySource,
    ) -> None:
        """Ask nodes to send what has not been asked for; `may_send` takes a source and a target."""
        for mixing in self._of(state):
            asked = self._asked[mixing]
            for rank in sorted(mixing.mix.senders - asked.keys()):
                able = [node for node in spread.holders.get(rank, ()) if may_send(node, mixing.target)]
                if able:
                    asked[rank] = source = min(able)
                    copies = PartCopies(rank=rank, doors=(doors[mixing.target],), mix=mixing.mix)
                    by_source.setdefault(source, []).append(copies)

    def _of(self, state: ScriptState) -> list[Mixing]:
        return [mixing for mixing in self._asked if mixing.state == state]

    def _is_busy(self, mixing: Mixing) -> bool:
        """Whether the target still mixes an older state of these ranks: it has room for one at a time."""
        return any(
            (each.target, each.mix.ranks, each.state.start) == (mixing.target, mixing.mix.ranks, mixing.state.start)
            and each.state != mixing.state
            for each in self._asked
        )

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
        found = [mixing for mixing in self._of(failed.state) if mixing.target == failed.target]
        found = [mixing for mixing in found if self._asked[mixing].pop(failed.rank, None) is not None]
        self._num_failed.update((each.state, each.mix.missing) for each in found if each.mix.missing is not None)
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
