"""Messages between a node check and its probes, one on each node.

The two nodes of a pair exchange values through the checker (`PairValue`) until they are connected.
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
    """Exchange data with a peer, which does the same."""

    key: str
    nodes: tuple[str, str]
    address: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairValue:
    """A value for the other node of a pair; the checker passes it on."""

    key: str
    value: bytes
    nodes: tuple[str, ...]


ProbeRequest = MeasureAlone | MeasurePair | PairValue


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is; its probe's first message."""

    pid: int
    hostname: str
    machine: str = ""
    """Identifies the machine, whatever its names."""
    clock_s: float
    """The wall clock, seconds since 1970."""
    versions: Mapping[str, str]
    """Versions of Python and of the packages that matter to a run."""
    num_cpus: int
    """How many the probe may use."""
    socket: str = ""
    """The path of a UNIX socket at which the probe listens, as an agent would."""
    cuda_devices: tuple[str, ...] = ()
    free_disk_bytes: int = 0
    """Free space where runs keep their files."""
    memory_bytes: int = 0
    """How much the probe may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoloDone:
    """Seconds for a unit of work, by measure: the best of several tries."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    gpus: tuple[GpuFacts, ...] = ()
    """Their state while they computed."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDone:
    key: str
    seconds: float | None = None
    latency_s: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    reason: str


ProbeAnswer = NodeFacts | SoloDone | PairDone | ProbeFailed | PairValue
