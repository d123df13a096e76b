"""The planner of a job and its schedules, as a run, a dry run and the simulator make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, PlannerSettings, Profile
from oobleck.schedule import ScheduleKind

if TYPE_CHECKING:
    from oobleck.planner import Planner

__all__ = ["fixed_schedule", "planner_for", "schedules_for"]


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


def fixed_schedule(job: JobSpec) -> ScheduleKind | None:
    """Return the schedule of all pipelines of a job; None where each plan chooses.

    Devices that share stages, and compiled blocks, take a backward pass whole: there is nothing to choose.
    """
    if job.schedule != "auto":
        return ScheduleKind(job.schedule)
    return ScheduleKind.ONE_F_ONE_B if job.tensor_parallel > 1 or job.compile else None


def schedules_for(job: JobSpec, profile: Profile, plan: ExecutionPlan) -> tuple[ScheduleKind, ...]:
    """Return the schedule of each pipeline of a plan; O(instructions of the distinct ones) where plans choose."""
    kind = fixed_schedule(job)
    if kind is not None:
        return (kind,) * len(plan.pipelines)
    from oobleck.schedule.forecast import forecast

    kinds = {
        index: each.timeline.schedule.kind
        for each in forecast(profile, plan, kind=None).pipelines
        for index in each.pipelines
    }
    return tuple(kinds[index] for index in range(len(plan.pipelines)))
