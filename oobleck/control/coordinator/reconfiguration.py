"""From one plan to the next: fence all survivors, hear where they stand, decide, order, and account for it.

    training ── begin ──> fencing ── all survivors answered, losses have settled ──> orders, training
       │                  ^     │
       │ suspicion lasts  │     │ a loss, or no answer within the lease: begin anew, under a newer generation
       └──────────────────┘<────┘

A part of the coordinator's machine, with its rules; raises RunOver where there is no way on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.commit import (
    PARTIAL_COMMIT_COPIES,
    Generations,
    Progress,
    Verdict,
    cut_off_nodes,
    judge,
    microbatches_redone,
    sections_wanted,
    stuck_workers,
)
from oobleck.control.data import Sharding
from oobleck.control.events import Effects, RunOver
from oobleck.control.journal import Action, Cause, HangExplained, PlanAdopted, RecoveryStarted
from oobleck.control.membership import Membership, are_most, patience_s
from oobleck.control.protocol import Fence, Pace, PeerFailed, PlanUpdate, Resumed, Status, StopAgent
from oobleck.control.scaling import Scaling, with_resting
from oobleck.errors import PeerError, PlanningError, Unrecoverable
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import Decision, ExecutionPlan, Profile, WorkerId
from oobleck.schedule import SECTIONED_KINDS, ScheduleKind

from .planning import schedules_for
from .recovery_record import RecoveryRecord
from .replanning import Aftermath, Replanning

if TYPE_CHECKING:
    from oobleck.planner import Planner

__all__ = ["Accused", "Reconfiguration"]

_SETTLE_S = 0.01
"""Losses within this are one: nodes that are killed together are seen to go within milliseconds."""
_SUSPICION_S = 0.2
"""How long a failed collective waits for its cause, usually the loss of a node; then all regroup."""
_ADOPTION_S = 30.0
"""How long a plan may take at least, from its orders to the first step, before it is a hang."""
_ANSWERS_S = 30.0
"""How long workers may look for checkpoints."""
_FINDING_S = 2.0
"""How long a master that takes over finds its nodes."""
_LOOK_S = 0.1
"""Answers that wait unread when their time is over are read within this."""
_NOBODY: frozenset[str] = frozenset()
"""Whose state is lost where all go back: everybody has what is gone back to, whatever became of the processes."""
_MAX_REGROUPS = 3
"""Regroupings without a loss and without a committed step between them, before the run is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accused:
    """Who holds everybody up, although no process is dead."""

    cut_off: tuple[str, ...] = ()
    """Nodes that their peers do not reach."""
    stuck: tuple[WorkerId, ...] = ()
    """Workers that others wait for, and that wait for nobody."""

    def __bool__(self) -> bool:
        return bool(self.cut_off or self.stuck)


