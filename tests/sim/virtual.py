"""Virtual clusters to test with: a small model whose planning and steps take milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from oobleck.job import ControlSpec, JobSpec, ScalingSpec, ScheduleName
from oobleck.planner import Profile
from oobleck.planner.profiles import LINKS
from oobleck.sim.cluster.run import ClusterRun, run_cluster
from oobleck.sim.cluster.tempo import Delays
from oobleck.sim.trace import Trace, TraceEvent
from tests.control.model import Shape

__all__ = ["STARTED_S", "Setting"]

STARTED_S = 4.0
"""By then, virtual nodes that start together train, if their links are as quick as usual."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster, a job, and what happens to it."""

    events: tuple[TraceEvent, ...] = ()
    num_nodes: int = 4
    nodes_away: tuple[str, ...] = ()
    """Those that are not there at the start."""
    devices: int = 1
    layers_per_device: int = 4
    num_layers: int = 4
    fault_threshold: int = 1
    num_pipelines: int | None = None
    reductions: int = 1
    schedule: ScheduleName = "1f1b"
    duration_s: float = 40.0
    max_steps: int = 1_000_000
    heartbeat_interval_s: float = 0.5
    orphan_timeout_s: float = 20.0
    link_latency_s: float = Delays().link_latency_s
    """Long ones have more under way when something ends."""
    relay_nodes: int = 0
    relay_fanout: int = 2
    has_profile: bool = True
    assumes_network: bool = False
    """Links have to be timed first."""
    scaling: ScalingSpec = field(default_factory=ScalingSpec)
    slowness: float = 1.0
    """How many times as long steps take: long ones are quicker to simulate."""

    @property
    def shape(self) -> Shape:
        return Shape(
            num_nodes=self.num_nodes,
            devices=self.devices,
            num_layers=self.num_layers,
            layers_per_device=self.layers_per_device,
            num_microbatches=8,
            max_steps=self.max_steps,
            fault_threshold=self.fault_threshold,
            num_pipelines=self.num_pipelines,
            reductions=self.reductions,
        )

    @property
    def job(self) -> JobSpec:
        control = ControlSpec(
            heartbeat_interval_s=self.heartbeat_interval_s,
            lease_s=3.0,
            connect_timeout_s=5.0,
            start_timeout_s=30.0,
            orphan_timeout_s=self.orphan_timeout_s,
            relay_nodes=self.relay_nodes,
            relay_fanout=self.relay_fanout,
        )
        return replace(self.shape.job, control=control, scaling=self.scaling, schedule=self.schedule)

    @property
    def profile(self) -> Profile:
        profile = self.shape.profile
        layers = tuple(
            replace(
                layer,
                forward_s={1: self.slowness * layer.forward_s[1]},
                backward_s={1: self.slowness * layer.backward_s[1]},
            )
            for layer in profile.layers
        )
        assumed = LINKS if self.assumes_network else ()
        return replace(profile, layers=layers, network=replace(profile.network, assumed=assumed))

    @property
    def delays(self) -> Delays:
        return Delays(link_latency_s=self.link_latency_s)

    @property
    def trace(self) -> Trace:
        start = tuple(spec.name for spec in self.shape.nodes)
        return Trace(duration_s=self.duration_s, nodes=(*start, *self.nodes_away), start=start, events=self.events)

    def run(self, *, seed: int = 0, keep_decisions: bool = False) -> ClusterRun:
        """Play it. A run that does not end, or that breaks a promise, raises."""
        return run_cluster(
            self.trace,
            job=self.job,
            profile=self.profile,
            seed=seed,
            devices_per_node=self.devices,
            has_profile=self.has_profile,
            delays=self.delays,
            keep_decisions=keep_decisions,
        )
