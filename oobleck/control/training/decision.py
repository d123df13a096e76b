"""What to do once all survivors have answered: a new plan, a checkpoint, or another question first.

This decides, and orders nothing. `recovery/` holds the state that a recovery is in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.events import Turn
from oobleck.control.journal import Action
from oobleck.control.nodes import Membership, NodeLifecycle
from oobleck.control.protocol import Status
from oobleck.control.recovery import Answers, CheckpointWanted, Recovery, WorkersWanted
from oobleck.control.steps import PlanHistory, Progress, Verdict, judge, microbatches_redone
from oobleck.errors import ExitCode, PlanningError, Unrecoverable
from oobleck.planner import Decision, ExecutionPlan, WorkerId

from .replanning import Aftermath, Replanning
from .shutdown import Shutdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan to order, and the way to it."""

    decision: Decision
    verdict: Verdict
    finish: int | None = None
    """The step in flight, if all finish it before."""
    goes_back: bool = False
    """All go back to the candidate's checkpoint, or, if there is none, to the model's initial values."""
    candidate: Candidate | None = None
    steps_lost: int = 0
    microbatches_redone: int = 0
    warning: str = ""


def to_checkpoint(decision: Decision, candidate: Candidate, *, steps_lost: int = 0) -> Choice:
    """Send all workers back to a checkpoint, under this plan."""
    verdict = Verdict(applied=candidate.step, catch_up=None, adopted=None, held=candidate.held)
    return Choice(decision=decision, verdict=verdict, goes_back=True, candidate=candidate, steps_lost=steps_lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The origin of the state that is trained."""

    restored_generation: int = 0
    """The generation in which the run last went back; the state that workers adopted before is ignored."""
    is_from_scratch: bool = True
    """The state comes from the model's initial values, not from a checkpoint."""
    began_from_scratch: bool = True
    """The run began with those values, so it can begin again with them if nothing else is left."""

    def since_restored(self, statuses: Mapping[WorkerId, Status]) -> Mapping[WorkerId, Status]:
        """Ignore what workers hold from before the run went back to a checkpoint."""
        since = self.restored_generation
        if not since:
            return statuses
        return {
            worker_id: status if status.adopted >= since else _emptied(status) for worker_id, status in statuses.items()
        }


def _emptied(status: Status) -> Status:
    return replace(
        status, applied=0, last_record=None, reduced=None, adopted=0, layers=(), partial=None, section_reduced=None
    )


@dataclass(frozen=True, slots=True)
class Decider:
    """Decides, and asks workers for what it needs to know."""

    _members: Membership
    _lifecycle: NodeLifecycle
    _progress: Progress
    _saving: Saving
    _restoring: Restoring
    _replanning: Replanning
    _shutdown: Shutdown

    @property
    def exit_code(self) -> int:
        """The exit code of a run that cannot continue now, but can be resumed if it saved or its nodes were taken."""
        can_resume = bool(self._saving.complete) or self._members.are_taken_away
        return ExitCode.RESUMABLE if can_resume else ExitCode.FAILED

    def decide(
        self, turn: Turn, answers: Answers, generations: PlanHistory, lineage: Lineage
    ) -> Choice | WorkersWanted | CheckpointWanted:
        """Find what is committed, and a plan for the remaining nodes, or what a plan needs first."""
        recovery = answers.recovery
        may_wait = bool(self._members.returning) and turn.now_s < recovery.returns_by_s
        if not recovery.asked:
            # Without any worker, nodes that are still being connected are worth waiting for, too.
            if may_wait or (bool(self._members.connecting) and turn.now_s < recovery.returns_by_s):
                return WorkersWanted()
            self._end_without_nodes(turn, recovery.control.start_timeout_s)
        statuses = lineage.since_restored(answers.statuses)
        found = judge(statuses, self._progress.last_record, generations.plans, generations.section_of)
        verdict = self._confirm(found, statuses, generations)
        in_force = generations.in_force(verdict)
        after = Aftermath(
            verdict=verdict,
            statuses=statuses,
            base=generations.plans[in_force],
            lost=frozenset(self._members.without_part(in_force)),
            is_from_scratch=lineage.is_from_scratch,
            is_unexplained=answers.is_unexplained,
        )
        try:
            decision, finish = self._replanning.choose(after, generations, turn.now_s)
        except (PlanningError, Unrecoverable) as error:
            if may_wait:
                return WorkersWanted()  # Each worker that becomes ready begins the recovery again.
            # Without the nodes that are leaving there is no plan: keep them.
            if draining := [member.spec.name for member in self._members.ready if member.is_draining]:
                self._lifecycle.keep(turn, draining)
                return self.decide(turn, answers, generations, lineage)
            if isinstance(error, PlanningError):
                self._end(turn, recovery, error)
            return self._go_back(turn, after.base, error, recovery, lineage)
        return Choice(
            decision=decision,
            verdict=verdict,
            finish=finish,
            steps_lost=max(0, self._progress.last_step - verdict.applied),
            microbatches_redone=_redone(after, finish, generations),
        )

    def _confirm(self, verdict: Verdict, statuses: Mapping[WorkerId, Status], generations: PlanHistory) -> Verdict:
        """Take a plan for adopted only if all of its living workers have adopted it."""
        if verdict.adopted is None:
            return verdict
        # The verdict is of those that hold layers. A newcomer that has not adopted the plan cannot finish a step under
        # it, either.
        plan, lost = generations.plans[verdict.adopted], frozenset(self._members.without_part(verdict.adopted))
        others = [worker_id for worker_id, status in statuses.items() if status.adopted != verdict.adopted]
        is_in_force = all(worker_id not in plan.layers_at or worker_id.node in lost for worker_id in others)
        return verdict if is_in_force else replace(verdict, adopted=None)

    def _end_without_nodes(self, turn: Turn, limit_s: float) -> NoReturn:
        if returning := (*self._members.connecting, *self._members.returning):
            names = ", ".join(member.spec.name for member in returning)
            turn.end(f"no worker is left, and none was ready again within {limit_s:g} s: {names}", self.exit_code)
        if self._members.are_taken_away:
            turn.end("all nodes were taken away", self.exit_code)
        given_up = [member for member in self._members.all if member.last_words]
        if not given_up:
            turn.end("all nodes are lost", self.exit_code)
        words = "; ".join(f"{member.spec.name}: {member.last_words}" for member in given_up)
        turn.end(f"all nodes are lost: {words}")

    def _end(self, turn: Turn, recovery: Recovery, error: Exception, more: str = "") -> NoReturn:
        # An error of the job's own would end the resumed run, too.
        exit_code = ExitCode.FAILED if self._shutdown.is_jobs_own(recovery.nodes) else self.exit_code
        turn.end(f"cannot continue after losing {', '.join(recovery.nodes)}: {error}{more}", exit_code)

    def _go_back(
        self, turn: Turn, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage
    ) -> Choice | CheckpointWanted:
        """Go back to the newest checkpoint, once workers have reported which they can read."""
        if not self._saving.is_enabled:
            return self._begin_again(turn, base, error, recovery, lineage)
        if not self._restoring.is_answered(recovery.asked):
            if math.isinf(recovery.found_by_s):
                self._restoring.ask(turn, recovery.asked)
                return CheckpointWanted()
            if turn.now_s < recovery.found_by_s:
                return CheckpointWanted()
        candidate = self._restoring.newest_of_this_run(base.num_layers)
        self._restoring.report_problems(turn)
        if candidate is None:
            return self._begin_again(turn, base, error, recovery, lineage)
        held = {worker_id: layers for worker_id, layers in candidate.held.items() if worker_id in recovery.asked}
        decision = self._replan(turn, base, held, recovery)
        reason = f"{error}; back to the checkpoint of step {candidate.step}: {decision.reason}"
        steps_lost = max(0, self._progress.last_step - candidate.step)
        decision = replace(decision, action=Action.CHECKPOINT, reason=reason)
        return to_checkpoint(decision, candidate, steps_lost=steps_lost)

    def _begin_again(
        self, turn: Turn, base: ExecutionPlan, error: Unrecoverable, recovery: Recovery, lineage: Lineage
    ) -> Choice:
        """Start again from the model's initial values, as nothing is saved, or end the run."""
        living = {member.spec.name for member in self._members.living}
        here = {layer for worker_id, layers in base.layers_at.items() if worker_id.node in living for layer in layers}
        # The run ends if it began from a checkpoint, or if a lost node held the last copy of a layer.
        if not lineage.began_from_scratch or not here.issuperset(error.layers):
            nothing = ", and there is no checkpoint to go back to" if self._saving.is_enabled else ""
            self._end(turn, recovery, error, nothing)
        held = dict.fromkeys(recovery.asked, frozenset(range(base.num_layers)))
        decision = self._replan(turn, base, held, recovery)
        step = self._progress.last_step
        what = f"no checkpoint: all {step} steps are run again, from the model's initial values"
        reason = f"{error}; {what}: {decision.reason}"
        return Choice(
            # Nothing moves: each worker makes its own layers' initial values.
            decision=replace(decision, action=Action.BEGIN_AGAIN, reason=reason, transfers=()),
            verdict=Verdict(applied=0, catch_up=None, adopted=None, held={}),
            goes_back=True,
            steps_lost=step,
            warning=f"{error}, and there is {what}",
        )

    def _replan(
        self, turn: Turn, base: ExecutionPlan, held: Mapping[WorkerId, frozenset[int]], recovery: Recovery
    ) -> Decision:
        try:
            # No node's state is lost, because all can read what they go back to.
            return self._replanning.replan(base, held, lost=frozenset(), now_s=turn.now_s)
        except (PlanningError, Unrecoverable) as error:
            self._end(turn, recovery, error)


def _redone(after: Aftermath, finish: int | None, generations: PlanHistory) -> int:
    verdict, base = after.verdict, after.base
    if verdict.adopted is None:
        return 0
    return microbatches_redone(
        base,
        base.nodes if finish is None else after.lost.intersection(base.nodes),
        after.statuses,
        shares=generations.shares(verdict.adopted, verdict.applied + 1),
        partial=generations.partial(verdict).microbatches,
    )
