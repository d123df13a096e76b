"""Whether peers can be reached where they listen (`peer_links.py`).

Process groups hang for ever when packets are dropped between two nodes that both reach the master. When no step is
committed any more, all workers probe each other: one that does not answer is cut off, or gone.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from oobleck.control.protocol import WorkerAddress
from oobleck.planner import WorkerId

_PROBE_TIMEOUT_S = 0.5
_MAX_PARALLEL = 32


def probe_all(addresses: Sequence[WorkerAddress]) -> tuple[WorkerId, ...]:
    """Connect to all of them; returns those that do not answer. Takes half a second at most for 32 of them."""
    if not addresses:
        return ()
    with ThreadPoolExecutor(min(len(addresses), _MAX_PARALLEL)) as pool:
        answers = pool.map(_answers, addresses)
        return tuple(each.worker_id for each, answers_ in zip(addresses, answers, strict=True) if not answers_)


def _answers(address: WorkerAddress) -> bool:
    try:
        socket.create_connection((address.host, address.port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
