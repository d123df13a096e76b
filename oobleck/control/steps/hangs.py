"""Which nodes or workers block the others, by what all survivors wait for and which of them they reach.

Two kinds of trouble leave no process dead. The network between two nodes may be cut: both reach the master, but not
each other. If too many are cut off, the network has failed and not the nodes, and it comes back. Or a worker computes
or sleeps endlessly: all wait for it, and it waits for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from oobleck.control.protocol import Activity, Status
from oobleck.planner import WorkerId


def cut_off_nodes(statuses: Mapping[WorkerId, Status]) -> tuple[str, ...]:
    """Return few nodes without which all remaining ones reach each other, chosen greedily; O(pairs²)."""
    pairs = {
        frozenset((worker_id.node, other.node))
        for worker_id, status in statuses.items()
        for other in status.unreachable
        if other in statuses and other.node != worker_id.node
    }
    cut_off: list[str] = []
    while pairs:
        counts = Counter(node for pair in pairs for node in pair)
        # Of two that do not reach each other, the one with more such peers leaves, or else the later by name.
        worst = max(counts, key=lambda node: (counts[node], node))
        cut_off.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(sorted(cut_off))


def is_network_down(statuses: Mapping[WorkerId, Status], cut_off: Collection[str], fault_threshold: int) -> bool:
    """Whether to suspect the network, and not the nodes that are cut off; O(workers · layers)."""
    # The network, if more holders of layers are cut off than may be lost at once, or if the others do not hold all
    # layers. Before any worker holds one, all nodes count.
    holders = {worker_id.node for worker_id, status in statuses.items() if status.layers}
    concerned = (holders or {worker_id.node for worker_id in statuses}).intersection(cut_off)
    others = {
        layer for worker_id, status in statuses.items() if worker_id.node not in cut_off for layer in status.layers
    }
    layers = {layer for status in statuses.values() for layer in status.layers}
    return len(concerned) > fault_threshold or layers != others


def stuck_workers(
    answers: Mapping[WorkerId, Status | Activity], busy: Collection[WorkerId] = ()
) -> tuple[WorkerId, ...]:
    """Return the workers that others wait for, but that neither wait nor make progress nor are busy; O(workers²)."""
    # A worker that is only slow, on a machine that is busy or was suspended, makes progress within seconds, and one
    # whose process or compilers use the processor does so later. Ending those would help no one.
    awaited = {other for answer in answers.values() for other in answer.waits_for}
    return tuple(
        sorted(
            worker_id
            for worker_id, answer in answers.items()
            if worker_id in awaited and not answer.waits_for and not answer.has_come_on and worker_id not in busy
        )
    )
