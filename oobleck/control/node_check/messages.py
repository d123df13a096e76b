"""What a node check and its probes, one on each node, say to each other: frozen values, like the run's own messages.

Rendezvous keys go through the checker (`StorePut`), so that no port is open for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.control.protocol import StorePut

__all__ = [
    "MeasureAlone",
    "MeasurePair",
    "NodeFacts",
    "PairDone",
    "ProbeAnswer",
    "ProbeFailed",
    "ProbeRequest",
    "SoloDone",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureAlone:
    """Measure the node alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurePair:
    """Exchange with a peer that is asked the same."""

    key: str
    """Of this test; names the keys that the two exchange."""
    nodes: tuple[str, str]
    address: str
    """Where this node listens."""
    timeout_s: float


ProbeRequest = MeasureAlone | MeasurePair | StorePut


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is; the first thing that its probe says."""

    pid: int
    hostname: str
    clock_s: float
    """The wall clock, seconds since 1970."""
    versions: Mapping[str, str]
    """Of Python and of the packages that decide what runs."""
    num_cpus: int
    """That the probe may use."""
    cuda_devices: tuple[str, ...] = ()
    free_disk_bytes: int = 0
    """Where runs keep their files."""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloDone:
    """Seconds for a unit of work, by measure: the best of several tries."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDone:
    key: str
    seconds: float | None = None
    latency_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    """The probe itself failed, and ends."""

    reason: str


ProbeAnswer = NodeFacts | SoloDone | PairDone | ProbeFailed | StorePut
