"""From a decision to the orders of all workers, and to all parts of the coordinator that a new plan concerns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from oobleck.control.checkpoints import Candidate, Saving
from oobleck.control.commit import PARTIAL_COMMIT_COPIES, Generations, Progress, sections_wanted
from oobleck.control.data import Sharding
from oobleck.control.events import Effects
from oobleck.control.journal import Action, PlanAdopted
from oobleck.control.protocol import PlanUpdate
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.schedule import SECTIONED_KINDS, ScheduleKind

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

    def update(
        self,
        choice: Choice,
        generations: Generations,
        worker_ids: tuple[WorkerId, ...],
        now_s: float,
        *,
        lost: Collection[str],
        is_from_scratch: bool,
    ) -> PlanUpdate:
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
        update = self._note(choice, generations, lost=lost, is_from_scratch=is_from_scratch)
        self._effects.send_all(worker_ids, update)
        self._sharding.tell(worker_id for worker_id in worker_ids if worker_id in update.plan.layers_at)
        self._progress.foresee(decision.predicted_step_s)
        is_quick = self._progress.last_step > 0 and candidate is None
        self._progress.expect(_ADOPTION_S if is_quick else self._job.control.start_timeout_s)
        self._effects.record(_entry(self._job, choice, update, now_s))
        if not decision.redundant:
            threshold = self._job.fault_threshold
            text = f"redundancy is below f = {threshold}: losing {threshold} more nodes may cost the model's state"
            self._effects.notice("warning", text)
        self._saving.plan_adopted(decision.plan, boundary=update.boundary, redundant=decision.redundant)
        self._replanning.plan_adopted(decision)
        if candidate is not None:
            self._keep(candidate)
        if choice.warning:
            self._effects.notice("warning", choice.warning)
        return update

    def _note(
        self, choice: Choice, generations: Generations, *, lost: Collection[str], is_from_scratch: bool
    ) -> PlanUpdate:
        decision, candidate = choice.decision, choice.candidate
        planner = self._replanning.planner
        schedules = schedules_for(self._job, planner.profile, decision.plan)
        has_room = planner.has_room(decision.plan, gradient_copies=PARTIAL_COMMIT_COPIES)
        sections = sections_wanted(self._job, decision.plan, decision.predicted_step_s, has_room=has_room)
        update = generations.plan_update(
            decision,
            choice.verdict,
            schedules=schedules,
            finish=choice.finish,
            lost=lost,
            restore=None if candidate is None else candidate.restore,
            is_from_scratch=is_from_scratch,
            num_sections=sections if all(kind in SECTIONED_KINDS for kind in schedules) else 1,
        )
        position = None if candidate is None else candidate.position
        version = self._sharding.follow(update, position=position, goes_back=choice.goes_back)
        return replace(update, assignment_version=version)

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


def _entry(job: JobSpec, choice: Choice, update: PlanUpdate, now_s: float) -> PlanAdopted:
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
