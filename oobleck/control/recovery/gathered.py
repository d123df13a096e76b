"""What thousands of workers report one after another, in values that cost O(1) each to make from the one before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Gathered(Mapping[K, V], Generic[K, V]):
    """Immutable reports, in the order of their arrival."""

    # A version shares its dict with the versions made from it, and is the first `_length` items: keys are only
    # appended. So adding to the newest version is O(1); with a copy for each report, a fence of 10,000 workers would
    # copy for a second. Reading or extending an older version, and replacing a value, copies once, O(n). Rejected: a
    # trie makes these rare cases O(log n), and all reading several times slower.
    __slots__ = ("_length", "_shared")

    def __init__(self, known: Mapping[K, V] | None = None) -> None:
        self._shared = dict(known or {})
        self._length = len(self._shared)

    def adding(self, keys: Iterable[K], value: V) -> Gathered[K, V]:
        """Return a version with the same value for each of these keys; O(keys) for the newest version."""
        more = dict.fromkeys(keys, value)
        known = self._own()
        next_one = Gathered[K, V]()
        if known.keys().isdisjoint(more):
            known.update(more)
            next_one._shared = known
        else:
            next_one._shared = known | more
        next_one._length = len(next_one._shared)
        return next_one

    def has_all(self, keys: Collection[K]) -> bool:
        """Whether all of these are among the keys; O(1) while too few are."""
        return len(self) >= len(keys) and all(map(self._own().__contains__, keys))

    def copied(self) -> dict[K, V]:
        """Return a dict: quicker than item by item if all are looked at."""
        return dict(self._own())

    def in_order(self, keys: Collection[K]) -> dict[K, V]:
        """Return a dict of these keys, in their order: quicker than item by item."""
        return dict(zip(keys, map(self._own().__getitem__, keys), strict=True))

    def __getitem__(self, key: K) -> V:
        return self._own()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._own()

    def __iter__(self) -> Iterator[K]:
        return iter(self._own())

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Gathered({self._own()!r})"

    def _own(self) -> dict[K, V]:
        """Return a dict of these items alone: a copy, once another version was made from this one."""
        if len(self._shared) > self._length:
            self._shared = dict(islice(self._shared.items(), self._length))
        return self._shared
