"""The job whose life a sweep simulates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from oobleck.control.training import planner_for, schedules_for
from oobleck.job import MAX_STEPS, ControlSpec, DataSpec, JobSpec, ScalingSpec, ScheduleName
from oobleck.planner import NodeKind, Planner, Profile
from oobleck.sim.costs import Costs, NodeKinds, StepTimes, costs_for, daly_interval_s, mean_time_to_loss_s
from oobleck.sim.trace import Trace

# No heartbeats are sent in a sweep, which itself times the notice of a silence; the trace says when nodes are back.
_UNTIMED = ControlSpec(lease_s=1e9, rejoin_after_s=0)
_BY_DEVICE = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    profile: Profile
    """The profile of all nodes, or of the first of several kinds."""
    global_batch_size: int
    """In samples."""
    devices_per_node: int = 1
    kinds: tuple[NodeKind, ...] = ()
    """The kinds that a trace names, if it names any."""
    fault_threshold: int = 1
    num_pipelines: int | None = None
    reductions_per_step: int | Literal["auto"] = "auto"
    schedule: ScheduleName = "1f1b"
    num_chunks: int = 2
    """The chunks of each stage in interleaved pipelines."""
    costs: Costs = _BY_DEVICE
    """By default those of the profile's device: on a GPU, NCCL forms groups."""
    checkpoint_interval_s: float | None = None
    """None: Daly's for the trace and the cost of a checkpoint."""
    scaling: ScalingSpec = field(default_factory=ScalingSpec)
    max_steps: int | None = None
    """None: the job ends with the trace."""
    tag: str = "sim"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.costs is _BY_DEVICE:
            object.__setattr__(self, "costs", costs_for(self.profile))

    @property
    def state_bytes(self) -> int:
        """The bytes of a checkpoint."""
        return sum(layer.state_bytes for layer in self.profile.layers)

    def interval_s(self, trace: Trace, *, at_least: int = 1) -> float:
        """Return the seconds between checkpoints of a system that needs one when `at_least` nodes are lost at once.

        Infinity where that never happens.
        """
        if self.checkpoint_interval_s is not None:
            return self.checkpoint_interval_s
        saving_s = self.costs.saving_s(trace.most_nodes, self.state_bytes)
        return daly_interval_s(saving_s, mean_time_to_loss_s(trace, at_least=at_least))

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // self.profile.microbatch_size

    def job(self, max_steps: int, *, is_timed: bool = False) -> JobSpec:
        """Return the coordinator's job, with heartbeats and leases if it `is_timed`."""
        return JobSpec(
            tag=self.tag,
            data=DataSpec(sequence_length=max(2, self.profile.sequence_length)),
            scaling=self.scaling,
            control=ControlSpec(lease_s=self.costs.lease_s) if is_timed else _UNTIMED,
            max_steps=max_steps,
            global_batch_size=self.global_batch_size,
            microbatch_size=self.profile.microbatch_size,
            seed=self.seed,
            fault_threshold=self.fault_threshold,
            num_pipelines=self.num_pipelines,
            reductions_per_step=self.reductions_per_step,
            schedule=self.schedule,
            num_chunks=self.num_chunks,
            device_memory_bytes=self.profile.device.memory_bytes,
            torch_threads=1,
        )

    def nodes_of(self, trace: Trace) -> NodeKinds:
        if self.kinds:
            return NodeKinds(self.kinds, trace.kinds, trace.domains)
        return NodeKinds.alike(self.profile, devices_per_node=self.devices_per_node, domain_of=trace.domains)

    def planner(self) -> Planner:
        """Return a planner like the coordinator's for nodes of one kind."""
        alike = NodeKinds.alike(self.profile, devices_per_node=self.devices_per_node)
        return planner_for(self.job(max_steps=1), alike.named)

    def planner_of(self, trace: Trace) -> Planner:
        """Return a planner like the coordinator's for the nodes of a trace."""
        nodes = self.nodes_of(trace)
        return planner_for(self.job(max_steps=1), nodes.named, nodes.kind_of(trace.nodes), domain_of=nodes.domain_of)


def most_steps(trace: Trace, settings: SweepSettings) -> int:
    """Return the job's steps; without a limit, how many fit into the trace with all its nodes and no failure.

    Raises PlanningError where the nodes do not hold the model.
    """
    most = trace.nodes[: max(count for _, count in trace.counts)]
    planner, nodes = settings.planner_of(trace), settings.nodes_of(trace)
    plan = planner.initial_plan(most).plan
    if settings.max_steps is not None:
        return settings.max_steps
    schedules = schedules_for(settings.job(max_steps=1), nodes.profile, plan, profile_of=nodes.own_profile_of)
    step_s = StepTimes(nodes.profile, profile_of=nodes.own_profile_of).step_s(plan, {}, schedules)
    return min(MAX_STEPS, int(trace.duration_s / step_s) + 1)
