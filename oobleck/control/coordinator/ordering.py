"""From a decision to its orders: the update that all workers are sent, and what the journal says of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from oobleck.control.commit import PARTIAL_COMMIT_COPIES, Generations, sections_wanted
from oobleck.control.journal import Action, PlanAdopted, PlanCause
from oobleck.control.membership import Membership
from oobleck.control.protocol import PlanUpdate
from oobleck.job import JobSpec
from oobleck.planner import Planner
from oobleck.schedule import SECTIONED_KINDS, ScheduleKind

from .choice import Choice
from .planning import schedules_for
from .recovery.states import PlanOrdered, Recovery

__all__ = ["plan_adopted", "plan_ordered", "plan_update"]


def plan_update(
    job: JobSpec,
    planner: Planner,
    choice: Choice,
    generations: Generations,
    *,
    lost: Collection[str],
    is_from_scratch: bool,
) -> PlanUpdate:
    """Make a choice the newest plan of these generations, and return its orders.

    `lost` are the nodes that have no part any more in the plan in force. With `is_from_scratch`, what is trained comes
    from the model's initial values.
    """
    decision, candidate = choice.decision, choice.candidate
    schedules = schedules_for(job, planner.profile, decision.plan)
    has_room = planner.has_room(decision.plan, gradient_copies=PARTIAL_COMMIT_COPIES)
    sections = sections_wanted(job, decision.plan, decision.predicted_step_s, has_room=has_room)
    return generations.plan_update(
        decision,
        choice.verdict,
        schedules=schedules,
        finish=choice.finish,
        lost=lost,
        restore=None if candidate is None else candidate.restore,
        is_from_scratch=is_from_scratch,
        num_sections=sections if all(kind in SECTIONED_KINDS for kind in schedules) else 1,
    )


def plan_ordered(recovery: Recovery, choice: Choice, update: PlanUpdate, members: Membership) -> PlanOrdered:
    """Return what the recovery has to know of its orders."""
    action = Action(choice.decision.action)
    if recovery.cause is PlanCause.JOINED and any(members[node].restarts for node in recovery.nodes):
        action = Action.RESTART_WORKER
    return PlanOrdered(
        worker_ids=tuple(worker_id for pipeline in update.plan.pipelines for worker_id in pipeline.worker_ids),
        action=action,
        layers_moved=len({(item.layer, item.target) for item in update.transfers}),
        microbatches_redone=choice.microbatches_redone,
        steps_lost=choice.steps_lost,
    )


def plan_adopted(job: JobSpec, choice: Choice, update: PlanUpdate, now_s: float) -> PlanAdopted:
    """Return what the journal says of a plan."""
    decision = choice.decision
    return PlanAdopted(
        t_s=now_s,
        generation=update.generation,
        plan=decision.plan,
        action=Action(decision.action),
        reason=_with_schedules(job, decision.reason, update.schedules),
        predicted_step_s=decision.predicted_step_s,
        num_layers=decision.plan.num_layers,
        redundant=decision.redundant,
        pipeline_generations=update.pipeline_generations,
        boundary=update.boundary,
        partial=update.partial,
        num_sections=update.num_sections,
        schedules=update.schedules,
        finish=update.finish,
        finished_under=None if update.finish is None else choice.verdict.adopted,
        restored=None if update.restore is None else update.restore.name,
        restored_step=update.boundary if choice.goes_back else None,
        segments=update.segments,
    )


def _with_schedules(job: JobSpec, reason: str, schedules: Sequence[ScheduleKind]) -> str:
    """A plan's reason, with the schedules of its pipelines where it chose them."""
    num_split = sum(kind is ScheduleKind.ZERO_BUBBLE for kind in schedules)
    if job.schedule != "auto" or not num_split:
        return reason
    which = "" if num_split == len(schedules) else f" in {num_split} of {len(schedules)} pipelines"
    return f"{reason}; the zero-bubble schedule{which}"
