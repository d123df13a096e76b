"""What a node check and its probes, one on each node, say to each other: frozen values, like the run's own messages.

What the two of a pair exchange to connect goes through the checker (`PairValue`), which is all that both reach yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .gpus import GpuFacts


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
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValue:
    """What a node has others of its pair know; the checker passes it on."""

    key: str
    value: bytes
    nodes: tuple[str, ...]


ProbeRequest = MeasureAlone | MeasurePair | PairValue


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is; the first thing that its probe says."""

    pid: int
    hostname: str
    machine: str = ""
    """Identifies the machine among all, whatever it is called."""
    clock_s: float
    """The wall clock, seconds since 1970."""
    versions: Mapping[str, str]
    """Of Python and of the packages that decide what runs."""
    num_cpus: int
    """That the probe may use."""
    socket: str = ""
    """The path of a UNIX socket at which the probe listens, as an agent would."""
    cuda_devices: tuple[str, ...] = ()
    free_disk_bytes: int = 0
    """Where runs keep their files."""
    memory_bytes: int = 0
    """That the probe may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloDone:
    """Seconds for a unit of work, by measure: the best of several tries."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] = ()
    """As they were found while they computed."""
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


ProbeAnswer = NodeFacts | SoloDone | PairDone | ProbeFailed | PairValue
