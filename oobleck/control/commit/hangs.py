"""Who blocks the others: read from what all survivors wait for, and from whom they can reach.

Two kinds of trouble leave no process dead. Between two nodes the network may be cut: both reach the master, and not
each other. Or a worker computes, or sleeps, for ever: all wait for it, and it waits for none. One that is only slow, on
a machine that is busy or was suspended, comes on within seconds: to end it would help nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from oobleck.control.protocol import Status
from oobleck.planner import WorkerId

__all__ = ["cut_off_nodes", "stuck_workers"]


def cut_off_nodes(statuses: Mapping[WorkerId, Status]) -> tuple[str, ...]:
    """The fewest nodes, greedily, without which all that are left reach each other; O(pairs²).

    Of two that do not reach each other the one with more such peers goes, then the later by name.
    """
    pairs = {
        frozenset((worker_id.node, other.node))
        for worker_id, status in statuses.items()
        for other in status.unreachable
        if other in statuses and other.node != worker_id.node
    }
    cut_off: list[str] = []
    while pairs:
        counts = Counter(node for pair in pairs for node in pair)
        worst = max(counts, key=lambda node: (counts[node], node))
        cut_off.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(sorted(cut_off))


def stuck_workers(statuses: Mapping[WorkerId, Status]) -> tuple[WorkerId, ...]:
    """The workers that others wait for, and that neither wait for any nor come on; O(workers²)."""
    awaited = {other for status in statuses.values() for other in status.waits_for}
    return tuple(
        sorted(
            worker_id
            for worker_id, status in statuses.items()
            if worker_id in awaited and not status.waits_for and not status.has_come_on
        )
    )
