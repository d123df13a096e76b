"""From a decision to the orders of all workers, and to all parts of the coordinator that a new plan concerns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from oobleck.control.checkpoints import Candidate, Saving
from oobleck.control.commit import BANK_COPIES, Generations, Progress, sections_wanted
from oobleck.control.data import Sharding
from oobleck.control.events import Effects
from oobleck.control.journal import Action, PlanAdopted
from oobleck.control.protocol import Order
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.schedule import BANKING_KINDS, ScheduleKind

from .going_back import Choice
from .planning import schedules_for
from .replanning import Replanning

__all__ = ["Ordering"]

_ADOPTION_S = 30.0
"""How long a plan may take at least, from its orders to the first step, before it is a hang."""


class Ordering:
    """Orders what was decided."""

    def __init__(
        self,
        job: JobSpec,
        progress: Progress,
        saving: Saving,
        sharding: Sharding,
        replanning: Replanning,
        effects: Effects,
    ) -> None:
        self._job = job
        self._progress = progress
        self._saving = saving
        self._sharding = sharding
        self._replanning = replanning
        self._effects = effects

    def order(
        self,
        choice: Choice,
        generations: Generations,
        worker_ids: tuple[WorkerId, ...],
        now_s: float,
        *,
        lost: Collection[str],
        is_from_scratch: bool,
    ) -> Order:
        """Send everyone the orders of a new generation, and train.

        `lost` are the nodes that have no part any more in the plan in force. With `is_from_scratch`, what is trained
        comes from the model's initial values.
        """
        candidate, decision = choice.candidate, choice.decision
        if Action(decision.action) in (Action.CHECKPOINT, Action.BEGIN_AGAIN):
            self._saving.restored()
        if candidate is not None:
            self._saving.begin_from(candidate.name)
        if choice.goes_back:
            self._progress.go_back(choice.verdict.applied, generation=generations.current)
        order = self._note(choice, generations, lost=lost, is_from_scratch=is_from_scratch)
        self._effects.send_all(worker_ids, order)
        self._sharding.tell(worker_id for worker_id in worker_ids if worker_id in order.plan.layers_at)
        self._progress.foresee(decision.predicted_step_s)
        is_quick = self._progress.last_step > 0 and candidate is None
        self._progress.expect(_ADOPTION_S if is_quick else self._job.control.start_timeout_s)
        self._effects.record(_entry(self._job, choice, order, now_s))
        if not decision.redundant:
            threshold = self._job.fault_threshold
            text = f"redundancy is below f = {threshold}: losing {threshold} more nodes may cost the model's state"
            self._effects.notice("warning", text)
        self._saving.plan_adopted(decision.plan, boundary=order.boundary, redundant=decision.redundant)
        self._replanning.plan_adopted(decision)
        if candidate is not None:
            self._keep(candidate)
        if choice.warning:
            self._effects.notice("warning", choice.warning)
        return order

    def _note(self, choice: Choice, generations: Generations, *, lost: Collection[str], is_from_scratch: bool) -> Order:
        decision, candidate = choice.decision, choice.candidate
        planner = self._replanning.planner
        schedules = schedules_for(self._job, planner.profile, decision.plan)
        has_room = planner.has_room(decision.plan, gradient_copies=BANK_COPIES)
        sections = sections_wanted(self._job, decision.plan, decision.predicted_step_s, has_room=has_room)
        order = generations.order(
            decision,
            choice.verdict,
            schedules=schedules,
            finish=choice.finish,
            lost=lost,
            restore=None if candidate is None else candidate.restore,
            is_from_scratch=is_from_scratch,
            num_sections=sections if all(kind in BANKING_KINDS for kind in schedules) else 1,
        )
        position = None if candidate is None else candidate.position
        version = self._sharding.follow(order, position=position, goes_back=choice.goes_back)
        return replace(order, assignment_version=version)

    def _keep(self, candidate: Candidate) -> None:
        """See to it that the state which is gone back to is on disk."""
        if candidate.is_on_disk:
            self._saving.note_saved(candidate.step)
        elif candidate.step >= self._job.max_steps or self._sharding.has_read_all(candidate.position):
            self._saving.rescue(
                candidate.name,
                step=candidate.step,
                saved_at=candidate.saved_at,
                position=candidate.position,
                held=candidate.held,
            )
        else:
            self._saving.save_now()


def _entry(job: JobSpec, choice: Choice, order: Order, now_s: float) -> PlanAdopted:
    decision = choice.decision
    return PlanAdopted(
        t_s=now_s,
        generation=order.generation,
        plan=decision.plan,
        action=Action(decision.action),
        reason=_with_schedules(job, decision.reason, order.schedules),
        predicted_step_s=decision.predicted_step_s,
        num_layers=decision.plan.num_layers,
        redundant=decision.redundant,
        pipeline_generations=order.pipeline_generations,
        boundary=order.boundary,
        banked=order.banked,
        num_sections=order.num_sections,
        schedules=order.schedules,
        finish=order.finish,
        finished_under=None if order.finish is None else choice.verdict.adopted,
        restored=None if order.restore is None else order.restore.name,
        restored_step=order.boundary if choice.goes_back else None,
        segments=order.segments,
    )


def _with_schedules(job: JobSpec, reason: str, schedules: Sequence[ScheduleKind]) -> str:
    """A plan's reason, with the schedules of its pipelines where it chose them."""
    num_split = sum(kind is ScheduleKind.ZERO_BUBBLE for kind in schedules)
    if job.schedule != "auto" or not num_split:
        return reason
    which = "" if num_split == len(schedules) else f" in {num_split} of {len(schedules)} pipelines"
    return f"{reason}; the zero-bubble schedule{which}"
