"""What a planner is asked, what it answers, and what it asks of schedules and nodes: values alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from oobleck.errors import PlanningError
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate

from .profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """The planner's options; PlanningError names the one that is impossible."""

    num_microbatches: int
    """Microbatches in one step, over all pipelines."""
    devices_per_node: int = 1
    max_devices_per_stage: int = 1
    """Stages have 1, 2, 4, … devices of one node, up to this."""
    fault_threshold: int = 1
    """f: simultaneous node losses that never cost state; plans have at least f + 1 pipelines where nodes allow."""
    num_pipelines: int | None = None
    """Exactly this many pipelines, as long as nodes and microbatches allow it; None leaves it to the planner."""
    mean_time_to_failure_s: float = 3600.0
    """Expected seconds to the next change: the time in which a transition has to repay itself."""
    microbatches_per_device: int = 4
    """Templates are the best for this many microbatches for each device of a pipeline: 4 is the paper's 4S."""
    reserved_memory_bytes: int = 0
    """Memory of each device that the model may not have: the context, the allocator's slack."""
    max_sources: int = 16
    """A layer is read from at most this many of its holders at once."""

    def __post_init__(self) -> None:
        for name in (
            "num_microbatches",
            "devices_per_node",
            "max_devices_per_stage",
            "microbatches_per_device",
            "max_sources",
        ):
            if getattr(self, name) < 1:
                raise PlanningError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("fault_threshold", "reserved_memory_bytes"):
            if getattr(self, name) < 0:
                raise PlanningError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.num_pipelines is not None and self.num_pipelines < 1:
            raise PlanningError(f"num_pipelines is {self.num_pipelines}; it must be at least 1")
        if not (math.isfinite(self.mean_time_to_failure_s) and self.mean_time_to_failure_s > 0):
            raise PlanningError(f"mean_time_to_failure_s is {self.mean_time_to_failure_s}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes with equal devices."""

    name: str
    profile: Profile
    """The model on one device of theirs."""
    devices_per_node: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise PlanningError(f"kind {self.name} has {self.devices_per_node} devices a node; it needs at least 1")


def with_shared_links(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Return profiles with the links between nodes that all share: the slowest. Links within nodes stay their own."""
    inter_node_bytes_per_s = min(each.network.inter_node_bytes_per_s for each in profiles)
    inter_node_latency_s = max(each.network.inter_node_latency_s for each in profiles)
    return tuple(
        replace(
            profile,
            network=replace(
                profile.network,
                inter_node_bytes_per_s=inter_node_bytes_per_s,
                inter_node_latency_s=inter_node_latency_s,
            ),
        )
        for profile in profiles
    )


class Cutter(Protocol):
    """Cuts a pipeline's layers into several chunks a stage, for a schedule that the planner does not know."""

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template cut for steps of so many microbatches, or itself; the same object for the same pair."""

    def step_s(self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] | None = None) -> float:
        """Return the event-exact seconds of a step, without the reduction, of a template cut or not.

        `speeds` are those of its nodes, 0.5 for one that takes twice as long; by default, none is slow.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, why it is the one, and how to get there."""

    plan: ExecutionPlan
    action: str
    """start, reinstantiate, borrow, merge, rebuild or absorb."""
    reason: str
    transfers: tuple[LayerTransfer, ...]
    predicted_step_s: float
    redundant: bool
    """At least f + 1 copies of each layer are on different nodes."""
