"""Failure domains: nodes that may fail together, so that copies of a layer belong into several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from oobleck.planner.inventory import Holding, missing_bytes

# The most swaps of two nodes that are compared for one plan; like nodes count once.
_MOST_SWAPS = 50_000

Placed = Iterable[tuple[Sequence[Holding], Sequence[str]]]
"""What each node of a pipeline has to hold, with its nodes."""


class Domains:
    """The failure domain of each node, and over how many of them the copies of a layer should lie."""

    def __init__(self, domain_of: Mapping[str, str], fault_threshold: int) -> None:
        """Take the domains that are known; any other node is one by itself. The mapping may grow."""
        self._of, self._wanted = domain_of, fault_threshold + 1
        self._masks: dict[Holding, int] = {}

    def __bool__(self) -> bool:
        """Whether any are known, and copies are wanted: else all plans do."""
        return bool(self._of) and self._wanted > 1

    def of(self, node: str) -> str:
        # A domain may have the name of a node.
        return f"domain {domain}" if (domain := self._of.get(node, "")) else f"node {node}"

    def by_domain(self, nodes: Collection[str]) -> dict[str, list[str]]:
        """Return the nodes of each domain, in their order."""
        found: dict[str, list[str]] = {}
        for node in nodes:
            found.setdefault(self.of(node), []).append(node)
        return found

    def possible(self, nodes: Collection[str]) -> int:
        """Return in how many domains the copies of a layer should lie, at most as many as there are."""
        return min(self._wanted, len({self.of(node) for node in nodes}))

    def missing(self, placed: Placed, num_layers: int, *, wanted: int | None = None) -> int:
        """Return how many domains layers lack, summed over the layers; O(nodes). `wanted` is f + 1 by default."""
        number = wanted or self._wanted
        held: dict[str, int] = {}
        for needed, nodes in placed:
            for holding, node in zip(needed, nodes, strict=True):
                domain = self.of(node)
                held[domain] = held.get(domain, 0) | self.mask(holding)
        # The bits of place k are the layers that k + 1 domains hold.
        at_least = [0] * number
        for mask in held.values():
            for place in range(number - 1, 0, -1):
                at_least[place] |= at_least[place - 1] & mask
            at_least[0] |= mask
        return sum(num_layers - layers.bit_count() for layers in at_least)

    def in_turn(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes so that the first ones lie in as many domains as possible."""
        seen: Counter[str] = Counter()
        turns = []
        for node in nodes:
            domain = self.of(node)
            turns.append(seen[domain])
            seen[domain] += 1
        return [node for _, _, node in sorted(zip(turns, range(len(nodes)), nodes, strict=True))]

    def together(self, nodes: Sequence[str], num_used: int) -> list[str]:
        """Return the nodes domain by domain, the largest first; those beyond `num_used` are of all domains in turn."""
        left = self.by_domain(nodes)
        # Of equal ones, the last gives a spare: as without domains.
        last_first = list(reversed(left.values()))
        spares = [max(last_first, key=len).pop() for _ in range(len(nodes) - num_used)]
        used = [node for alike in sorted(left.values(), key=len, reverse=True) for node in alike]
        return [*used, *reversed(spares)]

    def groups(self, nodes: Collection[str], number: int) -> list[list[str]]:
        """Return the nodes as `number` groups of whole domains, about equally large: the largest domains first."""
        found: list[list[str]] = [[] for _ in range(number)]
        for alike in sorted(self.by_domain(nodes).values(), key=len, reverse=True):
            min(found, key=len).extend(alike)
        return found

    def spread(
        self,
        needed: Sequence[Holding],
        nodes: Sequence[str],
        idle: Sequence[str],
        kind: Callable[[str], int],
        holdings: Mapping[str, Holding],
        layer_bytes: Sequence[int],
        wanted: int,
    ) -> list[str]:
        """Return the node of each place after swaps by which layers lie in more domains, with the fewest bytes to move.

        Each swap is the best one, so the result need not be the best of all. `idle` nodes may take places as well.
        """
        return _Swaps(self, needed, [*nodes, *idle], kind, holdings, layer_bytes, wanted).done()[: len(nodes)]

    def mask(self, holding: Holding) -> int:
        """Return the layers of a node as bits."""
        if holding not in self._masks:
            self._masks[holding] = sum(1 << layer for layer in frozenset[int]().union(*holding))
        return self._masks[holding]


