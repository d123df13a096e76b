"""What was decided after a loss, or at the start: a plan, how the workers come to it, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from oobleck.control.checkpoints import Candidate
from oobleck.control.journal import Action, PlanAdopted, PlanCause
from oobleck.control.nodes import Membership
from oobleck.control.protocol import PlanUpdate
from oobleck.control.recovery import PlanOrdered, Recovery
from oobleck.control.steps import Verdict
from oobleck.job import JobSpec
from oobleck.planner import Decision
from oobleck.schedule import ScheduleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan to order, and how the survivors come to it."""

    decision: Decision
    verdict: Verdict
    finish: int | None = None
    """The step in flight, where it is finished before."""
    goes_back: bool = False
    """All go back to a checkpoint, or, without a candidate, to the model's initial values."""
    candidate: Candidate | None = None
    steps_lost: int = 0
    microbatches_redone: int = 0
    warning: str = ""
    """What people should know of it."""


def to_checkpoint(decision: Decision, candidate: Candidate, *, steps_lost: int = 0) -> Choice:
    """Send all workers back to a checkpoint, under this plan."""
    verdict = Verdict(applied=candidate.step, catch_up=None, adopted=None, held=candidate.held)
    return Choice(decision=decision, verdict=verdict, goes_back=True, candidate=candidate, steps_lost=steps_lost)


def plan_ordered(recovery: Recovery, choice: Choice, update: PlanUpdate, members: Membership) -> PlanOrdered:
    """Return what the recovery needs to know of its orders."""
    action = Action(choice.decision.action)
    if recovery.cause is PlanCause.JOINED and any(members[node].restarts for node in recovery.nodes):
        action = Action.RESTART_WORKER
    return PlanOrdered(
        worker_ids=tuple(chain.from_iterable([pipeline.worker_ids for pipeline in update.plan.pipelines])),
        action=action,
        layers_moved=len({(item.layer, item.target) for item in update.transfers}),
        microbatches_redone=choice.microbatches_redone,
        steps_lost=choice.steps_lost,
    )


def plan_adopted(job: JobSpec, choice: Choice, update: PlanUpdate, now_s: float, *, oldest: int) -> PlanAdopted:
    """Return what the journal says of a plan; workers may have plans in force that are as old as `oldest`."""
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
        oldest=oldest,
    )


def _with_schedules(job: JobSpec, reason: str, schedules: Sequence[ScheduleKind]) -> str:
    """A plan's reason, with the schedules of its pipelines where it chose them."""
    if job.schedule != "auto":
        return reason
    for kind in (ScheduleKind.ZERO_BUBBLE, ScheduleKind.INTERLEAVED):
        if number := schedules.count(kind):
            which = "" if number == len(schedules) else f" in {number} of {len(schedules)} pipelines"
            reason = f"{reason}; the {kind.value} schedule{which}"
    return reason
