"""The planner of a job, as a run, a dry run and the simulator make it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oobleck.job import JobSpec
from oobleck.planner import PlannerSettings, Profile

if TYPE_CHECKING:
    from oobleck.planner import Planner

__all__ = ["planner_for"]


def planner_for(job: JobSpec, profile: Profile, *, devices_per_node: int) -> Planner:
    """Return a planner for a job's settings. Raises PlanningError.

    The first call of a process loads numpy, which takes longer than a new master may take to find its nodes.
    """
    from oobleck.planner import TensorParallelPlanner

    settings = PlannerSettings(
        num_microbatches=job.num_microbatches,
        devices_per_node=devices_per_node,
        max_devices_per_stage=1,
        fault_threshold=job.fault_threshold,
        num_pipelines=job.num_pipelines,
    )
    return TensorParallelPlanner(profile, settings, job.tensor_parallel)
