"""The planner of a job and its schedules, as a run, a dry run and the simulator make them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from oobleck.errors import PlanningError
from oobleck.job import JobSpec, Sharding
from oobleck.planner import Decision, ExecutionPlan, NodeKind, PlannerSettings, Profile
from oobleck.schedule import ScheduleKind

if TYPE_CHECKING:
    from oobleck.planner import Planner

_CLEARLY_SHORTER = 0.03
"""The part of a step that is worth more exchanges, which hide behind passes less than a prediction says."""


def planner_for(
    job: JobSpec,
    kinds: Sequence[NodeKind],
    kind_of: Mapping[str, str] | None = None,
    *,
    domain_of: Mapping[str, str] | None = None,
    sharding: Sharding | None = None,
) -> Planner:
    """Return a planner for a job's settings, and for nodes of one kind or of several. Raises PlanningError.

    `kind_of` names each node's kind if there are several, `domain_of` the failure domains that are known; both may
    grow. `sharding` is what devices share out where the job leaves that to the planner (`choose_sharding`), by default
    as little as the job allows. The first call of a process loads numpy.
    """
    # At the module's top, these would load numpy before a new master looks for its nodes.
    from oobleck.planner import Planner
    from oobleck.schedule.interleaving import make_cutter

    check_possible(job, kinds=[kind.name for kind in kinds], num_layers=kinds[0].profile.num_layers)
    settings = PlannerSettings(
        num_microbatches=job.num_microbatches,
        fault_threshold=job.fault_threshold,
        num_pipelines=job.num_pipelines,
        max_redundancy_percent=job.max_redundancy_percent,
        mean_time_to_failure_s=job.change_interval_s,
        num_stages=job.num_stages,
    )
    # The planner takes the first of equally fast plans, which must not depend on which profile was known first.
    by_name = sorted(kinds, key=lambda kind: kind.name)
    cutter = make_cutter(fixed_schedule(job), job.num_chunks)
    return Planner(
        by_name,
        settings,
        kind_of,
        domain_of=domain_of,
        tensor_parallel=job.devices_per_stage,
        sharding=sharding or job.shardings[0],
        is_cast=job.dtype in ("bfloat16", "float16"),
        make_cutter=cutter,
    )


def choose_sharding(
    job: JobSpec, make_planner: Callable[[Sharding], Planner], nodes: Sequence[str]
) -> tuple[Sharding, tuple[tuple[Sharding, float | None], ...]]:
    """Return what devices share out under the first plan of these nodes, and the seconds of a step of each choice.

    These are None where there is no plan. The choice keeps f + 1 copies of each layer if any does; beside that, devices
    exchange more only for a clearly shorter step. Raises PlanningError if there is no plan at all.
    """
    seconds: list[tuple[Sharding, float | None]] = []
    best: Decision | None = None
    chosen = job.shardings[0]
    for sharding in job.shardings:
        try:
            decision = make_planner(sharding).initial_plan(nodes)
        except PlanningError as error:
            last = error
            seconds.append((sharding, None))
            continue
        seconds.append((sharding, decision.predicted_step_s))
        is_shorter = best is not None and decision.predicted_step_s < best.predicted_step_s * (1 - _CLEARLY_SHORTER)
        if best is None or (decision.redundant, is_shorter) > (best.redundant, False):
            best, chosen = decision, sharding
    if best is None:
        raise last
    return chosen, tuple(seconds)


def check_possible(job: JobSpec, *, kinds: Collection[str] = (), num_layers: int | None = None) -> None:
    """Raise PlanningError if no plan of these kinds of nodes, or of this many layers, can do what a job asks for."""
    least = 2 * job.num_chunks
    if job.schedule == "interleaved" and num_layers is not None and num_layers < least:
        raise PlanningError(
            f"num_chunks is {job.num_chunks}: two stages of that many chunks need {least} layers, and the model has "
            f"{num_layers}; lower it, or leave it out and choose another schedule"
        )
    if len(kinds) <= 1:
        return
    nodes = f"nodes are of {len(kinds)} kinds ({', '.join(kinds)})"
    if job.devices_per_stage > 1:
        key = "tensor_parallel" if job.sharding == "none" else "sharding_devices"
        raise PlanningError(
            f"{key} is {job.devices_per_stage}, and {nodes}; stages on several devices need nodes of one kind"
        )
    if job.schedule == "interleaved":
        raise PlanningError(
            f"schedule is interleaved, and {nodes}; their pipelines have one chunk a stage: "
            "choose 1f1b, zero-bubble or auto"
        )


def fixed_schedule(job: JobSpec) -> ScheduleKind | None:
    """Return the schedule of all pipelines of a job; None if each plan chooses.

    A pipeline of an interleaved job that has too few layers or too little memory for several chunks a stage runs 1F1B.
    """
    if job.schedule != "auto":
        return ScheduleKind(job.schedule)
    # Devices that share stages, and compiled blocks, take a backward pass whole, which leaves no choice.
    return ScheduleKind.ONE_F_ONE_B if job.devices_per_stage > 1 or job.compile else None


def schedules_for(
    job: JobSpec, profile: Profile, plan: ExecutionPlan, *, profile_of: Callable[[str], Profile] | None = None
) -> tuple[ScheduleKind, ...]:
    """Return the schedule of each pipeline of a plan; O(instructions of the distinct ones) if the plan chooses.

    `profile_of` returns the profile of each node's kind if there are several.
    """
    kind = fixed_schedule(job)
    if kind is ScheduleKind.INTERLEAVED:
        from oobleck.schedule.choice import kind_for

        return tuple(kind_for(pipeline.template, kind) for pipeline in plan.pipelines)
    if kind is not None:
        return (kind,) * len(plan.pipelines)
    from oobleck.schedule.forecast import forecast

    kinds = {
        index: each.timeline.schedule.kind
        for each in forecast(profile, plan, kind=None, profile_of=profile_of).pipelines
        for index in each.pipelines
    }
    return tuple(kinds[index] for index in range(len(plan.pipelines)))
