"""The values that a planner takes and returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from oobleck.errors import ConfigError, PlanningError, shown
from oobleck.json_table import JsonTable
from oobleck.plan import ExecutionPlan, LayerTransfer, PipelineTemplate, WorkerId

from .profiles import NetworkProfile, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """The planner's options. Raises PlanningError that names an impossible one."""

    num_microbatches: int
    """Microbatches in one step, over all pipelines."""
    devices_per_node: int = 1
    max_devices_per_stage: int = 1
    """Stages have 1, 2, 4, … devices of one node, up to this."""
    fault_threshold: int = 1
    """f: simultaneous node losses that never cost state; plans have at least f + 1 pipelines where nodes allow."""
    num_pipelines: int | None = None
    """Exactly this many pipelines where nodes and microbatches allow it; None lets the planner choose."""
    max_redundancy_percent: float | None = None
    """f + 1 pipelines, or as many as possible, only if they make a step at most so much longer; None: at any price."""
    num_stages: int | None = None
    """The most stages of a pipeline."""
    mean_time_to_failure_s: float = 3600.0
    """Expected seconds to the next change, within which a transition has to repay itself."""
    microbatches_per_device: int = 4
    """The microbatches for each device of a pipeline that templates are optimised for: 4 is the paper's 4S."""
    reserved_memory_bytes: int = 0
    """Memory of each device that the model may not use: the context, the allocator's slack."""
    max_sources: int = 16
    """The most holders that a worker reads one layer from."""

    def __post_init__(self) -> None:
        at_least_0 = ("fault_threshold", "reserved_memory_bytes")
        for name in (
            "num_microbatches",
            "devices_per_node",
            "max_devices_per_stage",
            "microbatches_per_device",
            "max_sources",
            *at_least_0,
            "num_pipelines",
            "num_stages",
        ):
            value, least = getattr(self, name), 0 if name in at_least_0 else 1
            if value is not None and value < least:
                raise PlanningError(f"{name} is {value}; it must be at least {least}")
        if (cap := self.max_redundancy_percent) is not None and not (math.isfinite(cap) and cap >= 0):
            raise PlanningError(f"max_redundancy_percent is {cap}; it must be at least 0")
        if not (math.isfinite(self.mean_time_to_failure_s) and self.mean_time_to_failure_s > 0):
            raise PlanningError(f"mean_time_to_failure_s is {self.mean_time_to_failure_s}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes with equal devices."""

    name: str
    profile: Profile
    """The model on one device."""
    devices_per_node: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise PlanningError(f"kind {self.name} has {self.devices_per_node} devices a node; it needs at least 1")


def with_shared_links(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Return the profiles with the slowest links between nodes, which all share; links within nodes stay their own."""
    bytes_per_s = min(each.network.inter_node_bytes_per_s for each in profiles)
    latency_s = max(each.network.inter_node_latency_s for each in profiles)

    def shared(own: NetworkProfile) -> NetworkProfile:
        return replace(own, inter_node_bytes_per_s=bytes_per_s, inter_node_latency_s=latency_s)

    return tuple(replace(profile, network=shared(profile.network)) for profile in profiles)


class Cutter(Protocol):
    """Cuts a pipeline's layers into several chunks a stage, for a schedule that the planner does not know."""

    @property
    def num_chunks(self) -> int:
        """The chunks of a stage that is cut."""

    @property
    def is_open(self) -> bool:
        """Whether pipelines are cut only where that saves time, and choose between 1F1B and zero-bubble otherwise."""

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template cut for these microbatches, or itself; the same object for the same arguments."""

    def most_microbatches(self, template: PipelineTemplate) -> float:
        """Return how many microbatches of its own a template that is cut has memory for; infinity for any number."""

    def step_s(self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] | None = None) -> float:
        """Return the event-exact seconds of a step of a template, cut or not, without the reduction.

        `speeds` are those of the nodes (0.5 takes twice as long); by default, none is slow.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, the reason for it, and the transfers that lead to it."""

    plan: ExecutionPlan
    action: str
    """start, reinstantiate, borrow, merge, rebuild or absorb."""
    reason: str
    transfers: tuple[LayerTransfer, ...]
    predicted_step_s: float
    """The event-exact seconds of a step; the bound where nodes are of several kinds."""
    bound_step_s: float
    """The bound on the seconds of a step by which moves are compared first."""
    redundant: bool
    """At least f + 1 copies of each layer are on different nodes."""

    def to_dict(self) -> dict[str, object]:
        """Return the decision as plain values, for JSON."""
        own = {part.name: getattr(self, part.name) for part in fields(self)}
        moves = [
            {
                "layer": each.layer,
                "source": list(each.source),
                "target": list(each.target),
                "part": each.part,
                "num_parts": each.num_parts,
            }
            for each in self.transfers
        ]
        return {**own, "plan": self.plan.to_dict(), "transfers": moves}

    @classmethod
    def from_dict(cls, values: object) -> Decision:
        """Read what `to_dict` wrote. Raises ConfigError that names the place."""
        table = JsonTable(values, "the decision")
        table.check_keys([part.name for part in fields(cls)])
        return cls(
            plan=ExecutionPlan.from_dict(table.items["plan"]),
            action=table.text("action"),
            reason=table.text("reason"),
            transfers=tuple(
                _transfer_from(JsonTable(each, f"transfer {index}"))
                for index, each in enumerate(table.list("transfers"))
            ),
            predicted_step_s=table.number("predicted_step_s"),
            bound_step_s=table.number("bound_step_s"),
            redundant=table.flag("redundant"),
        )


def _transfer_from(table: JsonTable) -> LayerTransfer:
    table.check_keys([part.name for part in fields(LayerTransfer)])
    return LayerTransfer(
        layer=table.integer("layer"),
        source=_worker_from(table, "source"),
        target=_worker_from(table, "target"),
        part=table.integer("part"),
        num_parts=table.integer("num_parts"),
    )


def _worker_from(table: JsonTable, key: str) -> WorkerId:
    match table.list(key):
        case [str() as node, int() as device]:
            return WorkerId(node, device)
        case other:
            raise ConfigError(f"{table.where}: {key} is {shown(other)}; it must be a node's name and a device's number")
