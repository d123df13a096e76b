"""What a node check found, in words and numbers: the verdicts, and what each node is.

Pure. What makes a node unfit whatever it measures is decided here: software of another version, devices that are not
there, a full disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from oobleck.job import NodeSpec

from .gpus import GpuFacts, GpuFinding
from .messages import NodeFacts
from .rounds import CheckVerdict, LinkVerdict, NodeVerdict

_LEAST_DISK_BYTES = 1_000_000_000
_MOST_CLOCK_OFFSET_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """A node with all that is known of it."""

    verdict: NodeVerdict
    warnings: tuple[str, ...] = ()
    facts: NodeFacts | None = None
    """None where it could not be reached."""
    clock_offset_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Alone, by measure: the best."""
    gpus: tuple[GpuFacts, ...] = ()
    """Those that the hostfile names."""
    findings: tuple[GpuFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    nodes: tuple[CheckedNode, ...]
    links: tuple[LinkVerdict, ...]
    exchanges: tuple[tuple[str, str, float, float], ...]
    """(node, node, latency in seconds, seconds for 8 MiB each way): the pairs that were tried and answered."""
    num_rounds: int
    elapsed_s: float

    @property
    def is_healthy(self) -> bool:
        return CheckVerdict(nodes=tuple(node.verdict for node in self.nodes), links=self.links).is_healthy

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-able values."""
        return {"healthy": self.is_healthy, **asdict(self)}


def misfit(facts: NodeFacts, spec: NodeSpec, versions: Mapping[str, str]) -> str | None:
    """Why a node cannot take part, in words that say what to change; None where it can.

    `versions` are those of the machine that the master runs on.
    """
    python, ours = facts.versions.get("python", ""), versions["python"]
    if python.split(".")[:2] != ours.split(".")[:2]:
        return f"Python {python} there, {ours} here; name an interpreter of the same version with --python"
    for package in ("oobleck", "torch"):
        found = facts.versions.get(package, "not installed")
        if package in versions and found != versions[package]:
            return f"{package} {found} there, {versions[package]} here; install the same version"
    if facts.cuda_devices and max(spec.devices) >= len(facts.cuda_devices):
        return (
            f"the hostfile asks for device {max(spec.devices)}, and there are {len(facts.cuda_devices)} GPUs; "
            "correct its slots= or devices="
        )
    if facts.free_disk_bytes < _LEAST_DISK_BYTES:
        return f"only {facts.free_disk_bytes / 1e9:.1f} GB are free for logs and checkpoints; make room"
    return None


def warnings_about(facts: NodeFacts, clock_offset_s: float, versions: Mapping[str, str]) -> tuple[str, ...]:
    """What is worth knowing of a node that can take part."""
    differing = [
        f"{package} {found} there, {versions[package]} here"
        for package, found in sorted(facts.versions.items())
        if package in versions and found != versions[package]
    ]
    if abs(clock_offset_s) > _MOST_CLOCK_OFFSET_S:
        differing.append(f"its clock is {clock_offset_s:+.1f} s off; times in its logs will not fit the others'")
    return tuple(differing)
