"""Who blocks the others: read from what all survivors wait for, and from whom they can reach.

Two kinds of trouble leave no process dead. Between two nodes the network may be cut: both reach the master, and not
each other. If too many are cut off, the network has failed and not the nodes, and it comes back. Or a worker computes,
or sleeps, for ever: all wait for it, and it waits for none. One that is only slow, on a machine that is busy or was
suspended, comes on within seconds: to end it would help nobody. Nor would it help to end one whose process uses the
processor, or has compilers that do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from oobleck.control.protocol import Activity, Status
from oobleck.planner import WorkerId


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


def is_network_down(statuses: Mapping[WorkerId, Status], cut_off: Collection[str], fault_threshold: int) -> bool:
    """Whether the network is to be suspected, rather than the nodes that are cut off; O(workers · layers).

    It is where more of those that hold layers are cut off than may be lost at once, or where the others do not hold all
    layers. Before anybody holds any, all nodes count.
    """
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
    """The workers that others wait for, and that neither wait for any nor come on; O(workers²).

    The processes of `busy` workers use the processor.
    """
    awaited = {other for answer in answers.values() for other in answer.waits_for}
    return tuple(
        sorted(
            worker_id
            for worker_id, answer in answers.items()
            if worker_id in awaited and not answer.waits_for and not answer.has_come_on and worker_id not in busy
        )
    )
