"""The planner of a job and its schedules, as a run, a dry run and the simulator make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, PlannerSettings, Profile
from oobleck.schedule import ScheduleKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from oobleck.planner import Cutter, Planner

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
    return TensorParallelPlanner(profile, settings, job.tensor_parallel, make_cutter=_cutter_for(job))


def _cutter_for(job: JobSpec) -> Callable[[Profile], Cutter] | None:
    """What cuts the pipelines of a job into chunks; None where none is interleaved."""
    from oobleck.schedule.interleaving import make_cutter

    return make_cutter(fixed_schedule(job), job.num_chunks)


def fixed_schedule(job: JobSpec) -> ScheduleKind | None:
    """Return the schedule of all pipelines of a job; None where each plan chooses.

    Interleaved are those of several chunks a stage; a pipeline that has too few layers for that, or too little memory,
    runs 1F1B.
    Devices that share stages, and compiled blocks, take a backward pass whole: there is nothing to choose.
    """
    if job.schedule != "auto":
        return ScheduleKind(job.schedule)
    return ScheduleKind.ONE_F_ONE_B if job.tensor_parallel > 1 or job.compile else None


def schedules_for(job: JobSpec, profile: Profile, plan: ExecutionPlan) -> tuple[ScheduleKind, ...]:
    """Return the schedule of each pipeline of a plan; O(instructions of the distinct ones) where plans choose."""
    kind = fixed_schedule(job)
    if kind is ScheduleKind.INTERLEAVED:
        from oobleck.schedule.choice import kind_for

        return tuple(kind_for(pipeline.template, kind) for pipeline in plan.pipelines)
    if kind is not None:
        return (kind,) * len(plan.pipelines)
    from oobleck.schedule.forecast import forecast

    kinds = {
        index: each.timeline.schedule.kind
        for each in forecast(profile, plan, kind=None).pipelines
        for index in each.pipelines
    }
    return tuple(kinds[index] for index in range(len(plan.pipelines)))
