"""What to do once all survivors have answered: continue under a plan, or first do what a plan needs.

It decides, and orders nothing. `recovery/` holds the state that a recovery is in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oobleck.control.commit import Generations, Progress, Verdict, distinct, judge, microbatches_redone
from oobleck.control.events import EndRun
from oobleck.control.membership import Membership
from oobleck.control.protocol import CommitRecord, Status
from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import WorkerId

from .choice import Choice
from .going_back import GoingBack, Lineage, cannot_go_on
from .recovery.states import Decide, Deciding, WorkersWanted
from .replanning import Aftermath, Replanning
from .requests import Effects, KeepDraining


class Decider:
    """Decides, and asks for what it needs to know."""

    def __init__(
        self,
        members: Membership,
        progress: Progress,
        replanning: Replanning,
        going_back: GoingBack,
    ) -> None:
        self._members = members
        self._progress = progress
        self._replanning = replanning
        self._going_back = going_back

    @property
    def exit_code(self) -> int:
        """Of a run that cannot go on now: it can be resumed if there is a checkpoint."""
        return self._going_back.exit_code

    def decide(self, deciding: Deciding, generations: Generations, lineage: Lineage, now_s: float) -> Effects:
        """Find what is committed, and a plan for the nodes that are left, or what a plan needs first."""
        recovery = deciding.recovery
        may_wait = bool(self._members.returning) and now_s < recovery.returns_by_s
        if not recovery.asked:
            is_expected = may_wait or (bool(self._members.connecting) and now_s < recovery.returns_by_s)
            return (WorkersWanted() if is_expected else self._nobody_left(recovery.control.start_timeout_s),)
        statuses = lineage.since_restored(deciding.statuses)
        found = judge(statuses, self._progress.last_record, generations.plans, generations.section_of)
        verdict = self._confirm(found, statuses, generations)
        in_force = generations.in_force(verdict)
        after = Aftermath(
            verdict=verdict,
            statuses=statuses,
            base=generations.plans[in_force],
            lost=frozenset(self._members.without_part(in_force)),
            is_from_scratch=lineage.is_from_scratch,
            is_unexplained=deciding.is_unexplained,
        )
        try:
            decision, finish = self._replanning.choose(after, generations)
        except (PlanningError, Unrecoverable) as error:
            draining = tuple(member.spec.name for member in self._members.ready if member.is_draining)
            if may_wait:
                return (WorkersWanted(),)  # each of them that is ready begins the recovery again
            if draining:
                return (KeepDraining(nodes=draining), Decide(deciding=deciding))
            if isinstance(error, PlanningError):
                return (EndRun(exit_code=self._going_back.exit_code, reason=cannot_go_on(recovery.nodes, error)),)
            return self._going_back.choose(after.base, error, recovery, lineage, now_s)
        choice = Choice(
            decision=decision,
            verdict=verdict,
            finish=finish,
            steps_lost=max(0, self._progress.last_step - verdict.applied),
            microbatches_redone=_redone(after, finish, generations),
        )
        return (choice,)

    def _confirm(self, verdict: Verdict, statuses: Mapping[WorkerId, Status], generations: Generations) -> Verdict:
        """Treat a plan as in force only if all its living workers have adopted it."""
        if verdict.adopted is None:
            return verdict
        plan, lost = generations.plans[verdict.adopted], frozenset(self._members.without_part(verdict.adopted))
        others = [worker_id for worker_id, status in statuses.items() if status.adopted != verdict.adopted]
        is_in_force = all(worker_id not in plan.layers_at or worker_id.node in lost for worker_id in others)
        return verdict if is_in_force else replace(verdict, adopted=None)

    def _nobody_left(self, limit_s: float) -> EndRun:
        exit_code = self._going_back.exit_code
        if returning := (*self._members.connecting, *self._members.returning):
            names = ", ".join(member.spec.name for member in returning)
            text = f"no worker is left, and none was ready again within {limit_s:g} s: {names}"
            return EndRun(exit_code=exit_code, reason=text)
        given_up = [member for member in self._members.all if member.last_words]
        if self._members.are_taken_away:
            return EndRun(exit_code=exit_code, reason="all nodes were taken away")
        if not given_up:
            return EndRun(exit_code=exit_code, reason="all nodes are lost")
        words = "; ".join(f"{member.spec.name}: {member.last_words}" for member in given_up)
        return EndRun(reason=f"all nodes are lost: {words}")


def committed_records(statuses: Mapping[WorkerId, Status]) -> tuple[CommitRecord, ...]:
    """Return the newest committed steps that answers name, in their order.

    They are noted once all have answered. By then everything that was reported earlier has arrived, so no step is noted
    out of turn.
    """
    said = distinct(statuses.values())
    records = {status.last_record.step: status.last_record for status in said if status.last_record}
    return tuple(record for _, record in sorted(records.items()))


def _redone(after: Aftermath, finish: int | None, generations: Generations) -> int:
    """How many microbatches of the step in flight are run again."""
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
