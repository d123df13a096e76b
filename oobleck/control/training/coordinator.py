"""The coordinator of `oobleck up`: what all nodes train, from the start through every plan to the end.

`reports.py` passes each report on to the part that it concerns: `startup` leads to the first plan, `reconfiguration`
from one plan to the next, `progress` knows the steps, `saving` the checkpoints. `parts.py` says which part may call
which. The phase of a run follows from the state in `recovery/`, whose transitions are drawn in `docs/architecture.md`.
"""

from __future__ import annotations

import math
from typing import ClassVar

from oobleck import __version__
from oobleck.control import events, journal, protocol
from oobleck.control.events import Turn
from oobleck.control.nodes import BaseCoordinator, Member, Membership
from oobleck.control.recovery import BeginRecovery, HeldUp, Phase, RunEnded, TimePassed, states
from oobleck.job import MAX_KINDS, JobSpec, NodeSpec
from oobleck.job.secrets import public_job
from oobleck.planner import WorkerId

from .parts import Parts
from .replayed_run import ReplayedRun
from .reports import Reports
from .takeover import take_over


class Coordinator(BaseCoordinator):
    """Makes all decisions of one run."""

    work: ClassVar[str] = "training"

    def __init__(
        self,
        job: JobSpec,
        nodes: tuple[NodeSpec, ...],
        *,
        started_at: str,
        python_version: str,
        replayed: ReplayedRun | None = None,
        resume: str = "auto",
    ) -> None:
        """Begin a run, or take over the run `replayed`, which continues without a master.

        `resume` says what the run begins from: `auto`, its newest checkpoint, if there is one; `newest`, the same, and
        the run ends without one; `never`, the model's initial values; or a path, on the nodes, to a checkpoint or a
        directory of checkpoints.
        """
        members = replayed.members if replayed else Membership.of(nodes)
        # Stages on several devices need nodes of one kind.
        most_kinds = MAX_KINDS if job.devices_per_stage == 1 else 1
        super().__init__(job.control, members, python_version=python_version, most_kinds=most_kinds)
        self._job = job
        self._nodes = nodes
        self._started_at = started_at
        self._replayed = replayed
        # A run keeps its digest under all of its masters: the names of its checkpoints have it.
        run = protocol.run_digest(job.tag, replayed.started.started_at if replayed else started_at)
        self._parts = Parts(job, nodes, members, self._lifecycle, self, run=run, resume=resume)
        self._reports = Reports(self._parts)

    @property
    def phase(self) -> Phase:
        return self._parts.reconfiguration.phase

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def is_begun(self) -> bool:
        return self._parts.reconfiguration.is_begun

    @property
    def generation(self) -> int:
        return self._parts.reconfiguration.generations.current

    @property
    def furthest_step(self) -> int:
        return self._parts.progress.furthest_step

    def begin(self, turn: Turn) -> None:
        if self._replayed is not None:
            take_over(self._parts, turn, self._job, self._nodes, self._replayed)
            return
        turn.record(
            journal.JobStarted(
                t_s=turn.now_s,
                version=__version__,
                job=public_job(self._job),
                nodes=self._nodes,
                started_at=self._started_at,
            )
        )
        self._parts.startup.expect_all(turn.now_s)
        turn.do(events.Connect(node=spec) for spec in self._nodes)

    # --- nodes -------------------------------------------------------------------------------------------------

    def is_at_work(self, member: Member) -> bool:
        return self.is_begun and member.is_ready

    def needs(self, node: str) -> bool:
        return self._parts.reconfiguration.is_in_plan(node)

    def configure(self, turn: Turn, node: str) -> None:
        self._parts.preparation.configure(turn, node)

    def node_back(self, turn: Turn, event: events.NodeUp) -> None:
        self._parts.workers.meet(turn, event)

    def node_met(self, turn: Turn, node: str, *, is_again: bool) -> None:
        parts = self._parts
        # The last messages to it may be lost with the connection before.
        if is_again:
            parts.shutdown.ask_again()
            parts.restoring.ask_again(turn, node)
            parts.reconfiguration.give(turn, states.NodeReached(node=node))
        parts.sharding.send_again(turn, parts.reconfiguration.training_places(node))
        parts.consent.send_again(turn, parts.reconfiguration.training_places(node))

    def drop_node(self, turn: Turn, node: str, loss: journal.Loss) -> None:
        parts = self._parts
        parts.replanning.forget_pace(node)
        if not self.is_begun:  # The run ends in a moment, so no other worker has to measure a profile.
            parts.startup.node_failed(node, loss, turn.now_s)
            return
        parts.preparation.node_lost(turn, node)
        parts.saving.node_lost(turn, node)
        parts.sharding.lost(node)

    def go_on_without(self, turn: Turn, member: Member, loss: journal.LossCause, silent_s: float) -> None:
        """Plan without a node that may have a part in the plan in force."""
        recovery, node = self._parts.reconfiguration, member.spec.name
        if not member.is_ready:  # It holds nothing, but the run may be waiting for its workers.
            recovery.give(turn, states.NodeGone())
        elif not recovery.can_spare(node):
            cause = journal.PlanCause.LOSS
            recovery.begin(turn, BeginRecovery(cause=cause, nodes=(node,), loss=loss, detect_s=silent_s))

    def node_draining(self, turn: Turn, node: str) -> None:
        self._parts.reconfiguration.begin(turn, BeginRecovery(cause=journal.PlanCause.DRAINED, nodes=(node,)))

    def node_left(self, turn: Turn, node: str) -> None:
        self._parts.saving.node_left(turn, node)
        self._parts.reconfiguration.give(turn, states.NodeDrained(node=node))

    def worker_ended(self, turn: Turn, worker_id: WorkerId, end: protocol.WorkerEnd) -> None:
        if isinstance(end, protocol.Raised):
            self._parts.shutdown.note_error(worker_id, end)
        if journal.failure_of_end(end) is journal.Failure.OUT_OF_MEMORY:
            self.memory_ran_out(turn, worker_id.node)

    def is_met_elsewhere(self, worker_id: WorkerId) -> bool:
        return self._parts.shutdown.is_met_elsewhere(worker_id)

    def memory_ran_out(self, turn: Turn, node: str) -> None:
        if self.is_begun:
            self._parts.replanning.use_less_memory(turn, node, self._parts.reconfiguration.generations.plan)

    def drop_worker(self, turn: Turn, worker_id: WorkerId) -> None:
        """Have another worker, or its successor, do what this one was asked to."""
        parts = self._parts
        parts.replanning.forget_pace(worker_id.node)
        parts.preparation.worker_lost(turn, worker_id)
        if not self.is_begun:  # Its successor is asked for checkpoints again, with all others.
            parts.restoring.forget()
            return
        parts.saving.worker_lost(turn, worker_id.node)
        parts.sharding.lost(worker_id.node)
        living = {member.spec.name for member in parts.members.living}
        training = [node for node in parts.reconfiguration.generations.plan.nodes if node in living]
        # The run waits for the workers that are started again, unless one error ended them all: it would do so again.
        # A spare has not met it, but where several nodes have, the spare would; a single node's error may be its own.
        ready = parts.members.ready_names
        is_everybodys = not ready if len(training) == 1 else ready.isdisjoint(training)
        if is_everybodys and parts.shutdown.is_same_error(training):
            turn.end("the same error ended all workers")

    # --- what is reported --------------------------------------------------------------------------------------

    def take(self, turn: Turn, event: events.Event) -> None:
        match event:
            case events.BatchReceived():
                self._reports.take_batch(turn, event)
            case events.ProfileFound():
                self._parts.preparation.take_profile(turn, event)
                self._reports.profile_known(turn)
            case events.LinkFound():
                self._parts.link_timing.take_found(turn, event)
                self._reports.train_when_ready(turn)
            case events.ScriptAnswered():
                self._parts.consent.answered(event)
            case events.ScriptEnded():
                self._parts.consent.end_asking()
            case _:
                raise AssertionError(f"{type(event).__name__} is not of training")

    def understand(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        self._reports.take(turn, member, message)

    def heard_again(self, turn: Turn) -> None:
        self._parts.progress.give_time(turn.now_s)

    # --- time passes -------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        parts = self._parts
        return min(
            [
                parts.startup.deadline_s,
                parts.link_timing.deadline_s,
                parts.reconfiguration.deadline_s,
                parts.hang_watch.due_s,
                parts.saving.due_s,
                parts.shutdown.due_s,
                # Outside of training no regrouping can begin, and it would be due again and again.
                parts.sharding.due_s if self.phase is Phase.TRAINING else math.inf,
                self.reviews_s,
            ]
        )

    @property
    def reviews_s(self) -> float:
        """When to review next which nodes should train. A part of `next_deadline`, for callers that skip time."""
        return math.inf if self.is_over else min(self._parts.scaling.due_s, self._retries_s)

    @property
    def _retries_s(self) -> float:
        return math.inf if self._parts.reconfiguration.is_fencing else self._parts.replanning.retries_s

    def act(self, turn: Turn, held_up_s: float) -> None:
        if held_up_s:
            self._hold(turn, held_up_s)
        parts, now_s = self._parts, turn.now_s
        recovery, progress = parts.reconfiguration, parts.progress
        if self.is_begun:
            self._give_up_silent(turn)
        if parts.link_timing.handle_deadline(turn):
            self._reports.train_when_ready(turn)
        parts.startup.handle_deadline(turn)
        is_suspicious = self._silence.is_suspicious
        recovery.give(turn, TimePassed(is_suspicious=is_suspicious))
        if now_s >= parts.hang_watch.due_s and self._silence.is_suspicious:
            progress.give_time(now_s)  # Most nodes are silent: steps may be committed that none can report.
        elif now_s >= parts.hang_watch.due_s:
            recovery.begin_if(turn, parts.hang_watch.handle_deadline(turn, recovery.training_places()))
        if now_s >= parts.saving.due_s:
            parts.saving.handle_deadline(turn)
        if now_s >= parts.scaling.due_s:
            self._rescale(turn)
        if now_s >= self._retries_s:
            recovery.begin_if(turn, parts.replanning.retry_slow(recovery.generations.plan, now_s))
        if self.phase is Phase.TRAINING and parts.sharding.takes_regrouping(now_s):
            recovery.begin(turn, BeginRecovery(cause=journal.PlanCause.DATA_UNREADABLE))
        self._lifecycle.retry_lost(turn)

    def _hold(self, turn: Turn, late_s: float) -> None:
        # The messages of the time in which this master was held up are read before anything is overdue.
        soon_s = turn.now_s + self._job.control.heartbeat_interval_s
        self._parts.startup.forgive(late_s, soon_s)
        self._parts.reconfiguration.give(turn, HeldUp(until_s=soon_s))
        self._parts.progress.give_time(turn.now_s)

    def _rescale(self, turn: Turn) -> None:
        recovery, replanning = self._parts.reconfiguration, self._parts.replanning
        if recovery.is_fencing:
            self._parts.scaling.look_later(turn.now_s)
        else:
            recovery.begin_if(turn, replanning.rescale(turn, recovery.generations.plan))

    def follow_up(self, turn: Turn) -> None:
        parts, generations = self._parts, self._parts.reconfiguration.generations
        if self.phase is Phase.TRAINING:
            parts.sharding.go_on(turn, generations.current, save=parts.saving.is_behind)
            parts.consent.go_on(turn, generations.current, save=parts.saving.is_behind)
        parts.shutdown.follow_up(turn, generations, is_training=self.phase is Phase.TRAINING)

    def stop(self, turn: Turn, event: events.StopRequested) -> None:
        if event.now or not self.is_begun:
            turn.end(event.reason, event.exit_code)
        self._parts.shutdown.stop(event)
        self._parts.sharding.stop()
        self._parts.consent.stop()
        self._parts.replanning.stop()
        turn.note("info", "stopping after the step in flight")

    def end(self, turn: Turn, end: events.EndRun) -> None:
        parts, exit_code = self._parts, int(end.exit_code)  # Journals and processes have plain numbers.
        error = parts.shutdown.error_behind(end) if self.is_begun else None
        reason = end.reason if error is None else error.text
        for member in parts.members.living:
            turn.send(member.spec.name, protocol.StopAgent(reason=reason))
        parts.reconfiguration.give(turn, RunEnded())
        turn.record(journal.JobEnded(t_s=turn.now_s, exit_code=exit_code, reason=reason, error=error))
        turn.do((events.End(exit_code=exit_code, reason=reason),))
