"""Carries out what a part returns: commands leave the coordinator, the rest goes to the parts that it concerns.

No part calls another. So all that follows from a loss, an answer or an order can be read here, in one table. Each
effect, with all that follows from it, is carried out before the next one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from oobleck.control import events
from oobleck.control.journal import Action, JournalEntry, PlanCause
from oobleck.control.nodes import adopting_s, starting_s
from oobleck.control.protocol import StartWorker
from oobleck.control.recovery import recovery_done, states
from oobleck.control.steps import Verdict
from oobleck.errors import ExitCode, PlanningError
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from . import requests
from .choice import Choice, plan_adopted, to_checkpoint
from .parts import Parts


class RunOver(Exception):
    """A part asks for the end of the run: what was to be done after that is dropped."""

    def __init__(self, end: events.EndRun) -> None:
        super().__init__(end.reason)
        self.end = end


class Routing:
    """Carries out effects, and gathers the commands among them."""

    def __init__(self, job: JobSpec, parts: Parts) -> None:
        self._job = job
        self._parts = parts
        self._commands: list[events.Command] = []

    def take(self) -> list[events.Command]:
        """Hand over all commands gathered since the last time."""
        commands, self._commands = self._commands, []
        return commands

    def record(self, entry: JournalEntry) -> None:
        """Append to the journal."""
        self._commands.append(events.Record(entry=entry))

    def begin(self, cause: PlanCause, now_s: float, *, detect_s: float = 0.0) -> None:
        """Begin a recovery although no node is lost."""
        self._carry_out(states.BeginRecovery(cause=cause, detect_s=detect_s), now_s)

    def carry_out(self, effects: requests.Effects, now_s: float) -> None:
        """Carry out effects in order. Raises RunOver, and PeerError for what a peer did wrong."""
        for effect in effects:
            self._carry_out(effect, now_s)

    def _carry_out(self, effect: requests.Effect, now_s: float) -> None:
        parts = self._parts
        match effect:
            case (
                events.Record()
                | events.Send()
                | events.SendAll()
                | events.SendOrders()
                | events.Connect()
                | events.Disconnect()
                | events.End()
            ):
                self._commands.append(effect)
            case events.LookUpProfile() | events.StoreProfile() | events.LookUpLink() | events.StoreLink():
                self._commands.append(effect)
            case events.EndRun():
                raise RunOver(effect)
            # Nodes and workers
            case requests.NodeTakenIn(event=event):
                parts.members.meet(event.node, event.hello, address=event.address, now_s=now_s)
                self.carry_out(parts.preparation.configure(event.node), now_s)
            case requests.NodeHere(node=node):
                self.carry_out(parts.sharding.tell(parts.reconfiguration.training_places(node)), now_s)
            case states.NodeReached(node=node):
                parts.shutdown.ask_again()
                self.carry_out(parts.restoring.ask_again(node), now_s)
                self.carry_out(parts.reconfiguration.give(effect, now_s), now_s)
            case states.GiveUp(nodes=nodes, loss=loss):
                for node in nodes:
                    is_begun = parts.reconfiguration.is_begun
                    self.carry_out(parts.lifecycle.give_up(node, loss, now_s, is_begun=is_begun), now_s)
            case requests.NodeDropped():
                self._drop_node(effect, now_s)
            case requests.WorkerRaised(worker_id=worker_id, error=error):
                parts.shutdown.note_error(worker_id, error)
            case requests.WorkerRestarted(worker_id=worker_id, pid=pid, also=also):
                step = parts.progress.furthest_step
                parts.members.note_restart(worker_id, pid, now_s=now_s, step=step, also=also)
            case requests.StartAgain(worker_id=worker_id):
                parts.members.note_started(worker_id)
                self._carry_out(events.Send(node=worker_id.node, message=StartWorker(device=worker_id.device)), now_s)
            case requests.WorkersFail(node=node, words=words):
                parts.members.note_last_words(node, words)
            case requests.WorkerDropped(worker_id=worker_id):
                self._drop_worker(worker_id, now_s)
            case requests.KeepDraining(nodes=nodes):
                self.carry_out(parts.lifecycle.keep(nodes, now_s), now_s)
            # Steps and plans
            case events.ExpectSteps(within_s=within_s):
                parts.progress.expect(within_s, now_s)
            case requests.MoreTime(until_s=until_s):
                parts.progress.allow(until_s)
            case requests.LinksWanted(network=network):
                self.carry_out(parts.link_timing.go_on(network), now_s)
                if not parts.link_timing.is_needed(network):
                    self.carry_out(parts.startup.look(now_s), now_s)
            case requests.BeginTraining():
                self._begin_training(effect, now_s)
            case requests.PlanWithout(node=node, loss=loss, detect_s=detect_s):
                if not parts.reconfiguration.can_spare(node):
                    begin = states.BeginRecovery(cause=PlanCause.LOSS, nodes=(node,), loss=loss, detect_s=detect_s)
                    self._carry_out(begin, now_s)
            case events.Repair(copies=copies):
                parts.replanning.distrust(copies)
                nodes = tuple(sorted({worker_id.node for worker_id in copies}))
                self._carry_out(states.BeginRecovery(cause=PlanCause.CORRUPTION, nodes=nodes), now_s)
            case states.BeginRecovery():
                parts.restoring.forget()
                parts.progress.expect_none()
                self.carry_out(parts.reconfiguration.begin(effect, now_s), now_s)
            case states.NetworkDown():
                self._carry_out(parts.reconfiguration.network_down(effect), now_s)
            case states.NodeDrained(node=node):
                self.carry_out(parts.saving.node_left(node, now_s), now_s)
                self.carry_out(parts.reconfiguration.give(effect, now_s), now_s)
            case states.NodeGone() | states.WorkersWanted() | states.CheckpointWanted():
                self.carry_out(parts.reconfiguration.give(effect, now_s), now_s)
            case states.Decide(deciding=deciding):
                for record in parts.reconfiguration.committed_records(deciding):
                    self.carry_out(parts.progress.commit(record, now_s), now_s)
                self.carry_out(parts.reconfiguration.decide(deciding, now_s), now_s)
            case Choice():
                self._order(effect, now_s)
            case states.PlanInForce():
                parts.replanning.trust_all()
                self.carry_out(parts.lifecycle.dismiss_drained(), now_s)
            case states.RecoveryEnded():
                done = recovery_done(effect, now_s, parts.members)
                parts.replanning.recovery_done(done)
                self.record(done)
            # Checkpoints
            case requests.LocateCheckpoints(worker_ids=worker_ids):
                self.carry_out(parts.restoring.ask(worker_ids), now_s)
            case requests.ReportProblems():
                self.carry_out(parts.restoring.report_problems(now_s), now_s)
            case requests.KnowCheckpoints(complete=complete, unfinished=unfinished):
                self.carry_out(parts.saving.know(complete, unfinished), now_s)
            case _:
                assert_never(effect)

    # --- losses ------------------------------------------------------------------------------------------------

    def _drop_node(self, dropped: requests.NodeDropped, now_s: float) -> None:
        parts, node = self._parts, dropped.node
        parts.replanning.forget_pace(node)
        profiling = parts.preparation.node_lost(node)
        if not parts.reconfiguration.is_begun:
            parts.startup.node_failed(node, dropped.loss, now_s)
            return
        self.carry_out(profiling, now_s)
        self.carry_out(parts.saving.node_lost(node, now_s), now_s)
        parts.sharding.lost(node)

    def _drop_worker(self, worker_id: WorkerId, now_s: float) -> None:
        """Ask another worker what this one was asked, or the one that is started in its place.

        If no worker survives, the run waits for those that are started again, unless one error ended them all: it would
        do so again.
        """
        parts = self._parts
        parts.replanning.forget_pace(worker_id.node)
        self.carry_out(parts.preparation.worker_lost(worker_id), now_s)
        if not parts.reconfiguration.is_begun:
            parts.restoring.forget()
            return
        self.carry_out(parts.saving.worker_lost(worker_id.node, now_s), now_s)
        parts.sharding.lost(worker_id.node)
        living = {member.spec.name for member in parts.members.living}
        training = [node for node in parts.reconfiguration.generations.plan.nodes if node in living]
        if not parts.members.ready and parts.shutdown.is_same_error(training):
            self._carry_out(events.EndRun(reason="the same error ended all workers"), now_s)

    # --- plans -------------------------------------------------------------------------------------------------

    def _begin_training(self, begun: requests.BeginTraining, now_s: float) -> None:
        """Order the first plan, on all nodes that are ready, with a checkpoint's state if there is one."""
        parts, kinds, candidate = self._parts, begun.kinds, begun.candidate
        nodes = [member.spec.name for member in parts.members.ready]
        parts.saving.begin([layer.name for layer in kinds[0].profile.layers])
        try:
            self.carry_out(parts.replanning.begin(kinds, nodes, now_s), now_s)
            decision = parts.replanning.first_plan(nodes)
            parts.reconfiguration.begin_generation(from_scratch=candidate is None)
            if candidate is None:
                choice = Choice(decision=decision, verdict=Verdict(applied=0, catch_up=None, adopted=None, held={}))
            else:
                moved = parts.replanning.replan(decision.plan, candidate.held, lost=frozenset())
                reason = f"{decision.reason}; from the checkpoint of step {candidate.step}"
                choice = to_checkpoint(replace(moved, action=decision.action, reason=reason), candidate)
            self._order(choice, now_s)
        except PlanningError as error:
            self._carry_out(events.EndRun(exit_code=ExitCode.CONFIG, reason=str(error)), now_s)

    def _order(self, choice: Choice, now_s: float) -> None:
        """Send everyone the orders of a new generation, and train."""
        parts, decision, candidate = self._parts, choice.decision, choice.candidate
        if Action(decision.action) in (Action.CHECKPOINT, Action.BEGIN_AGAIN):
            parts.saving.restored()
        if candidate is not None:
            parts.restoring.begin_from(candidate.name)
            parts.saving.begin_from(candidate.name)
        if choice.goes_back:
            generation = parts.reconfiguration.generations.current
            parts.progress.go_back(choice.verdict.applied, generation=generation)
        update = parts.reconfiguration.update(choice, parts.replanning.planner)
        position = None if candidate is None else candidate.position
        placed = parts.sharding.follow(update, now_s, position=position, goes_back=choice.goes_back)
        self.carry_out(parts.saving.order_made(update, now_s), now_s)
        saves = parts.saving.begins_with_save(update)
        update = replace(update, assignment_version=parts.sharding.assignment_version, saves=saves)
        worker_ids = parts.members.ready_worker_ids
        self.carry_out((*placed, parts.reconfiguration.orders(choice, update, worker_ids)), now_s)
        training = (worker_id for worker_id in worker_ids if worker_id in update.plan.layers_at)
        self.carry_out(parts.sharding.tell(training), now_s)
        is_quick = parts.progress.last_step > 0 and candidate is None
        parts.progress.foresee(decision.predicted_step_s)
        if is_quick:
            limit_s = adopting_s(len(worker_ids), parts.progress.adoptions_s)
        else:
            limit_s = starting_s(self._job.control.start_timeout_s, len(worker_ids))
        parts.progress.expect(limit_s, now_s)
        parts.progress.plan_ordered(update.generation, now_s)
        oldest = parts.reconfiguration.generations.oldest
        self.record(plan_adopted(self._job, choice, update, now_s, oldest=oldest))
        if not decision.redundant:
            threshold = self._job.fault_threshold
            text = f"redundancy is below f = {threshold}: losing {threshold} more nodes may cost the model's state"
            self.carry_out((events.notice(now_s, "warning", text),), now_s)
        plan, redundant, generation, boundary = decision.plan, decision.redundant, update.generation, update.boundary
        wanted = parts.saving.plan_adopted(
            plan, now_s, generation=generation, boundary=boundary, redundant=redundant, saves=saves
        )
        self.carry_out(wanted, now_s)
        parts.replanning.plan_adopted(decision, now_s)
        if candidate is not None:
            self.carry_out(parts.saving.keep(candidate, now_s), now_s)
        if choice.warning:
            self.carry_out((events.notice(now_s, "warning", choice.warning),), now_s)
        self.carry_out(parts.reconfiguration.ordered(choice, update, now_s), now_s)
