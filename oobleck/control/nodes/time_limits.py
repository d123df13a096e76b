"""How long things may take before something is wrong, by how many nodes take part and by what was measured.

One master serves all nodes, so a joint action costs it some time for each of them, however quick each one is. A limit
without that share would end healthy runs on large clusters. Each share is several times what
`tools/bench/control_plane.py` measured on a busy machine.
"""

from __future__ import annotations

from collections.abc import Iterable

_FEW = 64
"""Up to this many nodes, the least limits suffice."""
_START_S = 0.15
"""A node's start: SSH's cryptography, an agent, its workers. Measured: 53 ms through SSH."""
_ATTACH_S = 0.06
"""A node's share of a takeover. Measured: 21 ms."""
_READ_S = 2e-4
"""A message that waits to be read. Measured: 60 us."""
_ADOPT_S = 0.01
"""A worker's share of a recovery: a fence, an answer, a plan update, a report. Measured: 2 ms, 4 ms through SSH."""
_FAREWELL_S = 0.005
_LEAST_ADOPTION_S = 30.0
_TIMES_AS_LONG = 3
"""A plan may take this many times as long as the slowest of the latest."""


def starting_s(start_timeout_s: float, num_nodes: int) -> float:
    """Limit the time from the start of a run, or of a takeover, until all nodes train."""
    return start_timeout_s + _START_S * _others(num_nodes)


def attaching_s(connect_timeout_s: float, num_nodes: int) -> float:
    """Limit the time until a new master has reached all nodes of the one before."""
    return connect_timeout_s + _ATTACH_S * _others(num_nodes)


def reading_s(least_s: float, num_peers: int) -> float:
    """Limit the time until the messages that peers have sent by now are read."""
    return least_s + _READ_S * _others(num_peers)


def adopting_s(num_workers: int, measured_s: Iterable[float]) -> float:
    """Limit the time from a plan's orders to its first step, by how long the latest plans have taken."""
    return max(
        [_LEAST_ADOPTION_S + _ADOPT_S * _others(num_workers), *(_TIMES_AS_LONG * each_s for each_s in measured_s)]
    )


def saying_farewell_s(least_s: float, num_nodes: int) -> float:
    """Limit the time until all agents have ended, once they are asked to."""
    return least_s + _FAREWELL_S * _others(num_nodes)


def _others(number: int) -> int:
    return max(0, number - _FEW)
