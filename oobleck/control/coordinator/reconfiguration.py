"""Carries a recovery out: gives the state machine of `recovery.py` its inputs, and does what it asks for.

It has the state, the generations, and nothing else to say where a recovery is. `deciding.py` decides, `ordering.py`
orders. Raises RunOver where there is no way on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import assert_never

from oobleck.control.checkpoints import Candidate
from oobleck.control.commit import Generations, Progress, Verdict
from oobleck.control.events import Effects, Record, RunOver, Send, SendAll
from oobleck.control.journal import Action, LossCause, PlanCause
from oobleck.control.membership import Membership
from oobleck.control.protocol import Fence, Pace, PeerFailed, PlanUpdate, Resumed, Status, StopAgent
from oobleck.errors import PeerError
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import Profile, WorkerId

from .deciding import Decider, KeepDraining
from .going_back import Choice, Lineage, to_checkpoint
from .ordering import Ordering
from .recovery import FENCED, TRAINED, Phase, deadline, phase, recovery_done, step
from .recovery.states import (
    Answered,
    CheckpointReported,
    CheckpointWanted,
    Decide,
    Deciding,
    Effect,
    EndRun,
    FailureSuspected,
    GiveUp,
    HeldUp,
    Input,
    NodeGone,
    NodeLeft,
    NodeReached,
    PlanInForce,
    PlanOrdered,
    Preparing,
    RecoveryBegun,
    RecoveryEnded,
    Regroup,
    RunEnded,
    State,
    TimePassed,
    TrainingBegun,
    WorkersResumed,
    WorkersWanted,
)
from .replanning import Replanning

__all__ = ["Reconfiguration"]

_FINDING_S = 2.0
"""How long a master that takes over finds its nodes."""


class Reconfiguration:
    """Knows the generations, and the state of the recovery that is under way, if there is one."""

    def __init__(
        self,
        job: JobSpec,
        members: Membership,
        progress: Progress,
        replanning: Replanning,
        decider: Decider,
        ordering: Ordering,
        effects: Effects,
    ) -> None:
        self._job = job
        self._members = members
        self._progress = progress
        self._replanning = replanning
        self._decider = decider
        self._ordering = ordering
        self._effects = effects
        self.generations = Generations(max_steps=job.max_steps)
        self._lineage = Lineage()
        self._regroups = (0, 0)
        """(newest step, how often all regrouped since it was committed)."""
        self._state: State = Preparing()

    # --- where it is -----------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return phase(self._state)

    @property
    def is_begun(self) -> bool:
        """The first plan is ordered, by us or by an earlier master."""
        return self.phase is not Phase.PREPARING

    @property
    def is_fencing(self) -> bool:
        """Nothing is committed before the next orders."""
        return isinstance(self._state, FENCED)

    @property
    def deadline_s(self) -> float:
        """When `handle_deadline` is to be called."""
        return deadline(self._state)

    def training_places(self) -> list[WorkerId]:
        """The workers of the newest plan that can be spoken to; none before the first."""
        if not self.generations.plans:
            return []
        plan = self.generations.plan
        return [worker_id for worker_id in plan.worker_ids if self._members[worker_id.node].is_ready]

    # --- what happens ----------------------------------------------------------------------------------------

    def begin_training(self, profile: Profile, candidate: Candidate | None) -> None:
        """Order the first plan, on all nodes that are ready, with a checkpoint's state if there is one.

        Raises PlanningError when there is no plan.
        """
        decision = self._replanning.begin(profile, [member.spec.name for member in self._members.ready])
        self.generations.begin()
        if candidate is None:
            choice = Choice(decision=decision, verdict=Verdict(applied=0, catch_up=None, adopted=None, held={}))
        else:
            self._lineage = replace(self._lineage, began_from_scratch=False)
            moved = self._replanning.replan(decision.plan, candidate.held, lost=frozenset())
            reason = f"{decision.reason}; from the checkpoint of step {candidate.step}"
            choice = to_checkpoint(replace(moved, action=decision.action, reason=reason), candidate)
        self._order(choice)
        self._give(TrainingBegun(generation=self.generations.current))

    def restore(
        self, profile: Profile, generations: Generations, lineage: Lineage, *, step_s: float, slow: Mapping[str, float]
    ) -> None:
        """Go on from the plans that a journal knows, which others have ordered; steps take `step_s`."""
        from_s = self._effects.now_s + _FINDING_S
        self._replanning.take_over(profile, generations.plan, step_s, slow, from_s=from_s)
        self.generations, self._lineage = generations, lineage
        self._give(TrainingBegun(generation=generations.current))

    def begin(
        self, nodes: Collection[str], cause: PlanCause, *, detect_s: float, loss: LossCause | None = None
    ) -> None:
        """Fence all survivors under a new generation; losses during a recovery begin it again.

        `loss` says why the nodes were lost, if they were.
        """
        now_s = self._effects.now_s
        self._decider.forget_answers()
        self._progress.expect_none()
        self.generations.begin()
        survivors = self._members.ready
        # Only then may it be asked who reaches whom; the addresses of thousands are not gathered for each loss.
        is_unexplained = cause in (PlanCause.HANG, PlanCause.PEER_FAILED)
        ready = (worker for member in (survivors if is_unexplained else ()) for worker in member.ready.values())
        fence = Fence(
            device=0,
            generation=self.generations.current,
            lost=self._members.without_part(self.generations.newest),
            probe_addresses=tuple(worker.probe_address for worker in ready if worker.probe_address),
        )
        self._regroups = _counted(self._regroups, self._progress.last_step, cause)
        self._give(
            RecoveryBegun(
                nodes=tuple(nodes),
                cause=cause,
                loss=loss,
                detect_s=detect_s,
                control=self._job.control,
                fence=fence,
                asked=tuple(worker_id for member in survivors for worker_id in member.worker_ids),
                heard_s=max((member.last_heard_s for member in survivors), default=now_s),
                num_regroups=self._regroups[1],
            )
        )

    def repair(self, distrusted: Mapping[WorkerId, frozenset[int]], *, detect_s: float = 0.0) -> None:
        """Have these copies of layers replaced by the others."""
        self._replanning.distrust(distrusted)
        self.begin(sorted({worker_id.node for worker_id in distrusted}), PlanCause.CORRUPTION, detect_s=detect_s)

    def status(self, worker_ids: Collection[WorkerId], status: Status) -> tuple[GiveUp, ...]:
        """Workers answer a fence. Raises PeerError for an answer that cannot be."""
        is_answer = self.is_fencing and status.generation == self.generations.current
        if is_answer and status.adopted and status.adopted not in self.generations.plans:
            raise PeerError(f"trains in generation {status.adopted}, which has no plan")
        return self._give(Answered(worker_ids=tuple(worker_ids), status=status))

    def found(self) -> None:
        """A worker has reported which checkpoints there are."""
        self._give(CheckpointReported())

    def reach_again(self, node: str) -> None:
        """A node could not be spoken to, and is found again: what was said to it last may be lost."""
        self._decider.ask_again(node)
        self._give(NodeReached(node=node))

    def note_gone(self) -> None:
        """A node whose workers may be waited for is given up."""
        self._give(NodeGone())

    def note_left(self, node: str) -> tuple[GiveUp, ...]:
        """A drained node is gone: a master that took over since may have asked it where it stands."""
        return self._give(NodeLeft(node=node))

    def suspect(self, message: PeerFailed) -> None:
        """A survivor met a failure first."""
        self._give(FailureSuspected(generation=message.generation))

    def resumed(self, worker_ids: Collection[WorkerId], message: Resumed) -> None:
        """Workers compute under the new plan; the last one closes the recovery."""
        self._give(WorkersResumed(worker_ids=tuple(worker_ids), message=message))

    def hold(self, until_s: float) -> None:
        """This master was held up: what was said meanwhile is read first."""
        self._give(HeldUp(until_s=until_s))

    def handle_deadline(self, *, is_suspicious: bool) -> tuple[GiveUp, ...]:
        """Act on what has not happened in time; `is_suspicious` where it may be this master that hears nothing."""
        return self._give(TimePassed(is_suspicious=is_suspicious))

    def close(self) -> None:
        """The run is over: account for a recovery that is not."""
        self._give(RunEnded())

    # --- plans that no loss asks for -------------------------------------------------------------------------

    def note_pace(self, worker_ids: Collection[WorkerId], pace: Pace) -> None:
        """Take in how fast workers compute; plan again where slow nodes make that pay."""
        if self.is_fencing or not self._replanning.has_time(self._effects.now_s):
            return
        changed = self._replanning.note_pace(worker_ids, pace, self.generations.plan)
        if changed:
            self.begin(changed, PlanCause.SLOW, detect_s=0.0)

    def forget_pace(self, node: str) -> None:
        """A node is lost, or its worker is started again: what was known of its pace is of no use."""
        self._replanning.forget_pace(node)

    @property
    def retries_s(self) -> float:
        """When a slow node that was left out is to be tried again; infinity for never."""
        return math.inf if self.is_fencing else self._replanning.retries_s

    def retry_slow(self) -> None:
        """Give slow nodes that were left out another chance, where they would be of use."""
        nodes = self._replanning.retry_slow(self.generations.plan)
        if nodes:
            self.begin(nodes, PlanCause.RETRIED, detect_s=0.0)

    def scale(self) -> None:
        """Look at how many nodes should train; plan again where that is another number now."""
        if self.is_fencing or not self._replanning.has_time(self._effects.now_s):
            self._replanning.look_later()
        elif (changed := self._replanning.rescale(self.generations.plan)) is not None:
            self.begin(changed, PlanCause.SCALED, detect_s=0.0)

    def take_in(self, node: str) -> None:
        """A node has become ready: it trains at once if it is wanted, else it rests."""
        newest = self.generations.newest
        num_used = sum(self._members.took_part(each, newest) for each in self.generations.plan.nodes)
        if self.is_fencing or self._replanning.wants_more(num_used):
            self.begin([node], PlanCause.JOINED, detect_s=0.0)
        else:
            self._replanning.look_soon()

    def can_spare(self, node: str) -> bool:
        """Whether a node rests, and has nothing any more that others wait for: they train by the plan that lets it."""
        last = self._progress.last_record
        trains = isinstance(self._state, TRAINED) and last is not None and last.generation == self.generations.current
        return trains and node not in self.generations.plan.nodes

    # --- effects ---------------------------------------------------------------------------------------------

    def _give(self, given: Input) -> tuple[GiveUp, ...]:
        """Make a transition, and do what it asks for; return what is for others to do."""
        self._state, effects = step(self._state, given, self._effects.now_s)
        for effect in effects:
            self._carry_out(effect)
        return tuple(effect for effect in effects if isinstance(effect, GiveUp))

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Record() | Send() | SendAll():
                self._effects.command(effect)
            case Regroup(cause=cause, detect_s=detect_s):
                self.begin([], cause, detect_s=detect_s)
            case Decide(deciding=deciding):
                self._decide(deciding)
            case RecoveryEnded():
                done = recovery_done(effect, self._effects.now_s, self._members.clock_offsets_s)
                self._replanning.recovery_done(done)
                self._effects.record(done)
            case PlanInForce():
                self._replanning.trust_all()
                self._dismiss_drained()
            case EndRun(reason=reason):
                raise RunOver(ExitCode.FAILED, reason)
            case GiveUp():
                pass  # the part that gave the input does that
            case _:
                assert_never(effect)

    def _decide(self, deciding: Deciding) -> None:
        outcome = self._decider.decide(deciding, self.generations, self._lineage, self._effects.now_s)
        match outcome:
            case Choice():
                update = self._order(outcome)
                self._give(self._ordered(deciding, outcome, update))
            case KeepDraining(nodes=nodes):
                for node in nodes:
                    self._members[node].stay()
                    self._effects.notice("warning", f"{node} stays: the job cannot go on without it")
                self._decide(deciding)
            case WorkersWanted():
                self._give(outcome)
            case CheckpointWanted():
                if math.isinf(deciding.recovery.found_by_s):
                    self._decider.ask_for_checkpoints(deciding.recovery.asked)
                self._give(outcome)
            case _:
                assert_never(outcome)

    def _order(self, choice: Choice) -> PlanUpdate:
        if choice.goes_back:
            self._lineage = replace(
                self._lineage,
                restored_generation=self.generations.current,
                is_from_scratch=choice.candidate is None,
            )
        if choice.candidate is not None:
            self._decider.begin_from(choice.candidate.name)
        adopted = choice.verdict.adopted
        return self._ordering.update(
            choice,
            self.generations,
            tuple(worker_id for member in self._members.ready for worker_id in member.worker_ids),
            self._effects.now_s,
            lost=() if adopted is None else self._members.without_part(adopted),
            is_from_scratch=self._lineage.is_from_scratch,
        )

    def _ordered(self, deciding: Deciding, choice: Choice, update: PlanUpdate) -> PlanOrdered:
        recovery, action = deciding.recovery, Action(choice.decision.action)
        if recovery.cause is PlanCause.JOINED and any(self._members[node].restarts for node in recovery.nodes):
            action = Action.RESTART_WORKER
        return PlanOrdered(
            worker_ids=tuple(worker_id for pipeline in update.plan.pipelines for worker_id in pipeline.worker_ids),
            action=action,
            layers_moved=len({(item.layer, item.target) for item in update.transfers}),
            microbatches_redone=choice.microbatches_redone,
            steps_lost=choice.steps_lost,
        )

    def _dismiss_drained(self) -> None:
        """Drained nodes hold nothing any more that the plan in force needs: end their agents."""
        for member in self._members.ready:
            if member.is_draining:
                member.dismiss()
                self._effects.send(member.spec.name, StopAgent(reason="drained", is_dismissal=True))


def _counted(regroups: tuple[int, int], last_step: int, cause: PlanCause) -> tuple[int, int]:
    """Return the newest step, and how often all regrouped since it was committed, for nothing moved."""
    step, count = regroups
    return last_step, (count if step == last_step else 0) + (cause in (PlanCause.PEER_FAILED, PlanCause.HANG))
