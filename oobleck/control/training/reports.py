"""What agents and workers report, and the part that each report concerns.

Each report is checked here: a peer that sends an impossible one counts as lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from oobleck.control import journal, protocol
from oobleck.control.events import BatchReceived, Turn
from oobleck.control.nodes import Member, check_device, is_of_training, is_of_worker_that_ends
from oobleck.control.recovery import BeginRecovery, CheckpointReported, FailureSuspected, Phase, WorkersResumed
from oobleck.control.steps import HANG_FLOOR_S
from oobleck.errors import ExitCode, PeerError, PlanningError
from oobleck.planner import WorkerId

from .parts import Parts
from .replanning import profile_known


class Reports:
    """Passes reports on to the parts of the coordinator."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def take(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        """Take a report of a node's agent, or of a worker through it. Raises PeerError and ConfigError."""
        check_device(member, message)
        if not self._parts.reconfiguration.is_begun and is_of_training(message):
            return  # It is from an earlier run, or nonsense: this run has no plan yet that it could belong to.
        if not is_of_worker_that_ends(member, message):
            self._understand(turn, member, message)

    def take_batch(self, turn: Turn, event: BatchReceived) -> None:
        """Take one report of many workers."""
        speakers = self._parts.members.hear(event.worker_ids, turn.now_s)
        # What cannot be wrong in a worker's message is not checked again for each of thousands.
        if self._parts.reconfiguration.is_begun:
            self._understand_plan(turn, speakers, event.message)

    def _understand_plan(
        self, turn: Turn, worker_ids: list[WorkerId], message: protocol.Status | protocol.Resumed | protocol.Pace
    ) -> None:
        recovery = self._parts.reconfiguration
        match message:
            case protocol.Status():
                recovery.status(turn, worker_ids, message)
            case protocol.Resumed():
                recovery.give(turn, WorkersResumed(worker_ids=tuple(worker_ids), message=message))
                self._parts.startup.note_resumed(turn, worker_ids)
                self._parts.progress.give_time(turn.now_s)  # A worker that reports to compute does not hang.
            case protocol.Pace():
                if not recovery.is_fencing:
                    ordered = recovery.generations.ordered[recovery.generations.newest]
                    replanning, plan = self._parts.replanning, ordered.plan
                    recovery.begin_if(turn, replanning.note_pace(turn, worker_ids, message, plan, ordered.schedules))
            case _:
                assert_never(message)

    def _understand(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        node, parts = member.spec.name, self._parts
        # An agent that reports for itself names no device.
        worker_id = WorkerId(node=node, device=message.device if isinstance(message, protocol.FromWorker) else 0)
        match message:
            case protocol.StepCommitted(record=record):
                self._step_committed(turn, record)
            case protocol.EpochEntered():
                if (text := parts.likeness.entered(worker_id, message)) is not None:
                    turn.end(text, ExitCode.CONFIG)
            case protocol.Evaluating() | protocol.EvaluationDone():
                self._evaluating(turn, message)
            case protocol.Status() | protocol.Resumed() | protocol.Pace():
                self._understand_plan(turn, [worker_id], message)
            case protocol.Activity() | protocol.ProcessorUse():
                parts.hang_watch.answered(worker_id, message)
            case protocol.LayersMoving():
                self._layers_moving(turn, node, message)
            case protocol.Finished():
                if parts.reconfiguration.phase is Phase.TRAINING:
                    parts.shutdown.worker_finished(turn, worker_id, parts.reconfiguration.generations)
            case protocol.PeerFailed(generation=generation):
                num_workers = len(parts.members.ready_worker_ids)
                suspected = FailureSuspected(generation=generation, num_workers=num_workers)
                parts.reconfiguration.give(turn, suspected)
            case protocol.PlanNeeded(generation=generation):
                parts.reconfiguration.order_again(turn, worker_id, generation)
            case protocol.StateSaved():
                parts.saving.saved(turn, worker_id, message)
            case protocol.StateNotSaved():
                parts.saving.failed(turn, node, message)
            case protocol.LayersPersisted():
                parts.saving.persisted(turn, message)
            case protocol.CheckpointCommitted():
                parts.saving.committed(turn, node, message)
            case protocol.CheckpointsFound():
                parts.restoring.found(worker_id, message)
                if parts.reconfiguration.is_begun:
                    parts.reconfiguration.give(turn, CheckpointReported())
                else:
                    parts.startup.look(turn)
            case protocol.ReplicaDigests():
                self._compare(turn, worker_id, message)
            case protocol.RestoreFailed():
                self._restore_failed(turn, node, message)
            case protocol.ScanAnswer():
                parts.sharding.surveyed(turn, worker_id, message)
            case protocol.RecordsFailed():
                parts.sharding.failed(turn, parts.reconfiguration.generations.current, message)
            case protocol.WorkerStarted():
                pass
            case protocol.WorkerReady():
                self._worker_ready(turn, member, message)
            case protocol.Profiled():
                parts.preparation.take_measurement(turn, member, message)
                self.profile_known(turn)
            case protocol.LinkTimed():
                parts.link_timing.take(turn, worker_id, message)
                self.train_when_ready(turn)
            case protocol.WorkerExited():
                parts.workers.worker_exited(turn, member, message)
            case protocol.FromRanks():
                raise PeerError(f"sent {type(message).__name__}, which has no meaning in training")
            case (
                protocol.Hello()
                | protocol.Heartbeat()
                | protocol.NodeUse()
                | protocol.Leaving()
                | protocol.ForkServerEnded()
                | protocol.AgentStopped()
            ):
                raise AssertionError(f"{type(message).__name__} is understood for every program")
            case _:
                assert_never(message)

    def _layers_moving(self, turn: Turn, node: str, message: protocol.LayersMoving) -> None:
        if message.generation == self._parts.reconfiguration.generations.current:
            entry = journal.LayersArriving(
                t_s=turn.now_s,
                generation=message.generation,
                node=node,
                device=message.device,
                received_bytes=message.received_bytes,
                all_bytes=message.all_bytes,
            )
            turn.record(entry)

    # --- workers become ready, and training begins -------------------------------------------------------------

    def _worker_ready(self, turn: Turn, member: Member, message: protocol.WorkerReady) -> None:
        """Take in a worker that can be given a part. Raises ConfigError if it does not fit the others."""
        parts = self._parts
        worker = parts.workers.worker_up(member, message, turn.now_s)
        if worker is not None:
            parts.preparation.note_ready(turn, member, message)
            parts.link_timing.note_ready(WorkerId(node=worker.node, device=worker.device), message.device_name)
            parts.sharding.know(turn, message.shards)
            if not (parts.reconfiguration.is_begun and parts.preparation.hold_back(turn, worker)):
                self._take_in(turn, worker)
        self.train_when_ready(turn)

    def _take_in(self, turn: Turn, worker: journal.WorkerUp) -> None:
        parts, recovery = self._parts, self._parts.reconfiguration
        turn.record(worker)
        parts.members.note_ready(worker, generation=recovery.generations.current)
        if recovery.is_begun and parts.members[worker.node].is_ready:
            self._join(turn, worker.node)

    def profile_known(self, turn: Turn) -> None:
        """Begin training, or take in the nodes that waited, if a kind's profile became known."""
        parts = self._parts
        if not parts.reconfiguration.is_begun:
            self.train_when_ready(turn)
            return
        try:
            new = parts.replanning.know(parts.preparation.kinds)
        except PlanningError as error:  # It is another model's, or the job cannot have several kinds.
            for node in parts.preparation.refuse_others(parts.replanning.kinds):
                parts.lifecycle.give_up(turn, node, journal.Misfit(problem=str(error)))
            return
        for kind in new:
            turn.record(profile_known(kind, turn.now_s))
        for worker in parts.preparation.take_waiting():
            self._take_in(turn, replace(worker, t_s=turn.now_s))

    def _join(self, turn: Turn, node: str) -> None:
        recovery, members, replanning = self._parts.reconfiguration, self._parts.members, self._parts.replanning
        generations = recovery.generations
        num_used = sum(members.took_part(each, generations.newest) for each in generations.plan.nodes)
        # A recovery may be waiting for just this worker.
        if recovery.is_fencing or replanning.wants_more(num_used):
            recovery.begin(turn, BeginRecovery(cause=journal.PlanCause.JOINED, nodes=(node,)))
        else:
            self._parts.scaling.look_soon(turn.now_s)

    def train_when_ready(self, turn: Turn) -> None:
        if not self._parts.reconfiguration.is_begun:
            self._parts.startup.look(turn)

    # --- steps -------------------------------------------------------------------------------------------------

    def _evaluating(self, turn: Turn, message: protocol.Evaluating | protocol.EvaluationDone) -> None:
        if self._parts.reconfiguration.phase is Phase.TRAINING:
            self._parts.progress.expect(HANG_FLOOR_S, turn.now_s)
        if isinstance(message, protocol.EvaluationDone):
            self._parts.progress.evaluate(turn, message)

    def _step_committed(self, turn: Turn, record: protocol.CommitRecord) -> None:
        """Note a step, and the steps after it that were reported earlier."""
        boundary = self._parts.reconfiguration.generations.boundary(record.generation)
        for each in self._parts.progress.in_order(record, boundary=boundary):
            self._note_committed(turn, each)

    def _note_committed(self, turn: Turn, record: protocol.CommitRecord) -> None:
        parts = self._parts
        if not parts.progress.commit(turn, record):
            return
        if parts.shutdown.stop_over(record):
            parts.sharding.stop()
            parts.consent.stop()
            parts.replanning.stop()
        parts.saving.step_done(record, turn.now_s)
        parts.scaling.step_done(record, generation=parts.reconfiguration.generations.newest)
        parts.sharding.committed(record.step)
        if parts.reconfiguration.phase is Phase.TRAINING:
            parts.progress.expect(HANG_FLOOR_S, turn.now_s)

    def _compare(self, turn: Turn, worker_id: WorkerId, message: protocol.ReplicaDigests) -> None:
        parts, recovery = self._parts, self._parts.reconfiguration
        if recovery.phase is not Phase.TRAINING or message.generation != recovery.generations.current:
            return
        worker_ids = recovery.generations.plan.worker_ids
        distrusted = parts.replica_check.take(turn, worker_id, message, worker_ids)
        if distrusted:
            parts.replanning.distrust(distrusted)
            nodes = tuple(sorted({holder.node for holder in distrusted}))
            recovery.begin(turn, BeginRecovery(cause=journal.PlanCause.CORRUPTION, nodes=nodes))

    def _restore_failed(self, turn: Turn, node: str, message: protocol.RestoreFailed) -> None:
        recovery = self._parts.reconfiguration
        if message.generation != recovery.generations.current:
            return
        turn.note("error", f"{node} cannot restore {message.name}: {message.problem}")
        self._parts.restoring.note_broken(message.name)
        recovery.begin(turn, BeginRecovery(cause=journal.PlanCause.CHECKPOINT_BROKEN))
