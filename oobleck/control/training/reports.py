"""What agents and workers report, and the part that each report concerns.

Each report is checked here: a peer that sends an impossible one is lost for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from oobleck.control import journal, protocol
from oobleck.control.events import (
    BatchReceived,
    EndRun,
    NodesHeard,
    Record,
    Send,
    notice,
)
from oobleck.control.nodes import (
    Member,
    MemberState,
    check_device,
    is_of_training,
    is_of_worker_that_ends,
)
from oobleck.control.recovery import BeginRecovery, CheckpointReported, FailureSuspected, GiveUp, Phase, WorkersResumed
from oobleck.control.steps import HANG_FLOOR_S
from oobleck.errors import ConfigError, ExitCode, PeerError, PlanningError
from oobleck.planner import WorkerId

from .parts import Parts
from .routing import Routing
from .startup import profile_known

_MAX_EARLY = 8
"""Steps that are held back, at most: a report may have been lost with its reporter."""


class Reports:
    """Gives reports to the parts of the coordinator, and carries out what they return."""

    def __init__(self, parts: Parts, routing: Routing) -> None:
        self._parts = parts
        self._routing = routing
        self._do = routing.carry_out
        self._early: dict[int, protocol.CommitRecord] = {}
        """Steps under a plan that are told before the one that was finished under the plan before."""

    def said(self, node: str, message: protocol.AgentMessage, now_s: float) -> None:
        """Take in what a node's agent reports, or a worker through it."""
        member, is_begun = self._parts.members[node], self._parts.reconfiguration.is_begun
        if member.state not in (MemberState.CONNECTED, MemberState.READY):
            return  # late messages of a node that was given up
        self._parts.members.hear_node(node, now_s)
        self._note_heard(now_s)
        try:
            check_device(member, message)
            if not is_begun and is_of_training(message):
                return  # from an earlier run, or nonsense: this run has no plan yet that it could belong to
            if not is_of_worker_that_ends(member, message):
                self._understand(member, message, now_s)
        except PeerError as error:
            self._do((GiveUp(nodes=(node,), loss=journal.ProtocolBroken(problem=str(error))),), now_s)
        except ConfigError as error:
            if not self._parts.reconfiguration.is_begun:
                self._do((EndRun(exit_code=ExitCode.CONFIG, reason=str(error)),), now_s)
            # A node that comes later must fit; those that train are not affected.
            self._do((GiveUp(nodes=(node,), loss=journal.Misfit(problem=str(error))),), now_s)

    def heard(self, event: NodesHeard, now_s: float) -> None:
        """Note that nodes live."""
        self._parts.members.hear_nodes(event.heard)
        self._note_heard(now_s)

    def _note_heard(self, now_s: float) -> None:
        heard = self._parts.silence.heard(now_s)
        if heard:
            self._do(heard, now_s)
            self._parts.progress.give_time(now_s)

    def all_said(self, event: BatchReceived, now_s: float) -> None:
        """Like `said` for each; what cannot be wrong in a worker's message is not checked again for each."""
        speakers = self._parts.members.hear(event.worker_ids, now_s)
        if not self._parts.reconfiguration.is_begun:
            return  # as in `said`: all of these are of training
        match event.message:
            case protocol.Status() | protocol.Resumed() | protocol.Pace() as message:
                self._understand_plan(speakers, message, now_s)
            case _:
                assert_never(event.message)

    def _understand_plan(
        self, worker_ids: list[WorkerId], message: protocol.Status | protocol.Resumed | protocol.Pace, now_s: float
    ) -> None:
        """Workers report where they stand, that they compute under a plan, or how fast."""
        recovery = self._parts.reconfiguration
        match message:
            case protocol.Status():
                self._do(recovery.status(worker_ids, message, now_s), now_s)
            case protocol.Resumed():
                self._do(recovery.give(WorkersResumed(worker_ids=tuple(worker_ids), message=message), now_s), now_s)
                self._parts.progress.give_time(now_s)  # who reports that it computes hangs in nothing
            case protocol.Pace():
                if not recovery.is_fencing:
                    plan = recovery.generations.plan
                    self._do(self._parts.replanning.note_pace(worker_ids, message, plan, now_s), now_s)
            case _:
                assert_never(message)

    def _understand(self, member: Member, message: protocol.AgentMessage, now_s: float) -> None:
        node, parts = member.spec.name, self._parts
        match message:
            case protocol.Heartbeat(sequence=sequence):
                if sequence is not None:
                    self._do((Send(node=node, message=message),), now_s)
            case protocol.StepCommitted(record=record):
                self._step_committed(record, now_s)
            case protocol.EpochEntered():
                if (text := parts.likeness.entered(WorkerId(node=node, device=message.device), message)) is not None:
                    self._do((EndRun(exit_code=ExitCode.CONFIG, reason=text),), now_s)
            case protocol.Evaluating() | protocol.EvaluationDone():
                self._evaluating(message, now_s)
            case protocol.Status() | protocol.Resumed() | protocol.Pace():
                self._understand_plan([WorkerId(node=node, device=message.device)], message, now_s)
            case protocol.Activity() | protocol.ProcessorUse():
                parts.hang_watch.answered(WorkerId(node=node, device=message.device), message)
            case protocol.LayersMoving():
                self._layers_moving(node, message, now_s)
            case protocol.Finished():
                if self._parts.reconfiguration.phase is Phase.TRAINING:
                    finished, plans = WorkerId(node=node, device=message.device), parts.reconfiguration.generations
                    self._do(parts.shutdown.worker_finished(finished, plans, now_s), now_s)
            case protocol.PeerFailed(generation=generation):
                suspected = FailureSuspected(generation=generation, num_workers=len(parts.members.ready_worker_ids))
                self._do(parts.reconfiguration.give(suspected, now_s), now_s)
            case protocol.PlanNeeded(generation=generation):
                asker = WorkerId(node=node, device=message.device)
                self._do(parts.reconfiguration.order_again(asker, generation), now_s)
            case (
                protocol.StateSaved()
                | protocol.StateNotSaved()
                | protocol.LayersPersisted()
                | protocol.CheckpointCommitted()
            ):
                self._saved(node, message, now_s)
            case protocol.CheckpointsFound():
                self._checkpoints_found(WorkerId(node=node, device=message.device), message, now_s)
            case protocol.ReplicaDigests():
                self._compare(WorkerId(node=node, device=message.device), message, now_s)
            case protocol.RestoreFailed():
                self._restore_failed(node, message, now_s)
            case protocol.ScanAnswer():
                self._do(parts.sharding.surveyed(WorkerId(node=node, device=message.device), message, now_s), now_s)
            case protocol.RecordsFailed():
                self._do(parts.sharding.failed(parts.reconfiguration.generations.current, message, now_s), now_s)
            case protocol.WorkerStarted():
                pass
            case protocol.WorkerReady():
                self._worker_ready(member, message, now_s)
            case protocol.Profiled():
                self._do(parts.preparation.take_measurement(member, message), now_s)
                self.profile_known(now_s)
            case protocol.LinkTimed():
                timer = WorkerId(node=node, device=message.device)
                self._do(parts.link_timing.take(timer, message, now_s), now_s)
                self.train_when_ready(now_s)
            case protocol.WorkerExited():
                is_begun = parts.reconfiguration.is_begun
                self._do(parts.workers.worker_exited(member, message, now_s, is_begun=is_begun), now_s)
            case protocol.Leaving(reason=reason):
                self._routing.record(journal.TerminationNoticed(t_s=now_s, node=node, reason=reason))
                self._do(parts.lifecycle.noticed(member, now_s, is_begun=parts.reconfiguration.is_begun), now_s)
            case protocol.ForkServerEnded(end=end, is_restarted=is_restarted):
                self._routing.record(journal.ForkServerDown(t_s=now_s, node=node, end=end, is_restarted=is_restarted))
            case protocol.AgentStopped():
                is_in_plan = parts.reconfiguration.is_in_plan(node)
                self._do(parts.lifecycle.agent_stopped(member, message, now_s, is_in_plan=is_in_plan), now_s)
            case protocol.Hello():
                raise PeerError("a second hello on one connection")
            case protocol.FromRanks():
                raise PeerError(f"said {type(message).__name__}, which has no meaning in training")
            case _:
                assert_never(message)

    def _layers_moving(self, node: str, message: protocol.LayersMoving, now_s: float) -> None:
        if message.generation == self._parts.reconfiguration.generations.current:
            entry = journal.LayersArriving(
                t_s=now_s,
                generation=message.generation,
                node=node,
                device=message.device,
                received_bytes=message.received_bytes,
                all_bytes=message.all_bytes,
            )
            self._routing.record(entry)

    # --- workers become ready, and training begins -------------------------------------------------------------

    def _worker_ready(self, member: Member, message: protocol.WorkerReady, now_s: float) -> None:
        """A worker can be given a part. Raises ConfigError if it does not fit the others."""
        parts, recovery = self._parts, self._parts.reconfiguration
        worker = parts.workers.worker_up(member, message, now_s)
        if worker is not None:
            self._do(parts.preparation.note_ready(member, message), now_s)
            parts.link_timing.note_ready(WorkerId(node=worker.node, device=worker.device), message.device_name)
            self._do(parts.sharding.know(message.shards, now_s), now_s)
            waits = parts.preparation.hold_back(worker) if recovery.is_begun else None
            if waits is None:
                self._take_in(worker, now_s)
            else:
                self._do(waits, now_s)
        self.train_when_ready(now_s)

    def _take_in(self, worker: journal.WorkerUp, now_s: float) -> None:
        """Note a worker that is ready; its node joins once all of its workers are."""
        parts, recovery = self._parts, self._parts.reconfiguration
        self._routing.record(worker)
        parts.members.note_ready(worker, generation=recovery.generations.current)
        if recovery.is_begun and parts.members[worker.node].is_ready:
            self._join(worker.node, now_s)

    def profile_known(self, now_s: float) -> None:
        """A kind's profile may be known now: begin training, or take in the nodes that waited for it."""
        parts = self._parts
        if not parts.reconfiguration.is_begun:
            self.train_when_ready(now_s)
            return
        try:
            new = parts.replanning.know(parts.preparation.kinds)
        except PlanningError as error:  # it is of another model, or the job cannot have several kinds
            refused = parts.preparation.refuse_others(parts.replanning.kinds)
            self._do((GiveUp(nodes=refused, loss=journal.Misfit(problem=str(error))),), now_s)
            return
        self._do(tuple(Record(entry=profile_known(kind, now_s)) for kind in new), now_s)
        for worker in parts.preparation.take_waiting():
            self._take_in(replace(worker, t_s=now_s), now_s)

    def _join(self, node: str, now_s: float) -> None:
        """A node has become ready: it trains at once if it is wanted, else it rests."""
        generations, members = self._parts.reconfiguration.generations, self._parts.members
        num_used = sum(members.took_part(each, generations.newest) for each in generations.plan.nodes)
        if self._parts.reconfiguration.is_fencing or self._parts.replanning.wants_more(num_used):
            self._do((BeginRecovery(cause=journal.PlanCause.JOINED, nodes=(node,)),), now_s)
        else:
            self._parts.replanning.look_soon(now_s)

    def train_when_ready(self, now_s: float) -> None:
        """Order the first plan once all that it needs is known."""
        if not self._parts.reconfiguration.is_begun:
            self._do(self._parts.startup.look(now_s), now_s)

    # --- steps -------------------------------------------------------------------------------------------------

    def _evaluating(self, message: protocol.Evaluating | protocol.EvaluationDone, now_s: float) -> None:
        if self._parts.reconfiguration.phase is Phase.TRAINING:
            self._parts.progress.expect(HANG_FLOOR_S, now_s)
        if isinstance(message, protocol.EvaluationDone):
            self._do(self._parts.progress.evaluate(message, now_s), now_s)

    def _step_committed(self, record: protocol.CommitRecord, now_s: float) -> None:
        """Take in a step, and those that came before it was heard.

        A newcomer may be heard sooner than those who have finished the step before its plan, of which it knows nothing.
        """
        boundary = self._parts.reconfiguration.generations.boundary(record.generation)
        if self._parts.progress.last_step < boundary < record.step and len(self._early) < _MAX_EARLY:
            self._early[record.step] = record
            return
        early, self._early = self._early, {}
        for _, each in sorted((early | {record.step: record}).items()):
            self._note_committed(each, now_s)

    def _note_committed(self, record: protocol.CommitRecord, now_s: float) -> None:
        parts = self._parts
        committed = parts.progress.commit(record, now_s)
        if not committed:
            return
        self._do(committed, now_s)
        parts.saving.step_done(record)
        parts.replanning.step_done(record, generation=parts.reconfiguration.generations.newest)
        parts.sharding.committed(record.step)
        if self._parts.reconfiguration.phase is Phase.TRAINING:
            parts.progress.expect(HANG_FLOOR_S, now_s)

    def _compare(self, worker_id: WorkerId, message: protocol.ReplicaDigests, now_s: float) -> None:
        generations = self._parts.reconfiguration.generations
        if self._parts.reconfiguration.phase is Phase.TRAINING and message.generation == generations.current:
            worker_ids = generations.plan.worker_ids
            self._do(self._parts.replica_check.take(worker_id, message, worker_ids, now_s), now_s)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _saved(
        self,
        node: str,
        message: protocol.StateSaved | protocol.StateNotSaved | protocol.LayersPersisted | protocol.CheckpointCommitted,
        now_s: float,
    ) -> None:
        saving = self._parts.saving
        match message:
            case protocol.StateSaved():
                self._do(saving.saved(WorkerId(node=node, device=message.device), message, now_s), now_s)
            case protocol.LayersPersisted():
                self._do(saving.persisted(message), now_s)
            case protocol.CheckpointCommitted():
                self._do(saving.committed(node, message, now_s), now_s)
            case protocol.StateNotSaved():
                self._do(saving.failed(node, message, now_s), now_s)
            case _:
                assert_never(message)

    def _checkpoints_found(self, worker_id: WorkerId, message: protocol.CheckpointsFound, now_s: float) -> None:
        self._parts.restoring.found(worker_id, message)
        if self._parts.reconfiguration.is_begun:
            self._do(self._parts.reconfiguration.give(CheckpointReported(), now_s), now_s)
        else:
            self.train_when_ready(now_s)

    def _restore_failed(self, node: str, message: protocol.RestoreFailed, now_s: float) -> None:
        """A checkpoint is broken: all go back to the one before it."""
        if message.generation != self._parts.reconfiguration.generations.current:
            return
        self._do((notice(now_s, "error", f"{node} cannot restore {message.name}: {message.problem}"),), now_s)
        self._parts.restoring.note_broken(message.name)
        self._routing.begin(journal.PlanCause.CHECKPOINT_BROKEN, now_s)
