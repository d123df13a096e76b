"""From one plan to the next: it fences all survivors, has a decision made from their answers, and gives orders.

It alone holds the state of the recovery and the plans. `recovery/` says what each input leads to, and `decision.py`
what to do about a loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import assert_never

from oobleck.control import events, recovery
from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.events import SendOrders, Turn
from oobleck.control.journal import Action, PlanAdopted, PlanCause
from oobleck.control.nodes import Membership, NodeLifecycle, adopting_s, starting_s
from oobleck.control.plans import PARTIAL_COMMIT_COPIES, sections_wanted
from oobleck.control.protocol import Fence, PlanUpdate, Status
from oobleck.control.recovery import states
from oobleck.control.scaling import Scaling
from oobleck.control.steps import PlanHistory, Progress, distinct, regrouped
from oobleck.errors import PeerError
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.schedule import SECTIONED_KINDS, ScheduleKind

from .consent import Consent
from .decision import Choice, Decider, Lineage
from .planning import schedules_for
from .replanning import Replanning


@dataclass(slots=True, eq=False)
class Reconfiguration:
    """Knows the plans, and the state of the recovery under way, if there is one."""

    _job: JobSpec
    _members: Membership
    _lifecycle: NodeLifecycle
    _progress: Progress
    _saving: Saving
    _restoring: Restoring
    _sharding: Sharding
    _consent: Consent
    _scaling: Scaling
    _replanning: Replanning
    _decider: Decider
    generations: PlanHistory
    _lineage: Lineage = field(default_factory=Lineage)
    _regroups: tuple[int, int] = (0, 0)
    """(newest step, how often all regrouped since it was committed)"""
    _state: states.State = field(default_factory=states.Preparing)
    _newest: SendOrders | None = None
    """The newest plan's orders; None if an earlier master gave them."""

    # --- where it is -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> recovery.Phase:
        return recovery.phase(self._state)

    @property
    def is_begun(self) -> bool:
        """Whether the first plan is ordered, by this master or by an earlier one."""
        return self.phase is not recovery.Phase.PREPARING

    @property
    def is_fencing(self) -> bool:
        """Whether nothing is committed before the next orders."""
        return isinstance(self._state, recovery.FENCED)

    @property
    def deadline_s(self) -> float:
        return recovery.deadline(self._state)

    def training_places(self, node: str | None = None) -> list[WorkerId]:
        """Return the reachable workers of the newest plan, or those of one node; none before the first plan."""
        if not self.generations.is_begun:
            return []
        plan = self.generations.plan
        if node is None:
            return [each for each in plan.worker_ids if self._members[each.node].is_ready]
        if node not in plan.pipeline_of or not self._members[node].is_ready:
            return []
        return sorted(each for each in plan.pipelines[plan.pipeline_of[node]].worker_ids if each.node == node)

    def is_in_plan(self, node: str) -> bool:
        return self.is_begun and node in self.generations.plan.pipeline_of

    def can_spare(self, node: str) -> bool:
        """Whether a node rests, and all others train by the plan that left it out, so that nothing waits for it."""
        last = self._progress.last_record
        is_followed = last is not None and last.generation == self.generations.current
        return isinstance(self._state, recovery.TRAINED) and is_followed and not self.is_in_plan(node)

    # --- what happens ----------------------------------------------------------------------------------------

    def give(self, turn: Turn, given: states.Input) -> None:
        """Make a transition, and carry out its effects, each with all of its consequences before the next."""
        # The state changes before its effects are carried out: some of them lead to the machine's next input.
        self._state, effects = recovery.step(self._state, given, turn.now_s)
        for effect in effects:
            match effect:
                case events.Record() | events.Send() | events.SendAll() | events.EndRun():
                    turn.do((effect,))
                case states.BeginRecovery():
                    self.begin(turn, effect)
                case states.Decide(answers=answers):
                    self._decide(turn, answers)
                case states.GiveUp(nodes=nodes, loss=loss):
                    for node in nodes:
                        self._lifecycle.give_up(turn, node, loss)
                case states.NetworkDown(nodes=nodes, waited_s=waited_s):
                    # The run can be resumed if it has saved a state: that is there when the network is back.
                    between = f"the network between {', '.join(nodes)} and their peers"
                    turn.end(f"{between} has been down for {waited_s:.0f} s", self._decider.exit_code)
                case states.PlanInForce():
                    self._replanning.trust_all()
                    self._lifecycle.dismiss_drained(turn)
                case states.RecoveryEnded():
                    done = recovery.recovery_done(effect, turn.now_s, self._members)
                    self._scaling.recovery_done(done)
                    turn.record(done)
                case _:
                    assert_never(effect)

    def restore(self, turn: Turn, generations: PlanHistory, lineage: Lineage) -> None:
        """Continue from the plans that earlier masters have ordered."""
        self.generations, self._lineage = generations, lineage
        self.give(turn, states.TrainingBegun(generation=generations.current))

    def begin(self, turn: Turn, wanted: states.BeginRecovery) -> None:
        """Fence all survivors under a new generation."""
        self._restoring.forget()
        self._progress.allow(math.inf)  # No step can be committed now, so none can hang.
        # Nodes lost while all are asked need no new fence: each answer stays true until that worker's next orders,
        # whichever other node is lost, and the orders reach those that still wait for the lost nodes. So a lost rack is
        # one recovery, which fences each survivor once. A later loss begins the recovery again.
        is_one_more = isinstance(self._state, states.Fencing) and wanted.cause is PlanCause.LOSS
        if not is_one_more:
            self.generations.begin()
        survivors = self._members.ready
        # Only a regrouping may ask which worker reaches which: a loss does not gather thousands of addresses.
        is_unexplained = (
            wanted.cause in (PlanCause.HANG, PlanCause.PEER_FAILED, PlanCause.NETWORK) or self._awaits_network
        )
        ready = (worker for member in (survivors if is_unexplained else ()) for worker in member.ready.values())
        fence = Fence(
            device=0,
            generation=self.generations.current,
            lost=self._lost(),
            probe_addresses=tuple(worker.address for worker in ready if worker.address),
            patience_s=self._job.control.lease_s / 2 if is_unexplained else 0.0,
        )
        if is_one_more:
            self.give(turn, states.MoreLost(nodes=wanted.nodes, fence=fence))
            return
        self._regroups = _counted(self._regroups, self._progress.last_step, wanted.cause)
        begun = states.RecoveryBegun(
            wanted=wanted,
            control=self._job.control,
            fault_threshold=self._job.fault_threshold,
            fence=fence,
            asked=self._members.ready_worker_ids,
            heard_s=max(map(self._members.heard_s.__getitem__, self._members.ready_names), default=turn.now_s),
            num_regroups=self._regroups[1],
        )
        self.give(turn, begun)

    def begin_if(self, turn: Turn, wanted: states.BeginRecovery | None) -> None:
        if wanted is not None:
            self.begin(turn, wanted)

    @property
    def _awaits_network(self) -> bool:
        return isinstance(self._state, recovery.FENCED) and self._state.recovery.awaits_network

    def _lost(self) -> tuple[str, ...]:
        """Return the nodes, of plans that survivors may have adopted, that are gone or have new workers."""
        concerned = {node for plan in self.generations.plans.values() for node in plan.nodes}
        return tuple(node for node in self._members.without_part(self.generations.newest) if node in concerned)

    def status(self, turn: Turn, worker_ids: Collection[WorkerId], status: Status) -> None:
        """Take workers' answer to a fence. Raises PeerError for an impossible one."""
        is_answer = self.is_fencing and status.generation == self.generations.current
        if is_answer and status.adopted and status.adopted not in self.generations.ordered:
            raise PeerError(f"trains in generation {status.adopted}, which has no plan")
        self.give(turn, states.Answered(worker_ids=tuple(worker_ids), status=status))

    # --- from the answers to orders --------------------------------------------------------------------------

    def _decide(self, turn: Turn, answers: states.Answers) -> None:
        statuses = self._lineage.since_restored(answers.statuses)
        reports = distinct(statuses.values())
        self._progress.commit_all(turn, [said.last_record for said in reports if said.last_record])
        self.generations.forget_before(min([said.adopted for said in reports if said.adopted], default=0))
        match self._decider.decide(turn, answers, self.generations, self._lineage):
            case Choice() as choice:
                update = self._order(turn, choice, answers)
                self.give(turn, _plan_ordered(answers.recovery, choice, update, self._members))
            case wanted:
                self.give(turn, wanted)

    def order_first(self, turn: Turn, choice: Choice) -> None:
        """Order the first plan, which begins with the choice's checkpoint, or else from scratch."""
        self.generations.begin()
        self._lineage = replace(self._lineage, began_from_scratch=choice.candidate is None)
        self._order(turn, choice, None)
        self.give(turn, states.TrainingBegun(generation=self.generations.current))

    def _order(self, turn: Turn, choice: Choice, answers: states.Answers | None) -> PlanUpdate:
        """Send all their orders of a new generation, and return the update that the orders follow from."""
        decision, candidate = choice.decision, choice.candidate
        self._go_back(choice)
        update = self._update(choice, answers)
        position = None if candidate is None else candidate.position
        self._saving.order_made(turn, update)
        saves = self._saving.begins_with_save(update)
        # What this records comes before the order, so that a new master knows the records that workers follow.
        self._sharding.follow(turn, update, position=position, goes_back=choice.goes_back)
        update = replace(update, assignment_version=self._sharding.assignment_version, saves=saves)
        worker_ids = self._members.ready_worker_ids
        self._newest = self._orders(choice, update, answers)
        turn.do((self._newest,))
        self._sharding.send_again(turn, (each for each in worker_ids if each in update.plan.layers_at))
        self._expect_adoption(turn, update, decision.predicted_step_s, is_quick=candidate is None)
        turn.record(_plan_adopted(self._job, choice, update, turn.now_s, oldest=self.generations.oldest))
        if not decision.redundant:
            threshold = self._job.fault_threshold
            what = ("failure domain" if self._members.domains else "more node") + ("" if threshold == 1 else "s")
            text = f"redundancy is below f = {threshold}: losing {threshold} {what} may cost the model's state"
            turn.note("warning", text)
        self._saving.plan_adopted(turn, update.ordered, redundant=decision.redundant, saves=saves)
        self._replanning.plan_adopted(decision, turn.now_s)
        if candidate is not None:
            self._saving.keep(turn, candidate)
        if choice.warning:
            turn.note("warning", choice.warning)
        return update

    def _go_back(self, choice: Choice) -> None:
        candidate = choice.candidate
        if Action(choice.decision.action) in (Action.CHECKPOINT, Action.BEGIN_AGAIN):
            self._saving.restored()
        if candidate is not None:
            self._restoring.begin_from(candidate.name)
            self._saving.begin_from(candidate.name)
        if choice.goes_back:
            generation = self.generations.current
            self._progress.go_back(choice.verdict.applied, generation=generation)
            self._consent.go_back(choice.verdict.applied)
            self._lineage = replace(self._lineage, restored_generation=generation, is_from_scratch=candidate is None)

    def _expect_adoption(self, turn: Turn, update: PlanUpdate, step_s: float, *, is_quick: bool) -> None:
        """Expect the first step of a plan; workers that have trained, and read no checkpoint, reach it quickly."""
        num_workers = len(self._members.ready_worker_ids)
        if is_quick and self._progress.last_step > 0:
            limit_s = adopting_s(num_workers, self._progress.adoptions_s)
        else:
            limit_s = starting_s(self._job.control.start_timeout_s, num_workers)
        self._progress.plan_ordered(update.generation, step_s, turn.now_s)
        self._progress.expect(limit_s, turn.now_s)

    def _update(self, choice: Choice, answers: states.Answers | None) -> PlanUpdate:
        adopted, candidate, plan = choice.verdict.adopted, choice.candidate, choice.decision.plan
        planner = self._replanning.planner
        first = planner.profile_of(plan.nodes[0])
        schedules = schedules_for(self._job, first, plan, profile_of=planner.profile_of)
        has_room = planner.has_room(plan, gradient_copies=PARTIAL_COMMIT_COPIES)
        sections = sections_wanted(self._job, plan, choice.decision.predicted_step_s, has_room=has_room)
        # No group is kept after a hang that nothing explains: it may be the groups that hang.
        statuses = answers.statuses if answers is not None and not answers.recovery.explains else {}
        newest = self.generations.newest if self.generations.is_begun else 0
        update = self.generations.plan_update(
            choice.decision,
            choice.verdict,
            schedules=schedules,
            finish=choice.finish,
            lost=() if adopted is None else self._members.without_part(adopted),
            restore=None if candidate is None else candidate.restore,
            is_from_scratch=self._lineage.is_from_scratch,
            num_sections=sections if all(kind in SECTIONED_KINDS for kind in schedules) else 1,
        )
        ready = self._members.ready_worker_ids
        return replace(update, regrouped=regrouped(ready, statuses, newest), sharding=self._replanning.sharding)

    def _orders(self, choice: Choice, update: PlanUpdate, answers: states.Answers | None) -> SendOrders:
        """Return the orders of an update, each as a change of the plan that its worker reports to have."""
        statuses = {} if answers is None else answers.statuses
        adopted, generations = choice.verdict.adopted, self.generations
        return SendOrders(
            worker_ids=tuple(self._members.ready_worker_ids),
            update=update,
            bases={worker_id: said.knows for worker_id, said in statuses.items() if said.knows is not None},
            known=dict(generations.ordered),
            in_force=None if update.finish is None or adopted is None else generations.ordered[adopted].plan,
            addresses=self._members.addresses,
        )

    def order_again(self, turn: Turn, worker_id: WorkerId, generation: int) -> None:
        """Send the whole plan to a worker that has another one than its order changes."""
        if self.is_fencing or generation != self.generations.current:
            return
        # The orders of an earlier master are not known here, so all get others.
        if self._newest is None or self._newest.update.generation != generation:
            self.begin(turn, states.BeginRecovery(cause=PlanCause.MASTER_LOST))
        else:
            turn.do((replace(self._newest, worker_ids=(worker_id,), bases={}),))