class _Swaps:
    """Nodes at places, the idle ones after them, and how many nodes of each domain hold each layer."""

    def __init__(
        self,
        domains: Domains,
        needed: Sequence[Holding],
        nodes: list[str],
        kind: Callable[[str], int],
        holdings: Mapping[str, Holding],
        layer_bytes: Sequence[int],
        wanted: int,
    ) -> None:
        nothing = tuple(frozenset[int]() for _ in needed[0])
        self._needed = [*needed, *(nothing for _ in nodes[len(needed) :])]
        self._nodes, self._holdings, self._layer_bytes, self._wanted = nodes, holdings, layer_bytes, wanted
        self._masks = [domains.mask(each) for each in self._needed]
        self._domains, self._kinds = list(map(domains.of, nodes)), list(map(kind, nodes))
        self._counts = {domain: [0] * len(layer_bytes) for domain in self._domains}
        for domain, mask in zip(self._domains, self._masks, strict=True):
            for layer in _layers(mask):
                self._counts[domain][layer] += 1
        self._numbers = [
            sum(counts[layer] > 0 for counts in self._counts.values()) for layer in range(len(layer_bytes))
        ]
        self._num_tried = 0

    def done(self) -> list[str]:
        while self._num_tried < _MOST_SWAPS and (best := self._best()) is not None:
            self._swap(*best)
        return self._nodes

    def _best(self) -> tuple[int, int] | None:
        """Return the two places whose nodes to swap, for the first layer that lacks domains and can have more."""
        tried: set[tuple[int, ...]] = set()
        for layer, number in enumerate(self._numbers):
            if number >= self._wanted:
                continue
            holders = tuple(place for place, mask in enumerate(self._masks) if mask >> layer & 1)
            if holders not in tried:
                tried.add(holders)
                if (found := self._best_of(holders, layer)) is not None:
                    return found
        return None

    def _best_of(self, holders: Sequence[int], layer: int) -> tuple[int, int] | None:
        others = [place for place, domain in enumerate(self._domains) if not self._counts[domain][layer]]
        best, found = (0, 0.0), None
        for a in self._distinct(holders):
            for b in self._distinct(others):
                if self._kinds[a] != self._kinds[b]:
                    continue
                self._num_tried += 1
                gained = self._change(a, b)
                if gained < best[0] or (gained == best[0] and found and self._moved_bytes(a, b) < best[1]):
                    best, found = (gained, self._moved_bytes(a, b)), (a, b)
                if self._num_tried >= _MOST_SWAPS:
                    return found
        return found

    def _distinct(self, places: Iterable[int]) -> list[int]:
        """Return the first of the places whose nodes, and what these hold and need, are alike."""
        alike: dict[object, int] = {}
        for place in places:
            held = self._holdings[self._nodes[place]]
            alike.setdefault((self._masks[place], self._domains[place], self._kinds[place], held), place)
        return list(alike.values())

    def _change(self, a: int, b: int) -> int:
        """Return by how much the layers' lack of domains would grow."""
        changed = 0
        for source, target, mask in (
            (a, b, self._masks[a] & ~self._masks[b]),
            (b, a, self._masks[b] & ~self._masks[a]),
        ):
            fewer, more = self._counts[self._domains[source]], self._counts[self._domains[target]]
            for layer in _layers(mask):
                before = self._numbers[layer]
                after = before - (fewer[layer] == 1) + (more[layer] == 0)
                changed += max(0, self._wanted - after) - max(0, self._wanted - before)
        return changed

    def _moved_bytes(self, a: int, b: int) -> float:
        def missing(place: int, node: str) -> float:
            return missing_bytes(self._needed[place], self._holdings[node], self._layer_bytes)

        x, y = self._nodes[a], self._nodes[b]
        return missing(a, y) + missing(b, x) - missing(a, x) - missing(b, y)

    def _swap(self, a: int, b: int) -> None:
        for place in (a, b):
            self._count(place, -1)
        # The two are of one kind.
        for each in (self._nodes, self._domains):
            each[a], each[b] = each[b], each[a]
        for place in (a, b):
            self._count(place, 1)

    def _count(self, place: int, sign: int) -> None:
        counts = self._counts[self._domains[place]]
        for layer in _layers(self._masks[place]):
            before, counts[layer] = counts[layer], counts[layer] + sign
            self._numbers[layer] += (counts[layer] > 0) - (before > 0)


def _layers(mask: int) -> list[int]:
    return [layer for layer in range(mask.bit_length()) if mask >> layer & 1]
