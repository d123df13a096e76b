"""What a user decides about plans."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oobleck.errors import PlanningError


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