def _counted(regroups: tuple[int, int], last_step: int, cause: PlanCause) -> tuple[int, int]:
    """Return the newest step, and how often all have regrouped since its commit for an unknown reason."""
    if cause is PlanCause.NETWORK:  # While the network is down, all are asked again without a limit.
        return last_step, 0
    step, count = regroups
    return last_step, (count if step == last_step else 0) + (cause in (PlanCause.PEER_FAILED, PlanCause.HANG))


def _plan_ordered(
    recovery: states.Recovery, choice: Choice, update: PlanUpdate, members: Membership
) -> states.PlanOrdered:
    action = Action(choice.decision.action)
    if recovery.cause is PlanCause.JOINED and any(members[node].restarts for node in recovery.nodes):
        action = Action.RESTART_WORKER
    return states.PlanOrdered(
        worker_ids=tuple(chain.from_iterable([pipeline.worker_ids for pipeline in update.plan.pipelines])),
        action=action,
        layers_moved=len({(item.layer, item.target) for item in update.transfers}),
        microbatches_redone=choice.microbatches_redone,
        steps_lost=choice.steps_lost,
    )


def _plan_adopted(job: JobSpec, choice: Choice, update: PlanUpdate, now_s: float, *, oldest: int) -> PlanAdopted:
    """Return the journal's entry for a plan; the oldest plan that a worker may have in force is `oldest`."""
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
    if job.schedule != "auto":
        return reason
    for kind in (ScheduleKind.ZERO_BUBBLE, ScheduleKind.INTERLEAVED):
        if number := schedules.count(kind):
            which = "" if number == len(schedules) else f" in {number} of {len(schedules)} pipelines"
            reason = f"{reason}; the {kind.value} schedule{which}"
    return reason
