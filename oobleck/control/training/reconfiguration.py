"""From one plan to the next: gives the recovery's state machine its inputs, and returns what it asks for.

It holds the state and the generations; nothing else says where a recovery is. `deciding.py` decides, `routing.py`
carries out what is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from oobleck.control import recovery
from oobleck.control.events import EndRun, SendOrders
from oobleck.control.journal import PlanCause
from oobleck.control.nodes import Membership
from oobleck.control.plans import PARTIAL_COMMIT_COPIES, sections_wanted
from oobleck.control.protocol import CommitRecord, Fence, PlanUpdate, Status
from oobleck.control.recovery import phase, states, step
from oobleck.control.steps import PlanHistory, Progress, distinct, regrouped
from oobleck.errors import PeerError
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.schedule import SECTIONED_KINDS

from .choice import Choice, plan_ordered
from .deciding import Decider, committed_records
from .going_back import Lineage
from .planning import schedules_for
from .requests import Effects

if TYPE_CHECKING:
    from oobleck.planner import Planner


class Reconfiguration:
    """Knows the generations, and the state of the recovery that is under way, if there is one."""

    def __init__(self, job: JobSpec, members: Membership, progress: Progress, decider: Decider) -> None:
        self._job = job
        self._members = members
        self._progress = progress
        self._decider = decider
        self.generations = PlanHistory(max_steps=job.max_steps)
        self._lineage = Lineage()
        self._regroups = (0, 0)
        """(newest step, how often all regrouped since it was committed)."""
        self._state: states.State = states.Preparing()
        self._newest: SendOrders | None = None
        """The newest plan's orders; None where an earlier master gave them."""

    # --- where it is -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> recovery.Phase:
        return phase(self._state)

    @property
    def is_begun(self) -> bool:
        """The first plan is ordered, by us or by an earlier master."""
        return self.phase is not recovery.Phase.PREPARING

    @property
    def is_fencing(self) -> bool:
        """Nothing is committed before the next orders."""
        return isinstance(self._state, recovery.FENCED)

    @property
    def deadline_s(self) -> float:
        """When the state machine needs to know that time has passed."""
        return recovery.deadline(self._state)

    def training_places(self, node: str | None = None) -> list[WorkerId]:
        """The reachable workers of the newest plan, or those of one node; none before the first plan."""
        if not self.generations.is_begun:
            return []
        plan = self.generations.plan
        if node is None:
            return [each for each in plan.worker_ids if self._members[each.node].is_ready]
        if node not in plan.pipeline_of or not self._members[node].is_ready:
            return []
        return sorted(each for each in plan.pipelines[plan.pipeline_of[node]].worker_ids if each.node == node)

    def is_in_plan(self, node: str) -> bool:
        """Whether a node has a part in the newest plan."""
        return self.is_begun and node in self.generations.plan.pipeline_of

    def can_spare(self, node: str) -> bool:
        """Whether a node rests and nothing waits for it any more: all others train by the plan that left it out."""
        last = self._progress.last_record
        trains = (
            isinstance(self._state, recovery.TRAINED)
            and last is not None
            and last.generation == self.generations.current
        )
        return trains and node not in self.generations.plan.pipeline_of

    # --- what happens ----------------------------------------------------------------------------------------

    def give(self, given: states.Input, now_s: float) -> Effects:
        """Make a transition; the effects it returns are carried out before anything else happens."""
        self._state, effects = step(self._state, given, now_s)
        return effects

    def restore(self, generations: PlanHistory, lineage: Lineage, now_s: float) -> Effects:
        """Continue from the plans in a journal, which earlier masters have ordered."""
        self.generations, self._lineage = generations, lineage
        return self.give(states.TrainingBegun(generation=generations.current), now_s)

    def begin(self, wanted: states.BeginRecovery, now_s: float) -> Effects:
        """Fence all survivors under a new generation.

        Nodes that are lost while all are asked need no new question: those of a rack are one recovery, and each
        survivor is fenced once. Losses later in a recovery begin it again.
        """
        is_one_more = isinstance(self._state, states.Fencing) and wanted.cause is PlanCause.LOSS
        if not is_one_more:
            self.generations.begin()
        survivors = self._members.ready
        # Only a regrouping may ask which worker reaches which: thousands of addresses are not gathered for each loss.
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
            return self.give(states.MoreLost(nodes=wanted.nodes, fence=fence), now_s)
        self._regroups = _counted(self._regroups, self._progress.last_step, wanted.cause)
        begun = states.RecoveryBegun(
            nodes=wanted.nodes,
            cause=wanted.cause,
            loss=wanted.loss,
            detect_s=wanted.detect_s,
            control=self._job.control,
            fault_threshold=self._job.fault_threshold,
            fence=fence,
            asked=self._members.ready_worker_ids,
            heard_s=max(map(self._members.heard_s.__getitem__, self._members.ready_names), default=now_s),
            busy=wanted.busy,
            num_regroups=self._regroups[1],
        )
        return self.give(begun, now_s)

    @property
    def _awaits_network(self) -> bool:
        return isinstance(self._state, recovery.FENCED) and self._state.recovery.awaits_network

    def network_down(self, down: states.NetworkDown) -> EndRun:
        """The network did not come back in time. What the nodes have saved is there when it does."""
        nodes = ", ".join(down.nodes)
        reason = f"the network between {nodes} and their peers has been down for {down.waited_s:.0f} s"
        return EndRun(exit_code=self._decider.exit_code, reason=reason)

    def _lost(self) -> tuple[str, ...]:
        """The nodes of plans that survivors may have adopted that are gone, or have new workers."""
        concerned = {node for plan in self.generations.plans.values() for node in plan.nodes}
        return tuple(node for node in self._members.without_part(self.generations.newest) if node in concerned)

    def status(self, worker_ids: Collection[WorkerId], status: Status, now_s: float) -> Effects:
        """Workers answer a fence. Raises PeerError for an answer that cannot be."""
        is_answer = self.is_fencing and status.generation == self.generations.current
        if is_answer and status.adopted and not self.generations.has_plan(status.adopted):
            raise PeerError(f"trains in generation {status.adopted}, which has no plan")
        return self.give(states.Answered(worker_ids=tuple(worker_ids), status=status), now_s)

    # --- from a decision to its orders -----------------------------------------------------------------------

    def committed_records(self, deciding: states.Deciding) -> tuple[CommitRecord, ...]:
        """Return the newest committed steps that the answers name: they are noted before anything is decided."""
        return committed_records(self._lineage.since_restored(deciding.statuses))

    def decide(self, deciding: states.Deciding, now_s: float) -> Effects:
        """Decide what to do from the answers of all survivors."""
        statuses = distinct(self._lineage.since_restored(deciding.statuses).values())
        self.generations.forget_before(min([said.adopted for said in statuses if said.adopted], default=0))
        return self._decider.decide(deciding, self.generations, self._lineage, now_s)

    def begin_generation(self, *, from_scratch: bool) -> None:
        """The first plan is about to be ordered; without `from_scratch` it begins with a checkpoint."""
        self.generations.begin()
        self._lineage = replace(self._lineage, began_from_scratch=from_scratch)

    def update(self, choice: Choice, planner: Planner) -> PlanUpdate:
        """Make a choice the newest plan, and return its orders."""
        if choice.goes_back:
            self._lineage = replace(
                self._lineage,
                restored_generation=self.generations.current,
                is_from_scratch=choice.candidate is None,
            )
        adopted, candidate, plan = choice.verdict.adopted, choice.candidate, choice.decision.plan
        first = planner.profile_of(plan.nodes[0])
        schedules = schedules_for(self._job, first, plan, profile_of=planner.profile_of)
        has_room = planner.has_room(plan, gradient_copies=PARTIAL_COMMIT_COPIES)
        sections = sections_wanted(self._job, plan, choice.decision.predicted_step_s, has_room=has_room)
        statuses, newest = self._kept_by(), self.generations.newest if self.generations.is_begun else 0
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
        return replace(update, regrouped=regrouped(self._members.ready_worker_ids, statuses, newest))

    def _kept_by(self) -> Mapping[WorkerId, Status]:
        """The answers of those whose groups may be kept: of none where it is not known what hangs."""
        state = self._state
        return state.statuses if isinstance(state, states.Deciding) and not state.recovery.explains else {}

    def orders(self, choice: Choice, update: PlanUpdate, worker_ids: Iterable[WorkerId]) -> SendOrders:
        """Return what workers are told of an update, as a change of the plan that each of them says it has."""
        answers = self._state.statuses if isinstance(self._state, states.Deciding) else {}
        adopted, generations = choice.verdict.adopted, self.generations
        self._newest = SendOrders(
            worker_ids=tuple(worker_ids),
            update=update,
            bases={worker_id: said.knows for worker_id, said in answers.items() if said.knows is not None},
            known=generations.ordered,
            in_force=None if update.finish is None or adopted is None else generations.plans[adopted],
            addresses=self._members.addresses,
        )
        return self._newest

    def order_again(self, worker_id: WorkerId, generation: int) -> Effects:
        """A worker has another plan than the one that its order changes: tell it the whole plan.

        Where an earlier master has given the orders, all are asked again where they stand.
        """
        if self.is_fencing or generation != self.generations.current:
            return ()
        if self._newest is None or self._newest.update.generation != generation:
            return (states.BeginRecovery(cause=PlanCause.MASTER_LOST),)
        return (replace(self._newest, worker_ids=(worker_id,), bases={}),)

    def ordered(self, choice: Choice, update: PlanUpdate, now_s: float) -> Effects:
        """All have their orders."""
        if isinstance(self._state, states.Deciding):
            return self.give(plan_ordered(self._state.recovery, choice, update, self._members), now_s)
        return self.give(states.TrainingBegun(generation=self.generations.current), now_s)


def _counted(regroups: tuple[int, int], last_step: int, cause: PlanCause) -> tuple[int, int]:
    """Return the newest step, and how often all have regrouped since it was committed for a reason nobody knows."""
    if cause is PlanCause.NETWORK:
        return last_step, 0
    step, count = regroups
    return last_step, (count if step == last_step else 0) + (cause in (PlanCause.PEER_FAILED, PlanCause.HANG))
