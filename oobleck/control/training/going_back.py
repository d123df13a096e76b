"""What to do when a layer has no living copy: go back to a checkpoint, or start again from the initial values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.events import EndRun
from oobleck.control.journal import Action
from oobleck.control.nodes import Membership
from oobleck.control.protocol import Status
from oobleck.control.recovery import CheckpointWanted, Recovery
from oobleck.control.steps import Progress, Verdict
from oobleck.errors import ExitCode, PlanningError, Unrecoverable
from oobleck.planner import Decision, ExecutionPlan, WorkerId

from .choice import Choice, to_checkpoint
from .replanning import Replanning
from .requests import Effects, LocateCheckpoints, ReportProblems

_NOBODY: frozenset[str] = frozenset()
"""The nodes whose state is lost when all go back: none, for all can read what they go back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where what is trained comes from."""

    restored_generation: int = 0
    """The generation in which the run last went back; what was adopted before is ignored."""
    is_from_scratch: bool = True
    """What is trained comes from the model's initial values, not from a checkpoint."""
    began_from_scratch: bool = True
    """So the run began. Then nothing is lost for good if all start from those values again."""

    def since_restored(self, statuses: Mapping[WorkerId, Status]) -> Mapping[WorkerId, Status]:
        """Ignore what workers hold from before the run went back to a checkpoint."""
        if not self.restored_generation:
            return statuses
        return {
            worker_id: status if status.adopted >= self.restored_generation else _emptied(status)
            for worker_id, status in statuses.items()
        }


def _emptied(status: Status) -> Status:
    return replace(
        status, applied=0, last_record=None, reduced=None, adopted=0, layers=(), partial=None, section_reduced=None
    )


def cannot_go_on(nodes: tuple[str, ...], error: Exception) -> str:
    return f"cannot continue after losing {', '.join(nodes)}: {error}"


class GoingBack:
    """Knows which checkpoints there are, through its parts."""

    def __init__(
        self, members: Membership, progress: Progress, saving: Saving, restoring: Restoring, replanning: Replanning
    ) -> None:
        self._members = members
        self._progress = progress
        self._saving = saving
        self._restoring = restoring
        self._replanning = replanning

    @property
    def exit_code(self) -> int:
        """Of a run that has too few nodes left: it can be resumed with a checkpoint, or if they were taken away."""
        can_resume = bool(self._saving.complete) or self._members.are_taken_away
        return ExitCode.RESUMABLE if can_resume else ExitCode.FAILED

    def choose(
        self, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage, now_s: float
    ) -> Effects:
        """Go back to the newest checkpoint, once workers have reported what they can read."""
        if not self._saving.is_enabled:
            return (self._begin_again(base, error, recovery, lineage),)
        if not self._restoring.is_answered(recovery.asked):
            if math.isinf(recovery.found_by_s):
                return (LocateCheckpoints(worker_ids=recovery.asked), CheckpointWanted())
            if now_s < recovery.found_by_s:
                return (CheckpointWanted(),)
        candidate = self._restoring.newest_of_this_run(base.num_layers)
        if candidate is None:
            return (ReportProblems(), self._begin_again(base, error, recovery, lineage))
        held = {worker_id: layers for worker_id, layers in candidate.held.items() if worker_id in recovery.asked}
        decision = self._replan(base, held, recovery)
        if isinstance(decision, EndRun):
            return (ReportProblems(), decision)
        reason = f"{error}; back to the checkpoint of step {candidate.step}: {decision.reason}"
        steps_lost = max(0, self._progress.last_step - candidate.step)
        decision = replace(decision, action=Action.CHECKPOINT, reason=reason)
        return (ReportProblems(), to_checkpoint(decision, candidate, steps_lost=steps_lost))

    def _begin_again(
        self, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage
    ) -> Choice | EndRun:
        """Nothing is saved: start from the model's initial values, if the state was lost with workers only.

        The run ends if a lost node held the last copy of a layer, or if the run began from a checkpoint that is
        gone.
        """
        living = {member.spec.name for member in self._members.living}
        here = {layer for worker_id, layers in base.layers_at.items() if worker_id.node in living for layer in layers}
        if not lineage.began_from_scratch or not here.issuperset(error.layers):
            nothing = ", and there is no checkpoint to go back to" if self._saving.is_enabled else ""
            return EndRun(exit_code=self.exit_code, reason=f"{cannot_go_on(recovery.nodes, error)}{nothing}")
        decision = self._replan(base, dict.fromkeys(recovery.asked, frozenset(range(base.num_layers))), recovery)
        if isinstance(decision, EndRun):
            return decision
        step = self._progress.last_step
        what = f"no checkpoint: all {step} steps are run again, from the model's initial values"
        reason = f"{error}; {what}: {decision.reason}"
        return Choice(
            decision=replace(decision, action=Action.BEGIN_AGAIN, reason=reason, transfers=()),
            verdict=Verdict(applied=0, catch_up=None, adopted=None, held={}),
            goes_back=True,
            steps_lost=step,
            warning=f"{error}, and there is {what}",
        )

    def _replan(
        self, base: ExecutionPlan, held: Mapping[WorkerId, frozenset[int]], recovery: Recovery
    ) -> Decision | EndRun:
        try:
            return self._replanning.replan(base, held, lost=_NOBODY)
        except (PlanningError, Unrecoverable) as error:
            return EndRun(exit_code=self.exit_code, reason=cannot_go_on(recovery.nodes, error))
