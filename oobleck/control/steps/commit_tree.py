"""The tree over all workers that commit together. Each worker derives the same tree without talking.

Two numbers matter: the hops up and down, and the edges that a loss changes, since each is a connection to be made in
the middle of a recovery. So a node's place follows from its name alone, not from its place in the plan. Every name has
two numbers, from a hash. In a cell (at first, all nodes) the node with the smallest second number is the parent; the
others are divided into four cells by the next two bits of their first numbers, and so on. Inside a node, its devices
are a binary heap below the first.

    hops     A node is d hops from the root only if it shares bits with d others: expected N^d · 4^(-d(d-1)/2) times,
             which is below 1/(64 N²) for d = ceil(log2 N) + 3. So there are at most ceil(log2 N) + 2 hops up between
             nodes, and floor(log2 D) within one of D devices. In fact about log4 N + 2: 9 at 10,000 nodes.
    edges    If a node leaves, one of its children takes its place, one of that child's children the child's, and so
             on. Three edges move with each, and half of all nodes have no children: about four edges on the average.
             How the planner arranges the others in pipelines changes none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from oobleck.planner import WorkerId

_DIGIT_BITS = 2
_HASH_BITS = 64


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The workers with which one exchanges messages in a commit."""

    parent: WorkerId | None
    """None for the root."""
    children: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Key:
    """A node's numbers. The smallest of a cell is its parent."""

    rank: int
    name: str
    digits: int


def commit_tree(members: Iterable[WorkerId]) -> Mapping[WorkerId, Neighbours]:
    """Return all workers' neighbours; O(N log N)."""
    devices = _devices_by_node(members)
    parents: dict[str, str | None] = {}
    cells: list[tuple[str | None, list[_Key], int]] = [(None, list(map(_key_of, devices)), 0)]
    while cells:
        above, cell, level = cells.pop()
        head, parts = _divide(cell, level)
        parents[head.name] = above
        cells += [(head.name, part, level + 1) for part in parts]
    below: dict[str, list[str]] = {node: [] for node in devices}
    for node, parent in parents.items():
        if parent is not None:
            below[parent].append(node)
    return {
        worker_id: _neighbours(devices, worker_id, parents[node], below[node])
        for node, ids in devices.items()
        for worker_id in ids
    }


def hops_up(members: Iterable[WorkerId]) -> int:
    """Return the most hops from a worker to the root, half of what a commit takes; O(N log N)."""
    tree = commit_tree(members)
    hops, level = -1, [worker_id for worker_id, each in tree.items() if each.parent is None]
    while level:
        hops, level = hops + 1, [child for worker_id in level for child in tree[worker_id].children]
    return hops


def neighbours_in_tree(members: Iterable[WorkerId], worker_id: WorkerId) -> Neighbours:
    """Return one worker's neighbours in `commit_tree(members)`; O(N)."""
    devices = _devices_by_node(members)
    mine = _key_of(worker_id.node)
    above: str | None = None
    head, parts = _divide(list(map(_key_of, devices)), level := 0)
    while head != mine:
        level += 1
        above = head.name
        head, parts = _divide(next(part for part in parts if mine in part), level)
    return _neighbours(devices, worker_id, above, [min(part).name for part in parts])


def _devices_by_node(members: Iterable[WorkerId]) -> dict[str, list[WorkerId]]:
    devices: dict[str, list[WorkerId]] = {}
    for worker_id in sorted(members):
        devices.setdefault(worker_id.node, []).append(worker_id)
    return devices


def _divide(cell: Sequence[_Key], level: int) -> tuple[_Key, list[list[_Key]]]:
    """Return the parent of a cell, and the others by their digit at a level; by none once the digits are used up."""
    head = min(cell)
    shift = max(0, _HASH_BITS - (level + 1) * _DIGIT_BITS)
    parts: dict[int, list[_Key]] = {}
    for key in cell:
        if key is not head:
            parts.setdefault(key.digits >> shift & (1 << _DIGIT_BITS) - 1, []).append(key)
    return head, [parts[digit] for digit in sorted(parts)]


def _neighbours(
    devices: Mapping[str, Sequence[WorkerId]], worker_id: WorkerId, above: str | None, below: Iterable[str]
) -> Neighbours:
    # The first device alone exchanges messages with other nodes.
    own = devices[worker_id.node]
    position = own.index(worker_id)
    children = own[2 * position + 1 : 2 * position + 3]
    if position:
        return Neighbours(own[(position - 1) // 2], tuple(children))
    parent = None if above is None else devices[above][0]
    return Neighbours(parent, tuple(sorted([*children, *(devices[node][0] for node in below)])))


# Every plan asks for all nodes again.
@lru_cache(maxsize=1 << 15)
def _key_of(node: str) -> _Key:
    # The name alone decides. Rejected: a heap over the pipelines in the plan's order, with chains within them. A
    # pipeline that is given up shifts all that come after it, a rebuild changes everything, and a chain is as long as
    # its pipeline. Python's own hash of a text would not do, either: it differs from process to process.
    digest = blake2b(node.encode(), digest_size=2 * _HASH_BITS // 8).digest()
    half = _HASH_BITS // 8
    return _Key(int.from_bytes(digest[half:]), node, int.from_bytes(digest[:half]))
