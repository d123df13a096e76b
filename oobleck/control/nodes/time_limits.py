"""How long things may take before something is wrong: by how many take part in them, and by what was measured.

One process answers for all nodes, so what all do together takes it so much a node, however quick each is by itself. A
limit without that share ends what is well as soon as a cluster is large enough. Each share is several times what
`tools/bench/control_plane.py` measured on a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterable

_FEW = 64
"""So many take no more than the least limits allow."""
_START_S = 0.15
"""Of a start: SSH's cryptography, an agent, its workers. 53 ms were measured through SSH."""
_ATTACH_S = 0.06
"""Of a takeover, likewise: 21 ms."""
_READ_S = 2e-4
"""Of a message that waits to be read: 60 us."""
_ADOPT_S = 0.01
"""Of a recovery: a fence, an answer, a plan update and its report. 2 ms were measured without SSH, 4 ms through it."""
_FAREWELL_S = 0.005
_LEAST_ADOPTION_S = 30.0
_TIMES_AS_LONG = 3
"""As the slowest of the latest."""


def starting_s(start_timeout_s: float, num_nodes: int) -> float:
    """From the start of a run, or of a takeover, until all train."""
    return start_timeout_s + _START_S * _others(num_nodes)


def attaching_s(connect_timeout_s: float, num_nodes: int) -> float:
    """Until a new master has reached all nodes that the one before had."""
    return connect_timeout_s + _ATTACH_S * _others(num_nodes)


def reading_s(least_s: float, num_peers: int) -> float:
    """Until what peers have sent by now is read."""
    return least_s + _READ_S * _others(num_peers)


def adopting_s(num_workers: int, measured_s: Iterable[float]) -> float:
    """From a plan's orders to its first step, by how long the latest plans have taken."""
    return max(
        [_LEAST_ADOPTION_S + _ADOPT_S * _others(num_workers), *(_TIMES_AS_LONG * each_s for each_s in measured_s)]
    )


def saying_farewell_s(least_s: float, num_nodes: int) -> float:
    """Until all agents have ended what they have, once they are asked to."""
    return least_s + _FAREWELL_S * _others(num_nodes)


def _others(number: int) -> int:
    return max(0, number - _FEW)
