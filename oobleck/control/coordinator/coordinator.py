"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

Here the run begins and ends, and everybody's words go to the part that they concern: `node_lifecycle` knows who comes
and goes, `startup` leads to the first plan, `reconfiguration` from one plan to the next, `progress` knows the steps,
`node_retry` the nodes to try again. In which phase a run is follows from the state of `recovery.py`, whose transitions
are drawn in `docs/architecture.md`.
"""

from __future__ import annotations

import math
from typing import assert_never

from oobleck import __version__
from oobleck.control.commit import HANG_FLOOR_S
from oobleck.control.events import (
    AddRequested,
    BatchReceived,
    Command,
    Connect,
    DrainRequested,
    End,
    Event,
    KillRequested,
    MessageReceived,
    NodeFailed,
    NodeLeftOut,
    NodeUp,
    ProfileFound,
    Remark,
    RunOver,
    StopRequested,
)
from oobleck.control.journal import (
    ForkServerDown,
    JobEnded,
    JobStarted,
    LayersArriving,
    Misfit,
    NodeUnfit,
    PlanCause,
    ProtocolBroken,
    TerminationNoticed,
    error_text,
)
from oobleck.control.membership import (
    Member,
    Membership,
    MemberState,
    check_device,
    is_of_training,
    is_of_worker_that_ends,
)
from oobleck.control.protocol import (
    AgentMessage,
    AgentStopped,
    CheckpointCommitted,
    CheckpointsFound,
    CommitRecord,
    Evaluating,
    EvaluationDone,
    Finished,
    ForkServerEnded,
    Heartbeat,
    Hello,
    LayersMoving,
    LayersPersisted,
    Leaving,
    Pace,
    PeerFailed,
    Profiled,
    RecordsFailed,
    ReplicaDigests,
    RestoreFailed,
    Resumed,
    ScanAnswer,
    StateNotSaved,
    StateSaved,
    Status,
    StepCommitted,
    StopAgent,
    StorePut,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
    run_digest,
)
from oobleck.errors import ConfigError, PeerError, PlanningError
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .parts import make_parts
from .recovery import Phase
from .replayed_run import ReplayedRun
from .takeover import take_over

__all__ = ["Coordinator", "Phase"]


class Coordinator:
    """Decides everything of one run. Mutable; changes through `start`, `handle` and `handle_deadline` alone."""

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
        """With `replayed`, take over a run that continues without a master: its job is `job`.

        `resume` says what a run begins from: `auto`, its newest checkpoint; `never`, the model's initial values; or a
        path, on the nodes, to a checkpoint or a directory of checkpoints.
        """
        self._job = job
        self._nodes = nodes
        self._started_at = started_at
        self._replayed = replayed
        members = replayed.members if replayed else Membership(nodes)
        run = run_digest(job.tag, replayed.started.started_at if replayed else started_at)
        self._parts = parts = make_parts(job, nodes, members, python_version=python_version, run=run, resume=resume)
        self._effects = parts.effects
        self._members = parts.members
        self._progress = parts.progress
        self._preparation = parts.preparation
        self._saving = parts.saving
        self._restoring = parts.restoring
        self._scaling = parts.scaling
        self._sharding = parts.sharding
        self._reconfiguration = parts.reconfiguration
        self._startup = parts.startup
        self._shutdown = parts.shutdown
        self._replica_check = parts.replica_check
        self._node_retry = parts.node_retry
        self._lifecycle = parts.lifecycle
        self._workers = parts.workers
        self._silence = parts.silence

    @property
    def phase(self) -> Phase:
        return self._reconfiguration.phase

    # --- the machine's interface ---------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Command]:
        """Begin, or take over: reach all nodes."""
        self._effects.now_s = now_s
        if self._replayed is None:
            self._effects.record(
                JobStarted(
                    t_s=now_s, version=__version__, job=self._job, nodes=self._nodes, started_at=self._started_at
                )
            )
            self._startup.expect_all()
            self._effects.command(*(Connect(node=spec) for spec in self._nodes))
        else:
            take_over(self._parts, self._job, self._nodes, self._replayed, now_s)
        return self._effects.take()

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take an event in. Raises nothing: what a peer does wrong costs that peer."""
        self._effects.now_s = now_s
        if self.phase is Phase.ENDED:
            return []
        self._silence.note_call(now_s)
        try:
            self._take_in(event)
            self._lifecycle.drain_noticed()
            self._go_on_with_shards()
            self._shutdown.follow_up()
        except RunOver as over:
            self._end(over)
        return self._effects.take()

    def next_deadline(self) -> float:
        """When `handle_deadline` wants to be called, at the latest; infinity for never."""
        if self.phase is Phase.ENDED:
            return math.inf
        return min(
            [
                self._startup.deadline_s,
                self._reconfiguration.deadline_s,
                self._reconfiguration.retries_s,
                self._progress.hangs_s,
                self._node_retry.due_s,
                self._saving.due_s,
                self._scaling.due_s,
                self._shutdown.due_s,
                self._sharding.due_s if self.phase is Phase.TRAINING else math.inf,
                self._silence.due_s if self._reconfiguration.is_begun else math.inf,
            ]
        )

    @property
    def reviews_s(self) -> float:
        """When it looks again at which nodes should train: a part of `next_deadline`, for who skips time."""
        return math.inf if self.phase is Phase.ENDED else min(self._scaling.due_s, self._reconfiguration.retries_s)

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self.phase is Phase.ENDED:
            return []
        self._effects.now_s = now_s
        self._silence.note_call(now_s)
        held_up_s = self._silence.forgive(now_s, late_s)
        if held_up_s:
            self._hold(now_s, held_up_s)
        try:
            self._act_on_time(now_s)
            self._go_on_with_shards()
            self._shutdown.follow_up()
        except RunOver as over:
            self._end(over)
        return self._effects.take()

    def _take_in(self, event: Event) -> None:
        match event:
            case NodeUp():
                self._lifecycle.node_up(event)
            case NodeFailed(node=node, loss=loss):
                self._lifecycle.unreachable(node, loss)
            case NodeLeftOut(node=node, fault=fault):
                entry = NodeUnfit(t_s=self._effects.now_s, node=node, fault=fault, is_tried_again=False)
                self._effects.record(entry)
            case MessageReceived(node=node, message=message):
                self._said(node, message)
            case BatchReceived():
                self._all_said(event)
            case ProfileFound():
                self._effects.command(*self._preparation.take_profile(event))
                self._train_when_ready()
            case StopRequested():
                self._stop_requested(event)
            case AddRequested(spec=spec):
                self._node_retry.forgive(spec.name)
                self._lifecycle.add(spec)
            case DrainRequested(node=node):
                self._lifecycle.drain(node)
            case KillRequested(node=node):
                self._node_retry.forget(node)
                self._members[node].ban()
            case Remark(level=level, text=text):
                self._effects.notice(level, text)
            case _:
                assert_never(event)

    def _hold(self, now_s: float, late_s: float) -> None:
        """We ourselves were held up: nothing is overdue before what was said meanwhile is read."""
        soon_s = now_s + self._job.control.heartbeat_interval_s
        self._startup.forgive(late_s, soon_s)
        self._reconfiguration.hold(soon_s)
        self._progress.give_time()

    def _act_on_time(self, now_s: float) -> None:
        if self._reconfiguration.is_begun:  # a start has a time limit of its own
            for node, loss in self._silence.judge(now_s):
                self._lifecycle.fail(node, loss)
        if now_s >= self._startup.deadline_s:
            self._startup.handle_deadline()
        silent = self._reconfiguration.handle_deadline(is_suspicious=self._silence.is_suspicious)
        self._lifecycle.give_up(silent)
        if now_s >= self._progress.hangs_s and self._silence.is_suspicious:
            self._progress.give_time()  # steps may be committed that nobody can tell us of
        elif now_s >= self._progress.hangs_s:
            self._reconfiguration.begin([], PlanCause.HANG, detect_s=now_s - self._progress.progressed_s)
        if now_s >= self._saving.due_s:
            self._saving.handle_deadline()
        if now_s >= self._scaling.due_s:
            self._reconfiguration.scale()
        if now_s >= self._reconfiguration.retries_s:
            self._reconfiguration.retry_slow()
        if self.phase is Phase.TRAINING and self._sharding.takes_regrouping():
            self._reconfiguration.begin([], PlanCause.DATA_UNREADABLE, detect_s=0.0)
        self._effects.command(*(Connect(node=spec) for spec in self._node_retry.take_due(now_s)))

    # --- nodes come and go -----------------------------------------------------------------------------------

    def _said(self, node: str, message: AgentMessage) -> None:
        member = self._members[node]
        if member.state not in (MemberState.CONNECTED, MemberState.READY):
            return  # late words of a node that was given up
        if self._silence.hear(member, self._effects.now_s):
            self._progress.give_time()
        try:
            check_device(member, message)
            if not self._reconfiguration.is_begun and is_of_training(message):
                return  # of a run before, or nonsense: this one has no plan yet that it could be of
            if not is_of_worker_that_ends(member, message):
                self._understand(member, message)
        except PeerError as error:
            self._lifecycle.fail(node, ProtocolBroken(problem=str(error)))
        except ConfigError as error:
            if not self._reconfiguration.is_begun:
                raise RunOver(ExitCode.CONFIG, str(error)) from error
            # Whoever comes later must fit; those who train are not to suffer.
            self._lifecycle.fail(node, Misfit(problem=str(error)))

    def _all_said(self, event: BatchReceived) -> None:
        """Like `_said` of each; what no worker of ours can say wrong is not checked again for each."""
        speakers = self._members.hear(event.worker_ids, self._effects.now_s)
        match event.message:
            case Status() as status:
                self._lifecycle.give_up(self._reconfiguration.status(speakers, status))
            case Resumed() as resumed:
                self._reconfiguration.resumed(speakers, resumed)
            case Pace() as pace:
                self._reconfiguration.note_pace(speakers, pace)
            case _:
                assert_never(event.message)

    def _understand(self, member: Member, message: AgentMessage) -> None:
        node = member.spec.name
        match message:
            case Heartbeat(sequence=sequence):
                if sequence is not None:
                    self._effects.send(node, message)
            case StorePut():
                self._pass_on(node, message)
            case StepCommitted(record=record):
                self._step_committed(record)
            case Evaluating() | EvaluationDone():
                self._evaluating(message)
            case Status():
                worker_ids = [WorkerId(node=node, device=message.device)]
                self._lifecycle.give_up(self._reconfiguration.status(worker_ids, message))
            case Resumed():
                self._reconfiguration.resumed([WorkerId(node=node, device=message.device)], message)
            case LayersMoving():
                self._layers_moving(node, message)
            case Finished():
                if self.phase is Phase.TRAINING:
                    self._shutdown.worker_finished(WorkerId(node=node, device=message.device))
            case Pace():
                self._reconfiguration.note_pace([WorkerId(node=node, device=message.device)], message)
            case PeerFailed():
                self._reconfiguration.suspect(message)
            case StateSaved() | StateNotSaved() | LayersPersisted() | CheckpointCommitted():
                self._saved(node, message)
            case CheckpointsFound():
                self._checkpoints_found(WorkerId(node=node, device=message.device), message)
            case ReplicaDigests():
                self._compare(WorkerId(node=node, device=message.device), message)
            case RestoreFailed():
                self._restore_failed(node, message)
            case ScanAnswer():
                self._sharding.surveyed(WorkerId(node=node, device=message.device), message)
            case RecordsFailed():
                self._sharding.failed(self._reconfiguration.generations.current, message)
            case WorkerStarted():
                pass
            case WorkerReady():
                self._workers.worker_ready(member, message)
                self._train_when_ready()
            case Profiled():
                self._effects.command(*self._preparation.take_measurement(message))
                self._train_when_ready()
            case WorkerExited():
                loss = self._workers.worker_exited(member, message)
                if loss is not None:
                    self._lifecycle.fail(node, loss)
            case Leaving(reason=reason):
                self._effects.record(TerminationNoticed(t_s=self._effects.now_s, node=node, reason=reason))
                self._lifecycle.noticed(member)
            case ForkServerEnded(end=end, is_restarted=is_restarted):
                entry = ForkServerDown(t_s=self._effects.now_s, node=node, end=end, is_restarted=is_restarted)
                self._effects.record(entry)
            case AgentStopped():
                self._lifecycle.agent_stopped(member, message)
            case Hello():
                raise PeerError("a second hello on one connection")
            case _:
                assert_never(message)

    def _layers_moving(self, node: str, message: LayersMoving) -> None:
        if message.generation == self._reconfiguration.generations.current:
            self._effects.record(
                LayersArriving(
                    t_s=self._effects.now_s,
                    generation=message.generation,
                    node=node,
                    device=message.device,
                    received_bytes=message.received_bytes,
                    all_bytes=message.all_bytes,
                )
            )

    def _pass_on(self, origin: str, message: StorePut) -> None:
        ready = self._members.ready_names
        nodes = tuple(node for node in message.nodes if node != origin and node in ready)
        if nodes:
            self._effects.pass_on(nodes, message.key, message.value)

    # --- from the start to the end -----------------------------------------------------------------------------

    def _train_when_ready(self) -> None:
        """Order the first plan once all that it needs is known. Raises RunOver where there is none."""
        ready = None if self._reconfiguration.is_begun else self._startup.take_ready()
        if ready is None:
            return
        try:
            self._reconfiguration.begin_training(ready.profile, ready.candidate)
        except PlanningError as error:
            raise RunOver(ExitCode.CONFIG, str(error)) from error

    def _evaluating(self, message: Evaluating | EvaluationDone) -> None:
        if self.phase is Phase.TRAINING:
            self._progress.expect(HANG_FLOOR_S)
        if isinstance(message, EvaluationDone):
            self._progress.evaluate(message)

    def _step_committed(self, record: CommitRecord) -> None:
        if not self._progress.commit(record):
            return
        self._saving.step_done(record)
        self._scaling.step_done(record, generation=self._reconfiguration.generations.newest)
        self._sharding.committed(record.step)
        if self.phase is Phase.TRAINING:
            self._progress.expect(HANG_FLOOR_S)

    def _go_on_with_shards(self) -> None:
        if self.phase is Phase.TRAINING:
            generation = self._reconfiguration.generations.current
            self._sharding.go_on(generation, save=self._saving.is_behind)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _saved(self, node: str, message: StateSaved | StateNotSaved | LayersPersisted | CheckpointCommitted) -> None:
        match message:
            case StateSaved():
                self._saving.saved(WorkerId(node=node, device=message.device), message)
            case LayersPersisted():
                self._saving.persisted(message)
            case CheckpointCommitted():
                self._saving.committed(node, message)
            case StateNotSaved():
                self._saving.failed(node, message)
            case _:
                assert_never(message)

    def _checkpoints_found(self, worker_id: WorkerId, message: CheckpointsFound) -> None:
        self._restoring.found(worker_id, message)
        if self._reconfiguration.is_begun:
            self._reconfiguration.found()
        else:
            self._train_when_ready()

    def _compare(self, worker_id: WorkerId, message: ReplicaDigests) -> None:
        generations = self._reconfiguration.generations
        if self.phase is not Phase.TRAINING or message.generation != generations.current:
            return
        distrusted = self._replica_check.take(worker_id, message, generations.plan.worker_ids)
        if distrusted:
            self._reconfiguration.repair(distrusted)

    def _restore_failed(self, node: str, message: RestoreFailed) -> None:
        """Nobody trains on what is broken: all go back to the checkpoint before it."""
        if message.generation != self._reconfiguration.generations.current:
            return
        self._effects.notice("error", f"{node} cannot restore {message.name}: {message.problem}")
        self._restoring.note_broken(message.name)
        self._reconfiguration.begin([], PlanCause.CHECKPOINT_BROKEN, detect_s=0.0)

    # --- the end -----------------------------------------------------------------------------------------------

    def _stop_requested(self, event: StopRequested) -> None:
        if event.now or not self._reconfiguration.is_begun:
            raise RunOver(event.exit_code, event.reason)
        self._shutdown.stop(event)
        self._effects.notice("info", "stopping after the step in flight")

    def _end(self, over: RunOver) -> None:
        error = self._shutdown.error_behind(over) if self._reconfiguration.is_begun else None
        reason = over.reason if error is None else error_text(error)
        for member in self._members.living:
            self._effects.send(member.spec.name, StopAgent(reason=reason))
        self._reconfiguration.close()
        self._effects.record(JobEnded(t_s=self._effects.now_s, exit_code=over.exit_code, reason=reason, error=error))
        self._effects.command(End(exit_code=over.exit_code, reason=reason))
