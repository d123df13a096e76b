"""What to do where a layer has no living copy: go back to a checkpoint, or begin again with the initial values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.commit import Progress, Verdict
from oobleck.control.events import Effects, RunOver
from oobleck.control.journal import Action
from oobleck.control.membership import Membership
from oobleck.control.protocol import Status
from oobleck.errors import PlanningError, Unrecoverable
from oobleck.exit_codes import ExitCode
from oobleck.planner import Decision, ExecutionPlan, WorkerId

from .recovery.states import CheckpointWanted, Recovery
from .replanning import Replanning

__all__ = ["Choice", "GoingBack", "Lineage", "cannot_go_on", "to_checkpoint"]

_NOBODY: frozenset[str] = frozenset()
"""Whose state is lost where all go back: all have what is gone back to, whatever became of the processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where what is trained comes from."""

    restored_generation: int = 0
    """What was adopted before all state was last gone back for is ignored."""
    is_from_scratch: bool = True
    """What is trained comes from the model's initial values, not from a checkpoint."""
    began_from_scratch: bool = True
    """So did the run begin: nothing is lost for good where all begin with them again."""

    def since_restored(self, statuses: Mapping[WorkerId, Status]) -> Mapping[WorkerId, Status]:
        """What a worker holds from before a checkpoint was gone back to is of a past that never was."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided: a plan, and how the survivors come to it."""

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
    """Have all go back to a checkpoint, by this plan."""
    verdict = Verdict(applied=candidate.step, catch_up=None, adopted=None, held=candidate.held)
    return Choice(decision=decision, verdict=verdict, goes_back=True, candidate=candidate, steps_lost=steps_lost)


def cannot_go_on(nodes: tuple[str, ...], error: Exception) -> str:
    return f"cannot go on after losing {', '.join(nodes)}: {error}"


class GoingBack:
    """Knows which checkpoints there are, through its parts."""

    def __init__(
        self,
        members: Membership,
        progress: Progress,
        saving: Saving,
        restoring: Restoring,
        replanning: Replanning,
        effects: Effects,
    ) -> None:
        self._members = members
        self._progress = progress
        self._saving = saving
        self._restoring = restoring
        self._replanning = replanning
        self._effects = effects

    def forget_answers(self) -> None:
        """What workers reported may not be true any more."""
        self._restoring.forget()

    def ask(self, worker_ids: tuple[WorkerId, ...]) -> None:
        """Ask workers which checkpoints they can read."""
        self._restoring.ask(worker_ids)

    def ask_again(self, node: str) -> None:
        """A node is reached again: the question may be lost."""
        self._restoring.ask_again(node)

    def begin_from(self, name: str) -> None:
        """What is trained comes from this checkpoint."""
        self._restoring.begin_from(name)

    @property
    def exit_code(self) -> int:
        """Of a run that has too few nodes left: it can be resumed if there is a checkpoint."""
        return ExitCode.RESUMABLE if self._saving.complete else ExitCode.FAILED

    def choose(
        self, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage, now_s: float
    ) -> Choice | CheckpointWanted:
        """Go back to the newest checkpoint, once workers have reported what they can read. Raises RunOver."""
        if not self._saving.is_enabled:
            return self._begin_again(base, error, recovery, lineage)
        if not self._restoring.is_answered(recovery.asked) and (
            math.isinf(recovery.found_by_s) or now_s < recovery.found_by_s
        ):
            return CheckpointWanted()
        for problem in self._restoring.problems():
            self._effects.notice("warning", f"cannot be used: {problem}")
        candidate = self._restoring.newest_of_this_run(base.num_layers)
        if candidate is None:
            return self._begin_again(base, error, recovery, lineage)
        held = {worker_id: layers for worker_id, layers in candidate.held.items() if worker_id in recovery.asked}
        decision = self._replan(base, held, recovery)
        reason = f"{error}; back to the checkpoint of step {candidate.step}: {decision.reason}"
        steps_lost = max(0, self._progress.last_step - candidate.step)
        decision = replace(decision, action=Action.CHECKPOINT, reason=reason)
        return to_checkpoint(decision, candidate, steps_lost=steps_lost)

    def _begin_again(self, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage) -> Choice:
        """Nothing is saved: begin with the model's initial values, where the state was lost with workers alone.

        Raises RunOver where a node took the last copy of a layer with it, or the run began with a checkpoint that is
        gone.
        """
        living = {member.spec.name for member in self._members.living}
        here = {layer for worker_id, layers in base.layers_at.items() if worker_id.node in living for layer in layers}
        if not lineage.began_from_scratch or not here.issuperset(error.layers):
            nothing = ", and there is no checkpoint to go back to" if self._saving.is_enabled else ""
            raise RunOver(ExitCode.FAILED, f"{cannot_go_on(recovery.nodes, error)}{nothing}") from error
        decision = self._replan(base, dict.fromkeys(recovery.asked, frozenset(range(base.num_layers))), recovery)
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

    def _replan(self, base: ExecutionPlan, held: Mapping[WorkerId, frozenset[int]], recovery: Recovery) -> Decision:
        try:
            return self._replanning.replan(base, held, lost=_NOBODY)
        except (PlanningError, Unrecoverable) as error:
            raise RunOver(self.exit_code, cannot_go_on(recovery.nodes, error)) from error
