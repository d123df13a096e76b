"""The shape of the tree: who is whose child follows from their positions alone.

With a fan-out of F, positions 0 to F - 1 speak to the master itself, and position p is the relay of F(p + 1) to
F(p + 1) + F - 1. So nobody sends lists of who is below whom, and three levels have 33,824 positions for F = 32.
"""

from __future__ import annotations


def parent_of(position: int, fanout: int) -> int | None:
    """Return the position of its relay; None for those that speak to the master."""
    return None if position < fanout else position // fanout - 1


def children_of(position: int, fanout: int) -> range:
    """Return the positions whose relay this one is."""
    first = fanout * (position + 1)
    return range(first, first + fanout)


def child_towards(position: int, target: int, fanout: int) -> int | None:
    """Return the child of `position` that is `target` or leads to it; None where it is not below. O(depth)."""
    at: int | None = target
    while at is not None and at > position:
        above = parent_of(at, fanout)
        if above == position:
            return at
        at = above
    return None