class Reconfiguration:
    """Mutable: knows the generations, and the recovery under way, if there is one."""

    def __init__(
        self,
        job: JobSpec,
        members: Membership,
        progress: Progress,
        saving: Saving,
        restoring: Restoring,
        scaling: Scaling,
        sharding: Sharding,
        effects: Effects,
        *,
        make_planner: Callable[[Profile], Planner],
    ) -> None:
        """`make_planner` makes the planner of the job from a profile. It may raise PlanningError."""
        self._job = job
        self._members = members
        self._progress = progress
        self._saving = saving
        self._restoring = restoring
        self._scaling = scaling
        self._sharding = sharding
        self._replanning = Replanning(members, progress, scaling, sharding, effects, make_planner=make_planner)
        self._restored_generation = 0
        """What was adopted before all state was last gone back for counts for nothing."""
        self._is_from_scratch = True
        """What is trained comes from the model's initial values, not from a checkpoint."""
        self._began_from_scratch = True
        """So did the run begin: nothing is lost for good where all begin with them again."""
        self._answers_due_s = math.inf
        """How long to wait for those who were asked for checkpoints."""
        self._effects = effects
        self._account: RecoveryRecord | None = None
        self._is_explaining = False
        """All are asked what they wait for."""
        self._is_unexplained = False
        """Nobody could tell what they wait for: the groups themselves are not to be trusted."""
        self.accused = Accused()
        """Whom the survivors' answers name; the coordinator deals with them."""
        self._regroups = (0, 0)
        """(newest step, how often all regrouped since it was committed)."""
        self.generations = Generations(max_steps=job.max_steps)
        self.is_fencing = False
        self._fence_said = Fence(device=0, generation=0, lost=(), probe_addresses=())
        """The newest."""
        self.fenced_s = 0.0
        """When survivors were asked last where they stand."""
        self._has_waited = False
        """Answers are waited for although their time is over."""
        self.deadline_s = math.inf

    # --- the machine's interface -----------------------------------------------------------------------------

    def begin_training(self, profile: Profile, candidate: Candidate | None) -> None:
        """Order the first plan, on all nodes that are ready, with a checkpoint's state if there is one.

        Raises PlanningError when there is no plan.
        """
        self._replanning.know(profile)
        planner = self._replanning.planner
        nodes = [member.spec.name for member in self._members.ready]
        resting = self._scaling.begin(planner, nodes)
        decision = planner.initial_plan([node for node in nodes if node not in resting])
        decision = with_resting(decision, resting)
        self.generations.begin()
        if candidate is None:
            self._order(decision, Verdict(applied=0, catch_up=None, adopted=None, held={}), finish=None)
            return
        self._began_from_scratch = False
        moved = self._replanning.replan(decision.plan, candidate.held, lost=frozenset())
        reason = f"{decision.reason}; from the checkpoint of step {candidate.step}"
        self._go_back(replace(moved, action=decision.action, reason=reason), candidate)

    def restore(
        self,
        profile: Profile,
        generations: Generations,
        *,
        step_s: float,
        slow: Mapping[str, float],
        restored_generation: int,
        is_from_scratch: bool,
        began_from_scratch: bool,
    ) -> None:
        """Go on from the plans that a journal knows, which others have ordered; steps take `step_s`.

        `is_from_scratch`: what is trained comes from the model's initial values; `began_from_scratch`: so did the run.
        """
        self._replanning.take_over(profile, generations.plan, step_s, slow, from_s=self._effects.now_s + _FINDING_S)
        self.generations = generations
        self._restored_generation = restored_generation
        self._is_from_scratch, self._began_from_scratch = is_from_scratch, began_from_scratch

    def found(self) -> None:
        """Somebody has told which checkpoints there are."""
        self._decide_when_answered()

    def begin(self, nodes: list[str], cause: Cause, *, detect_s: float) -> None:
        """Fence all survivors under a new generation; losses during a recovery begin it anew."""
        now_s = self._effects.now_s
        recovery = self._account
        if recovery is None or recovery.ordered_s:
            self.close(overtaken_by="the next one began before")
            recovery = self._account = RecoveryRecord(began_s=now_s, detect_s=detect_s, cause=cause)
        recovery.nodes.extend(node for node in nodes if node not in recovery.nodes)
        if cause is Cause.CUT_OFF:
            recovery.cause = cause  # what the hang came from, by which it was noticed
        recovery.statuses.clear()
        self._restoring.forget()
        self._answers_due_s = math.inf
        recovery.settles_s = now_s + _SETTLE_S
        self.is_fencing = True
        self.generations.begin()
        # A master that takes over hears nothing of a node before it has reached it.
        heard_s = max((member.last_heard_s for member in self._members.ready), default=now_s)
        self.deadline_s = max(now_s, heard_s) + self._job.control.lease_s
        self.fenced_s = now_s
        self._has_waited = False
        self._progress.expect_none()
        self._effects.record(
            RecoveryStarted(
                t_s=now_s, generation=self.generations.current, nodes=tuple(recovery.nodes), cause=recovery.cause
            )
        )
        self.accused = Accused()
        self._is_unexplained = False
        self._count_regrouping(cause)
        self._fence()

    def repair(self, distrusted: Mapping[WorkerId, frozenset[int]], *, detect_s: float = 0.0) -> None:
        """Have these copies of layers replaced by the others."""
        self._replanning.distrusted.update(distrusted)
        self.begin(sorted({worker_id.node for worker_id in distrusted}), Cause.CORRUPTION, detect_s=detect_s)

    def status(self, worker_ids: Collection[WorkerId], status: Status) -> None:
        """Workers answer the fence; an answer to an older one is dropped. Raises PeerError for one that cannot be."""
        if self.is_fencing and status.generation == self.generations.current:
            if status.adopted and status.adopted not in self.generations.plans:
                raise PeerError(f"trains in generation {status.adopted}, which has no plan")
            assert self._account is not None
            self._account.statuses.update(dict.fromkeys(worker_ids, status))
            self._account.awaited.difference_update(worker_ids)
            if self._has_waited and self._account.awaited:  # the others are about to answer, too
                self.deadline_s = self._effects.now_s + self._job.control.lease_s
            self._decide_when_answered()

    def reach_again(self, node: str) -> None:
        """A node could not be spoken to, and is found again: what was said to it last may be lost."""
        recovery = self._account
        awaited = (
            tuple(sorted(worker_id for worker_id in recovery.awaited if worker_id.node == node)) if recovery else ()
        )
        self._restoring.ask_again(node)
        if not awaited:
            return
        if self.is_fencing:
            self._effects.send_all(awaited, self._fence_said)
        else:  # nobody knows whether it has its orders
            self.begin([], Cause.MASTER_LOST, detect_s=0.0)

    def note_gone(self) -> None:
        """A node whose workers may be waited for is given up."""
        if self._account is not None and not math.isinf(self._account.returns_by_s):
            self._decide_when_answered()

    def note_left(self, node: str) -> None:
        """A drained node is gone: a master that took over since may have asked it where it stands."""
        if self.is_fencing and self._account is not None:
            self._account.awaited = {worker_id for worker_id in self._account.awaited if worker_id.node != node}
            self._decide_when_answered()

    def suspect(self, message: PeerFailed) -> None:
        """A survivor met a failure first. Its cause is usually seen within milliseconds; else all regroup."""
        if not self.is_fencing and message.generation == self.generations.current:
            self.deadline_s = min(self.deadline_s, self._effects.now_s + _SUSPICION_S)

    def resumed(self, worker_ids: Collection[WorkerId], message: Resumed) -> None:
        """Workers compute under the new plan; the last one closes the recovery."""
        recovery = self._account
        if recovery is None or not recovery.ordered_s or message.generation != self.generations.current:
            return
        recovery.resumed.update(dict.fromkeys(worker_ids, message))
        recovery.awaited.difference_update(worker_ids)
        if not recovery.awaited:
            self._replanning.distrusted.clear()
            self.close()
            self._dismiss_drained()

    def note_pace(self, worker_ids: Collection[WorkerId], pace: Pace) -> None:
        """Take in how fast workers compute; plan anew where slow nodes make that pay."""
        if self.is_fencing or not self._replanning.has_time(self._effects.now_s):
            return
        changed = self._replanning.note_pace(worker_ids, pace, self.generations.plan)
        if changed:
            self.begin(changed, Cause.SLOW, detect_s=0.0)

    @property
    def retries_s(self) -> float:
        """When a slow node that was left out is to be tried again; infinity for never."""
        return math.inf if self.is_fencing else self._replanning.retries_s

    def retry_slow(self) -> None:
        """Give slow nodes that were left out another chance, where they would be of use."""
        nodes = self._replanning.retry_slow(self.generations.plan)
        if nodes:
            self.begin(nodes, Cause.RETRIED, detect_s=0.0)

    def scale(self) -> None:
        """Look at how many nodes should train; plan anew where that is another number now."""
        if self.is_fencing or not self._replanning.has_time(self._effects.now_s):
            self._scaling.look_later()
        elif self._scaling.consider(self._replanning.planner):
            plan = self.generations.plan
            (resting, *_) = self._scaling.choices(self._replanning.planner, plan, lost=(), slow=self._replanning.slow)
            changed = set(plan.nodes).intersection(resting) or {
                member.spec.name
                for member in self._members.ready
                if member.spec.name not in plan.nodes and member.spec.name not in resting
            }
            self.begin(sorted(changed), Cause.SCALED, detect_s=0.0)

    def take_in(self, node: str) -> None:
        """A node has become ready: it trains at once if it is wanted, else it rests."""
        newest = self.generations.newest
        num_used = sum(self._members.took_part(each, newest) for each in self.generations.plan.nodes)
        if self.is_fencing or self._scaling.wants_more(self._replanning.planner, num_used):
            self.begin([node], Cause.JOINED, detect_s=0.0)
        else:
            self._scaling.look_soon()

    def forget_pace(self, node: str) -> None:
        """A node is lost, or its worker starts anew: what was known of its pace is worth nothing."""
        self._replanning.forget_pace(node)

    def handle_deadline(self) -> None:
        """Act on answers that have settled, and on a suspicion that nothing has explained."""
        self.deadline_s = math.inf
        if self.is_fencing:
            self._decide_when_answered()
        else:
            self.begin([], Cause.PEER_FAILED, detect_s=_SUSPICION_S)

    def silent_nodes(self) -> tuple[str, ...]:
        """Nodes with a worker that has not answered the fence, once its time is over.

        Workers answer at once, whatever they compute; one that does not is frozen, if its agent is not.
        """
        if not self.is_fencing or self._account is None or self._effects.now_s < self.deadline_s:
            return ()
        if self.deadline_s <= self._account.settles_s:
            return ()
        return tuple(sorted({worker_id.node for worker_id in self._account.awaited}))

    def waits_on(self, silent: Collection[str], *, is_suspicious: bool) -> bool:
        """Whether to go on waiting for the answers of these nodes: their words may be unread, or ours unheard.

        Where most do not answer, whatever holds them up may be one and the same, and pass.
        """
        now_s, control = self._effects.now_s, self._job.control
        if not self._has_waited:
            self._has_waited = True
            self.deadline_s = now_s + _LOOK_S
            return True
        num_asked = len(self._members.ready)
        limit_s = patience_s(
            lease_s=control.lease_s,
            orphan_timeout_s=control.orphan_timeout_s,
            has_others=len(silent) < num_asked,
        )
        if is_suspicious or (are_most(len(silent), num_asked) and now_s < self.fenced_s + limit_s):
            self.deadline_s = now_s + control.lease_s
            return True
        return False

    def close(self, *, overtaken_by: str = "the run ended before") -> None:
        """Tell what a recovery cost; one that another loss overtook is told with what is known of it."""
        recovery, self._account = self._account, None
        if recovery is not None:
            done = recovery.close(
                self._effects.now_s, self.generations.current, self._members.clock_offsets_s, overtaken_by=overtaken_by
            )
            self._scaling.recovery_done(done)
            self._effects.record(done)

    def can_spare(self, node: str) -> bool:
        """Whether a node rests, and has nothing any more that others wait for: they train by the plan that lets it."""
        last = self._progress.last_record
        trains = not self.is_fencing and last is not None and last.generation == self.generations.current
        return trains and node not in self.generations.plan.nodes

    def lost_for(self, generation: int) -> tuple[str, ...]:
        """The nodes that have no part, or no part any more, in the plan that was ordered in `generation`."""
        return self._members.without_part(generation)

    # --- fencing ---------------------------------------------------------------------------------------------

    def _count_regrouping(self, cause: Cause) -> None:
        step, count = self._regroups
        if step != self._progress.last_step:
            count = 0
        count += cause in (Cause.PEER_FAILED, Cause.HANG)
        self._regroups = (self._progress.last_step, count)
        self._is_explaining = cause is Cause.HANG or (cause is Cause.PEER_FAILED and count > 1)
        if count > _MAX_REGROUPS:
            raise RunOver(ExitCode.FAILED, f"no step was committed through {_MAX_REGROUPS} regroupings")

    def _fence(self) -> None:
        survivors = self._members.ready
        lost = self.lost_for(self.generations.newest)
        ready = (worker for member in survivors for worker in member.ready.values())
        probe_addresses = (
            tuple(worker.probe_address for worker in ready if worker.probe_address) if self._is_explaining else ()
        )
        worker_ids = tuple(worker_id for member in survivors for worker_id in member.worker_ids)
        assert self._account is not None
        self._account.awaited = set(worker_ids)
        if not survivors:
            self._wait_for_anybody()
            return
        self._fence_said = Fence(
            device=0, generation=self.generations.current, lost=lost, probe_addresses=probe_addresses
        )
        self._effects.send_all(worker_ids, self._fence_said)

    def _decide_when_answered(self) -> None:
        recovery = self._account
        if not self.is_fencing or recovery is None or recovery.awaited:
            return
        if not self._members.ready:
            self._wait_for_anybody()
            return
        if self._effects.now_s < recovery.settles_s:
            self.deadline_s = recovery.settles_s
            return
        statuses = {
            worker_id: recovery.statuses[worker_id] for member in self._members.ready for worker_id in member.worker_ids
        }
        if self._is_explaining:
            self._is_explaining = False
            self._accuse(statuses)
            if self.accused:
                self.deadline_s = self._effects.now_s + self._job.control.lease_s
                return
            self._is_unexplained = True
        self._decide(statuses)

    def _wait_for_anybody(self) -> None:
        """No worker is left: wait for those that are started again. Raises RunOver where there are none."""
        if self._waits_for_returning():
            return
        if returning := self._members.returning:
            names = ", ".join(member.spec.name for member in returning)
            limit_s = self._job.control.start_timeout_s
            raise RunOver(self._exit_code, f"no worker is left, and none was ready again within {limit_s:g} s: {names}")
        given_up = [member for member in self._members.all if member.last_words]
        if not given_up:
            raise RunOver(self._exit_code, "all nodes are lost")
        words = "; ".join(f"{member.spec.name}: {member.last_words}" for member in given_up)
        raise RunOver(ExitCode.FAILED, f"all nodes are lost: {words}")

    def _waits_for_returning(self) -> bool:
        """Wait for workers that are started again, for those who are here cannot go on; False once that is over."""
        assert self._account is not None
        if not self._members.returning or self._effects.now_s >= self._account.returns_by_s:
            return False
        if math.isinf(self._account.returns_by_s):
            self._account.returns_by_s = self._effects.now_s + self._job.control.start_timeout_s
        self.deadline_s = self._account.returns_by_s
        return True

    def _accuse(self, statuses: dict[WorkerId, Status]) -> None:
        """Nobody is gone, and nothing goes on: find out whom it is that the others wait for, or do not reach."""
        cut_off = cut_off_nodes(statuses)
        stuck = () if cut_off else stuck_workers(statuses)
        self.accused = Accused(cut_off=cut_off, stuck=stuck)
        self._effects.record(
            HangExplained(
                t_s=self._effects.now_s,
                generation=self.generations.current,
                cut_off=cut_off,
                stuck=stuck,
                stacks=tuple(
                    (worker_id, status.stack) for worker_id, status in sorted(statuses.items()) if status.stack
                ),
            )
        )

    # --- deciding --------------------------------------------------------------------------------------------

    def _decide(self, statuses: dict[WorkerId, Status]) -> None:
        """All survivors have answered: find what is committed, a plan for those who are left, and order it."""
        assert self._account is not None
        if self._restored_generation:
            statuses = {worker_id: self._since_restored(status) for worker_id, status in statuses.items()}
        # Only now: all that reporters said before they answered is known, so that no step is told out of turn.
        records = {status.last_record.step: status.last_record for status in statuses.values() if status.last_record}
        for _, record in sorted(records.items()):
            self._progress.commit(record)
        self.generations.forget_before(min([said.adopted for said in statuses.values() if said.adopted], default=0))
        generations = self.generations
        found = judge(statuses, self._progress.last_record, generations.plans, generations.section_of)
        verdict = self._confirm(found, statuses)
        in_force = self.generations.in_force(verdict)
        base = self.generations.plans[in_force]
        absent = frozenset(self.lost_for(in_force))
        after = Aftermath(
            verdict=verdict,
            statuses=statuses,
            base=base,
            lost=absent,
            is_from_scratch=self._is_from_scratch,
            is_unexplained=self._is_unexplained,
        )
        try:
            decision, finish = self._replanning.choose(after, generations)
        except (PlanningError, Unrecoverable) as error:
            if self._waits_for_returning():
                pass  # each of them that is ready begins this anew
            elif self._keep_draining_nodes():
                self._decide(statuses)
            elif isinstance(error, PlanningError):
                raise RunOver(self._exit_code, self._cannot_go_on(error)) from error
            else:
                self._fall_back(base, error)
            return
        lost = absent.intersection(base.nodes)
        redone = 0
        if verdict.adopted is not None:
            redone = microbatches_redone(
                base,
                base.nodes if finish is None else lost,
                statuses,
                shares=generations.shares(in_force, verdict.applied + 1),
                partial=generations.partial(verdict).microbatches,
            )
        self._account.steps_lost += max(0, self._progress.last_step - verdict.applied)
        self._account.microbatches_redone += redone
        self._order(decision, verdict, finish=finish)

    def _since_restored(self, status: Status) -> Status:
        """What a worker holds from before a checkpoint was gone back to is of a past that never was."""
        if status.adopted >= self._restored_generation:
            return status
        return replace(
            status,
            applied=0,
            last_record=None,
            reduced=None,
            adopted=0,
            layers=(),
            partial=None,
            section_reduced=None,
        )

    def _fall_back(self, base: ExecutionPlan, error: Unrecoverable) -> None:
        """A layer has no living copy: go back to the newest checkpoint, once workers have told what they can read."""
        assert self._account is not None
        if not self._saving.is_enabled:
            self._begin_again(base, error)
            return
        now_s = self._effects.now_s
        worker_ids = [worker_id for member in self._members.ready for worker_id in member.worker_ids]
        if math.isinf(self._answers_due_s):
            self._answers_due_s = self.deadline_s = now_s + _ANSWERS_S
            self._restoring.ask(worker_ids)
            return
        if not self._restoring.is_answered(worker_ids) and now_s < self._answers_due_s:
            self.deadline_s = self._answers_due_s
            return
        self._tell_problems()
        candidate = self._restoring.newest_of_this_run(base.num_layers)
        if candidate is None:
            self._begin_again(base, error)
            return
        held = {worker_id: layers for worker_id, layers in candidate.held.items() if worker_id in worker_ids}
        try:
            decision = self._replanning.replan(base, held, lost=_NOBODY)
        except (PlanningError, Unrecoverable) as another:
            raise RunOver(self._exit_code, self._cannot_go_on(another)) from another
        reason = f"{error}; back to the checkpoint of step {candidate.step}: {decision.reason}"
        self._account.steps_lost += max(0, self._progress.last_step - candidate.step)
        self._saving.restored()
        self._go_back(replace(decision, action=Action.CHECKPOINT, reason=reason), candidate)

    def _begin_again(self, base: ExecutionPlan, error: Unrecoverable) -> None:
        """Nothing is saved: begin with the model's initial values, where the state was lost with workers alone.

        Raises RunOver where a node took the last copy of a layer with it, or the run began with a checkpoint that is
        gone.
        """
        assert self._account is not None
        living = {member.spec.name for member in self._members.living}
        here = {layer for worker_id, layers in base.layers_at.items() if worker_id.node in living for layer in layers}
        if not self._began_from_scratch or not here.issuperset(error.layers):
            nothing = ", and there is no checkpoint to go back to" if self._saving.is_enabled else ""
            raise RunOver(ExitCode.FAILED, f"{self._cannot_go_on(error)}{nothing}") from error
        worker_ids = [worker_id for member in self._members.ready for worker_id in member.worker_ids]
        whole = frozenset(range(base.num_layers))
        try:
            decision = self._replanning.replan(base, dict.fromkeys(worker_ids, whole), lost=_NOBODY)
        except (PlanningError, Unrecoverable) as another:
            raise RunOver(self._exit_code, self._cannot_go_on(another)) from another
        step = self._progress.last_step
        what = f"no checkpoint: all {step} steps are run again, from the model's initial values"
        reason = f"{error}; {what}: {decision.reason}"
        self._account.steps_lost += step
        self._saving.restored()
        self._restored_generation = self.generations.current
        self._is_from_scratch = True
        self._progress.go_back(0, generation=self._restored_generation)
        verdict = Verdict(applied=0, catch_up=None, adopted=None, held={})
        decision = replace(decision, action=Action.BEGIN_AGAIN, reason=reason, transfers=())
        self._order(decision, verdict, finish=None, goes_back=True)
        self._effects.notice("warning", f"{error}, and there is {what}")

    def _go_back(self, decision: Decision, candidate: Candidate) -> None:
        """Order everybody to a checkpoint."""
        is_done = candidate.step >= self._job.max_steps or self._sharding.has_read_all(candidate.position)
        self._restored_generation = self.generations.current
        self._is_from_scratch = False
        self._restoring.begin_from(candidate.name)
        self._saving.begin_from(candidate.name)
        self._progress.go_back(candidate.step, generation=self._restored_generation)
        verdict = Verdict(applied=candidate.step, catch_up=None, adopted=None, held=candidate.held)
        self._order(decision, verdict, finish=None, candidate=candidate, goes_back=True)
        if candidate.is_on_disk:
            self._saving.note_saved(candidate.step)
        elif is_done:
            self._saving.rescue(
                candidate.name,
                step=candidate.step,
                saved_at=candidate.saved_at,
                position=candidate.position,
                held=candidate.held,
            )
        else:
            self._saving.save_now()

    def _tell_problems(self) -> None:
        for problem in self._restoring.problems():
            self._effects.notice("warning", f"cannot be used: {problem}")

    def _cannot_go_on(self, error: Exception) -> str:
        assert self._account is not None
        return f"cannot go on after losing {', '.join(self._account.nodes)}: {error}"

    @property
    def _exit_code(self) -> int:
        """Of a run that has too few nodes left: it can be resumed if there is a checkpoint."""
        return ExitCode.RESUMABLE if self._saving.complete else ExitCode.FAILED

    def _confirm(self, verdict: Verdict, statuses: dict[WorkerId, Status]) -> Verdict:
        """Take a plan for the one in force only if all who are in it, and live, have adopted it."""
        if verdict.adopted is None:
            return verdict
        plan, lost = self.generations.plans[verdict.adopted], frozenset(self.lost_for(verdict.adopted))
        worker_ids = (worker_id for pipeline in plan.pipelines for worker_id in pipeline.worker_ids)
        members = [statuses[worker_id] for worker_id in worker_ids if worker_id.node not in lost]
        is_in_force = all(status.adopted == verdict.adopted for status in members)
        return verdict if is_in_force else replace(verdict, adopted=None)

    def _keep_draining_nodes(self) -> bool:
        """Let no node go after all: the run cannot go on without them. Returns whether there were any."""
        draining = [member for member in self._members.ready if member.is_draining]
        for member in draining:
            member.is_draining = False
            text = f"{member.spec.name} stays: the job cannot go on without it"
            self._effects.notice("warning", text)
        return bool(draining)

    def _dismiss_drained(self) -> None:
        """Drained nodes hold nothing any more that the plan in force needs: end their agents."""
        for member in self._members.ready:
            if member.is_draining:
                member.dismiss()
                self._effects.send(member.spec.name, StopAgent(reason="drained"))

    # --- ordering --------------------------------------------------------------------------------------------

    def _order(
        self,
        decision: Decision,
        verdict: Verdict,
        *,
        finish: int | None,
        candidate: Candidate | None = None,
        goes_back: bool = False,
    ) -> None:
        """Send everyone the orders of a new generation, and train.

        Where it `goes_back`, all do to a checkpoint, or, without a candidate, to the model's initial values.
        """
        lost = () if verdict.adopted is None else self.lost_for(verdict.adopted)
        restore = None if candidate is None else candidate.restore
        planner = self._replanning.planner
        schedules = schedules_for(self._job, planner.profile, decision.plan)
        has_room = planner.has_room(decision.plan, gradient_copies=PARTIAL_COMMIT_COPIES)
        sections = sections_wanted(self._job, decision.plan, decision.predicted_step_s, has_room=has_room)
        update = self.generations.plan_update(
            decision,
            verdict,
            schedules=schedules,
            finish=finish,
            lost=lost,
            restore=restore,
            is_from_scratch=self._is_from_scratch,
            num_sections=sections if all(kind in SECTIONED_KINDS for kind in schedules) else 1,
        )
        position = None if candidate is None else candidate.position
        update = replace(
            update, assignment_version=self._sharding.follow(update, position=position, goes_back=goes_back)
        )
        worker_ids = tuple(worker_id for member in self._members.ready for worker_id in member.worker_ids)
        self._effects.send_all(worker_ids, update)
        self._sharding.tell(worker_id for worker_id in worker_ids if worker_id in update.plan.layers_at)
        self.is_fencing = False
        self.deadline_s = math.inf
        self._progress.foresee(decision.predicted_step_s)
        is_quick = self._progress.last_step > 0 and candidate is None
        self._progress.expect(_ADOPTION_S if is_quick else self._job.control.start_timeout_s)
        self._record_plan(decision, verdict, update, goes_back=goes_back)
        self._saving.plan_adopted(decision.plan, boundary=update.boundary, redundant=decision.redundant)
        self._scaling.plan_adopted(decision)
        self._replanning.plan_adopted(decision.plan, decision.predicted_step_s)
        if self._account is not None:
            self._note_orders(self._account, decision, update)

    def _note_orders(self, recovery: RecoveryRecord, decision: Decision, update: PlanUpdate) -> None:
        recovery.ordered_s = self._effects.now_s
        recovery.awaited = {worker_id for pipeline in decision.plan.pipelines for worker_id in pipeline.worker_ids}
        recovery.action = Action(decision.action)
        if recovery.cause is Cause.JOINED and any(self._members[node].restarts for node in recovery.nodes):
            recovery.action = Action.RESTART_WORKER
        recovery.layers_moved = len({(item.layer, item.target) for item in update.transfers})

    def _record_plan(self, decision: Decision, verdict: Verdict, update: PlanUpdate, *, goes_back: bool) -> None:
        now_s = self._effects.now_s
        self._effects.record(
            PlanAdopted(
                t_s=now_s,
                generation=self.generations.current,
                plan=decision.plan,
                action=Action(decision.action),
                reason=self._with_schedules(decision.reason, update.schedules),
                predicted_step_s=decision.predicted_step_s,
                num_layers=decision.plan.num_layers,
                redundant=decision.redundant,
                pipeline_generations=update.pipeline_generations,
                boundary=update.boundary,
                partial=update.partial,
                num_sections=update.num_sections,
                schedules=update.schedules,
                finish=update.finish,
                finished_under=None if update.finish is None else verdict.adopted,
                restored=None if update.restore is None else update.restore.name,
                restored_step=update.boundary if goes_back else None,
                segments=update.segments,
            )
        )
        if not decision.redundant:
            threshold = self._job.fault_threshold
            text = f"redundancy is below f = {threshold}: losing {threshold} more nodes may cost the model's state"
            self._effects.notice("warning", text)

    def _with_schedules(self, reason: str, schedules: Sequence[ScheduleKind]) -> str:
        """A plan's reason, with the schedules of its pipelines where it chose them."""
        num_split = sum(kind is ScheduleKind.ZERO_BUBBLE for kind in schedules)
        if self._job.schedule != "auto" or not num_split:
            return reason
        which = "" if num_split == len(schedules) else f" in {num_split} of {len(schedules)} pipelines"
        return f"{reason}; the zero-bubble schedule{which}"
