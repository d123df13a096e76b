"""The results of a node check in words and numbers: the verdicts, and what each node is. Pure.

Also decides what makes a node unfit whatever it measures: other versions of software, missing devices, a full disk.
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
    verdict: NodeVerdict
    warnings: tuple[str, ...] = ()
    facts: NodeFacts | None = None
    """None if it could not be reached."""
    clock_offset_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Its best times alone, keyed by measure."""
    gpus: tuple[GpuFacts, ...] = ()
    """The GPUs that the hostfile names."""
    findings: tuple[GpuFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    nodes: tuple[CheckedNode, ...]
    links: tuple[LinkVerdict, ...]
    exchanges: tuple[tuple[str, str, float, float], ...]
    """(node, node, latency in seconds, seconds for 8 MiB each way) of the pairs that answered."""
    num_rounds: int
    elapsed_s: float

    @property
    def is_healthy(self) -> bool:
        return CheckVerdict(nodes=tuple(node.verdict for node in self.nodes), links=self.links).is_healthy

    def to_dict(self) -> dict[str, object]:
        return {"healthy": self.is_healthy, **asdict(self)}


def misfit(facts: NodeFacts, spec: NodeSpec, versions: Mapping[str, str]) -> str | None:
    """Return why a node cannot take part, and what to change; None if it can. `versions` are the master's."""
    python, ours = facts.versions.get("python", ""), versions["python"]
    # Patch releases are compatible; another minor version may lack syntax and packages.
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
    """Return what is worth knowing about a node that can take part."""
    differing = [
        f"{package} {found} there, {versions[package]} here"
        for package, found in sorted(facts.versions.items())
        if package in versions and found != versions[package]
    ]
    if abs(clock_offset_s) > _MOST_CLOCK_OFFSET_S:
        differing.append(f"its clock is {clock_offset_s:+.1f} s off; times in its logs will not fit the others'")
    return tuple(differing)
