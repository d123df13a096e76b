"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

    PREPARING ── all workers ready, profile known ──> TRAINING <──────────────┐
        │                                                │ a node is lost     │ all survivors answered:
        │ a node fails                                   v                    │ orders
        v                                            FENCING ─────────────────┘
      ENDED <── all finished, a stop, no way on ─────────┘

Here the run begins and ends, and everybody's words go to the part that they concern: `attendance` knows who comes and
goes, `preparation` leads to the first plan, `reconfiguration` from one plan to the next, `progress` knows the steps,
`rejoining` the nodes to try again.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from typing import assert_never

from oobleck import __version__
from oobleck.control.checkpoints import Restoring, Saving
from oobleck.control.commit import HANG_FLOOR_S, Progress, ReplicaCheck
from oobleck.control.data import Sharding
from oobleck.control.events import (
    AddRequested,
    BatchReceived,
    Command,
    Connect,
    DrainRequested,
    Effects,
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
    MasterResumed,
    Misfit,
    NodeUnfit,
    PlanCause,
    ProtocolBroken,
    Silent,
    TerminationNoticed,
    error_text,
)
from oobleck.control.membership import (
    Leases,
    Member,
    Membership,
    NodeRetry,
    NodeState,
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
from oobleck.control.scaling import Scaling
from oobleck.errors import ConfigError, PeerError
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .node_lifecycle import NodeLifecycle
from .planning import planner_for
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replayed_run import ReplayedRun
from .shutdown import Shutdown
from .startup import Startup

__all__ = ["Coordinator", "Phase"]


class Phase(StrEnum):
    """What the run is doing, as the coordinator sees it."""

    PREPARING = "preparing"
    TRAINING = "training"
    FENCING = "fencing"
    ENDED = "ended"


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
        """With `remains`, take over a run that goes on without a master: its job is `job`.

        `resume` says what a run begins from: `auto`, its newest checkpoint; `never`, the model's initial values; or a
        path, on the nodes, to a checkpoint or a directory of checkpoints.
        """
        self._job = job
        self._nodes = nodes
        self._started_at = started_at
        self._replayed = replayed
        self._effects = Effects()
        self._members = replayed.members if replayed else Membership(nodes)
        self._progress = Progress(job, self._effects)
        run = run_digest(job.tag, replayed.started.started_at if replayed else started_at)
        self._preparation = Preparation(job, self._members, python_version=python_version, run=run)
        self._saving = Saving(job, self._members, self._effects, run=run)
        self._restoring = Restoring(self._effects, run=run, directory=None if resume in ("auto", "never") else resume)
        self._scaling = Scaling(job, self._members, self._progress, self._effects)
        self._sharding = Sharding(job, self._progress, self._effects, worker_ids=self._training_places)
        self._saving.judge_end(self._sharding.has_read_all)
        self._reconfiguration = Reconfiguration(
            job,
            self._members,
            self._progress,
            self._saving,
            self._restoring,
            self._scaling,
            self._sharding,
            self._effects,
            make_planner=partial(planner_for, job, devices_per_node=nodes[0].num_devices),
        )
        self._startup = Startup(
            job,
            nodes,
            self._members,
            self._preparation,
            self._saving,
            self._restoring,
            self._reconfiguration,
            self._sharding,
            self._effects,
            resume=resume,
        )
        self._shutdown = Shutdown(
            job, self._members, self._progress, self._saving, self._reconfiguration, self._sharding, self._effects
        )
        self._replica_check = ReplicaCheck(self._effects, degree=job.tensor_parallel)
        self._node_retry = NodeRetry(first_wait_s=job.control.rejoin_after_s)
        self._lifecycle = NodeLifecycle(
            job,
            self._members,
            self._preparation,
            self._progress,
            self._startup,
            self._shutdown,
            self._reconfiguration,
            self._node_retry,
            self._saving,
            self._sharding,
            self._effects,
            num_devices=nodes[0].num_devices,
            training_places=self._training_places,
        )
        self._leases = Leases(job.control, self._members)
        self._called_s = 0.0
        """When something was heard, or acted on, last."""
        self._unheard_s = 0.0
        """How long nothing was, up to the newest event, where that was longer than a lease."""
        self._has_ended = False

    @property
    def phase(self) -> Phase:
        if self._has_ended:
            return Phase.ENDED
        if not self._startup.is_over:
            return Phase.PREPARING
        return Phase.FENCING if self._reconfiguration.is_fencing else Phase.TRAINING

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
            self._take_over(self._replayed)
        return self._effects.take()

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take an event in. Raises nothing: what a peer does wrong costs that peer."""
        self._effects.now_s = now_s
        if self._has_ended:
            return []
        self._note_call(now_s)
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
        if self._has_ended:
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
                self._leases.due_s if self._startup.is_over else math.inf,
            ]
        )

    @property
    def reviews_s(self) -> float:
        """When it looks again at which nodes should train: a part of `next_deadline`, for who skips time."""
        return math.inf if self._has_ended else min(self._scaling.due_s, self._reconfiguration.retries_s)

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self._has_ended:
            return []
        self._effects.now_s = now_s
        self._note_call(now_s)
        if late_s > self._job.control.heartbeat_interval_s:
            self._forgive_lateness(now_s, max(late_s, self._unheard_s))
        self._unheard_s = 0.0
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
                self._startup.train_when_prepared()
            case StopRequested():
                self._stop_requested(event)
            case AddRequested(spec=spec):
                self._node_retry.forgive(spec.name)
                self._lifecycle.add(spec)
            case DrainRequested(node=node):
                self._lifecycle.drain(node)
            case KillRequested(node=node):
                self._node_retry.forget(node)
                self._members[node].is_banned = True
            case Remark(level=level, text=text):
                self._effects.notice(level, text)
            case _:
                assert_never(event)

    def _note_call(self, now_s: float) -> None:
        if now_s - self._called_s > self._job.control.lease_s:
            self._unheard_s = now_s - self._called_s
        self._called_s = now_s

    def _forgive_lateness(self, now_s: float, late_s: float) -> None:
        """We ourselves were held up: what was said meanwhile waits to be read, and nobody had our answers."""
        self._leases.forgive(now_s)
        soon_s = now_s + self._job.control.heartbeat_interval_s
        self._startup.deadline_s = max(self._startup.deadline_s + late_s, soon_s)
        self._reconfiguration.deadline_s = max(self._reconfiguration.deadline_s, soon_s)
        self._progress.give_time()

    def _judge_silence(self, now_s: float) -> None:
        """Give silent nodes up, but not where it may be us who hear nothing."""
        was_suspicious = self._leases.is_suspicious
        for member in self._leases.take_lapsed(now_s):
            self._lifecycle.fail(member.spec.name, Silent(silent_s=now_s - member.last_heard_s))
        if self._leases.is_suspicious and not was_suspicious:
            self._effects.notice(
                "warning",
                "most nodes have fallen silent at once; this master may be cut off itself, so they are waited for",
            )

    def _hear(self, member: Member) -> None:
        """A node said something."""
        now_s = self._effects.now_s
        member.last_heard_s = max(member.last_heard_s, now_s)
        silent_s = self._leases.heard(now_s)
        if silent_s is not None:
            self._effects.notice("info", f"nodes are heard of again, after {silent_s:.1f} s")
            self._progress.give_time()

    def _act_on_time(self, now_s: float) -> None:
        if self._startup.is_over:  # a start has a time limit of its own
            self._judge_silence(now_s)
        if now_s >= self._startup.deadline_s:
            self._startup.handle_deadline()
        if now_s >= self._reconfiguration.deadline_s:
            self._act_on_answers(now_s)
        if now_s >= self._progress.hangs_s and self._leases.is_suspicious:
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

    def _act_on_answers(self, now_s: float) -> None:
        """Answers have settled, or are missing."""
        silent = self._reconfiguration.silent_nodes()
        if silent and self._reconfiguration.waits_on(silent, is_suspicious=self._leases.is_suspicious):
            return
        loss = Silent(silent_s=now_s - self._reconfiguration.fenced_s, is_worker=True)
        for node in silent:
            self._lifecycle.fail(node, loss)
        if not silent:
            self._reconfiguration.handle_deadline()
            self._lifecycle.deal_with_accused()

    # --- nodes come and go -----------------------------------------------------------------------------------

    def _take_over(self, replayed: ReplayedRun) -> None:
        """Go on with a run that its master left: nobody stops for it, unless orders may have been lost."""
        now_s = self._effects.now_s
        self._effects.record(MasterResumed(t_s=now_s, away_s=now_s - replayed.last_s))
        restored = replayed.restored
        if restored is not None and restored.restored_step is not None:
            self._progress.go_back(restored.restored_step, generation=restored.generation)
        if replayed.origin is not None:
            self._restoring.begin_from(replayed.origin)
        for record in replayed.records:
            self._progress.restore(record)
        self._progress.furthest_step = replayed.furthest_step
        self._progress.restore_evaluated(replayed.evaluated_step)
        self._progress.foresee(replayed.predicted_step_s)
        self._preparation.profile = replayed.profile
        self._reconfiguration.restore(
            replayed.profile,
            replayed.generations,
            step_s=replayed.predicted_step_s,
            slow=replayed.slow,
            restored_generation=restored.generation if restored else 0,
            is_from_scratch=restored is None or restored.restored is None,
            began_from_scratch=replayed.began is None or replayed.began.restored is None,
        )
        self._saving.begin([layer.name for layer in replayed.profile.layers])
        self._saving.know(replayed.saved)
        self._scaling.restore(replayed.target)
        self._saving.plan_adopted(replayed.generations.plan, boundary=self._progress.last_step, redundant=True)
        if replayed.origin is not None:
            self._saving.begin_from(replayed.origin)
        for known in replayed.saved:
            self._saving.note_on_disk(known.step)
        self._sharding.restore(replayed.shards)
        self._startup.is_over = True
        self._progress.expect(self._job.control.start_timeout_s)
        for member in self._members.living:
            member.last_heard_s = now_s + self._job.control.connect_timeout_s
            self._effects.command(Connect(node=member.spec, attach=True))
        if not replayed.is_settled:
            self._reconfiguration.begin([], PlanCause.MASTER_LOST, detect_s=0.0)
        for spec in replayed.interrupted:
            self._lifecycle.add(spec)
        for spec in self._nodes:
            if spec.name not in self._members:
                self._lifecycle.add(spec)

    def _said(self, node: str, message: AgentMessage) -> None:
        member = self._members[node]
        if member.state not in (NodeState.CONNECTED, NodeState.READY):
            return  # late words of a node that was given up
        self._hear(member)
        try:
            check_device(member, message)
            if not self._startup.is_over and is_of_training(message):
                return  # of a run before, or nonsense: this one has no plan yet that it could be of
            if not is_of_worker_that_ends(member, message):
                self._understand(member, message)
        except PeerError as error:
            self._lifecycle.fail(node, ProtocolBroken(problem=str(error)))
        except ConfigError as error:
            if not self._startup.is_over:
                raise RunOver(ExitCode.CONFIG, str(error)) from error
            # Whoever comes later must fit; those who train are not to suffer.
            self._lifecycle.fail(node, Misfit(problem=str(error)))

    def _all_said(self, event: BatchReceived) -> None:
        """Like `_said` of each; what no worker of ours can say wrong is not checked again for each."""
        speakers = self._members.hear(event.worker_ids, self._effects.now_s)
        match event.message:
            case Status() as status:
                self._reconfiguration.status(speakers, status)
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
                self._reconfiguration.status([WorkerId(node=node, device=message.device)], message)
                self._lifecycle.deal_with_accused()
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
                self._lifecycle.worker_ready(member, message)
            case Profiled():
                self._effects.command(*self._preparation.take_measurement(message))
                self._startup.train_when_prepared()
            case WorkerExited():
                self._lifecycle.worker_exited(member, message)
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

    def _training_places(self) -> list[WorkerId]:
        """The workers of the newest plan that can be spoken to; none before the first."""
        if not self._reconfiguration.generations.plans:
            return []
        plan = self._reconfiguration.generations.plan
        return [worker_id for worker_id in plan.worker_ids if self._members[worker_id.node].is_ready]

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
        if self._startup.is_over:
            self._reconfiguration.found()
        else:
            self._startup.train_when_prepared()

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
        if event.now or not self._startup.is_over:
            raise RunOver(event.exit_code, event.reason)
        self._shutdown.stop(event)
        self._effects.notice("info", "stopping after the step in flight")

    def _end(self, over: RunOver) -> None:
        error = self._shutdown.error_behind(over) if self._startup.is_over else None
        reason = over.reason if error is None else error_text(error)
        for member in self._members.living:
            self._effects.send(member.spec.name, StopAgent(reason=reason))
        self._reconfiguration.close()
        self._effects.record(JobEnded(t_s=self._effects.now_s, exit_code=over.exit_code, reason=reason, error=error))
        self._effects.command(End(exit_code=over.exit_code, reason=reason))
        self._has_ended = True
