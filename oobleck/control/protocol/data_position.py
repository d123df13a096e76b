"""A run's position in its shards after a step: one small value, which is stored with the model.

    the order of visits       4  1 │ 3  0 │ 2  5 │ 9  7  …      a visit is one shard in one epoch:
                              done │ open │ to do               its number is epoch · shards + shard
                                          ^ `opened` = 4

Steps commit in order and take records in order, so the position says everything: all records of a done visit were
committed, and those before `next` of an open one. To go back to a step is to go back to its position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenShard:
    visit: int
    next: int = 0
    """Where its first untaken record lies: a row, a byte, an entry's number."""
    records: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftShard:
    """A shard in quarantine: nothing from `next` on was taken in that visit."""

    visit: int
    next: int
    records: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """The records taken so far. The default is the beginning of the data."""

    shards: str = ""
    """The `digest_of_shards` for which the position holds."""
    opened: int = 0
    """How many visits are open, done or left."""
    open: tuple[OpenShard, ...] = ()
    """In the order of their turns."""
    left: tuple[LeftShard, ...] = ()
    records: int = 0
    """How many records were taken in all: the number of the next one."""

    def done(self, num_shards: int, *, seed: int) -> tuple[tuple[int, int], ...]:
        """Return the visits that have read their shards to the end, as merged intervals [first, stop). O(opened)."""
        unread = {shard.visit for shard in self.open} | {shard.visit for shard in self.left}
        opened = (visit_at(at, num_shards, seed=seed) for at in range(self.opened))
        return merged((visit, visit + 1) for visit in opened if visit not in unread)

    def with_another_try(self) -> DataPosition:
        """Take shards out of quarantine: they continue where they were left, and come first."""
        again = (OpenShard(visit=left.visit, next=left.next, records=left.records) for left in self.left)
        return replace(self, open=(*again, *self.open), left=())


def visit_at(at: int, num_shards: int, *, seed: int) -> int:
    """Return the visit with number `at`: each epoch has its own order of the shards."""
    epoch, worker_id = divmod(at, num_shards)
    return epoch * num_shards + _order(num_shards, seed, epoch)[worker_id]


@lru_cache(maxsize=4)
def _order(num_shards: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Order shards by the digests of (seed, epoch, shard). O(n·log n), once an epoch."""

    def key(shard: int) -> bytes:
        # A hash gives the same order in every version of Python, which a seeded shuffle does not promise.
        return hashlib.blake2b(f"shards:{seed}:{epoch}:{shard}".encode(), digest_size=16).digest()

    return tuple(sorted(range(num_shards), key=key))


def merged(intervals: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join intervals [first, stop) that touch or overlap."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((first, stop))
    return tuple(joined)


def digest_of_shards(names: Sequence[str]) -> str:
    """Return sixteen hexadecimal digits that identify a list of shards."""
    # Names of files may hold bytes that are not text, which Python keeps as lone surrogates.
    return hashlib.sha256("\n".join(names).encode(errors="surrogatepass")).hexdigest()[:16]
