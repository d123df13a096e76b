"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

What is reported goes to the part that it concerns: `node_lifecycle` knows who comes and goes, `startup` leads to the
first plan, `reconfiguration` from one plan to the next, `progress` knows the steps, `saving` the checkpoints. Each part
takes values and the time, may read other parts, and changes none: what it asks of them it returns, and `routing.py`
says what becomes of it. In which phase a run is follows from the state in `recovery/`, whose transitions are drawn in
`docs/architecture.md`.
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
    EndRun,
    Event,
    KillRequested,
    MessageReceived,
    NodeFailed,
    NodeLeftOut,
    NodeUp,
    PassOn,
    ProfileFound,
    Record,
    Remark,
    Send,
    StopRequested,
    notice,
)
from oobleck.control.journal import (
    ForkServerDown,
    JobEnded,
    JobStarted,
    JournalEntry,
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
from oobleck.errors import ConfigError, PeerError
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId

from .parts import make_parts
from .recovery import Phase
from .recovery.states import (
    BeginRecovery,
    CheckpointReported,
    FailureSuspected,
    GiveUp,
    HeldUp,
    RunEnded,
    TimePassed,
    WorkersResumed,
)
from .replayed_run import ReplayedRun
from .requests import Effects
from .routing import Routing, RunOver
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
        self._parts = make_parts(job, nodes, members, python_version=python_version, run=run, resume=resume)
        self._routing = Routing(job, self._parts)

    @property
    def phase(self) -> Phase:
        return self._parts.reconfiguration.phase

    # --- the machine's interface ---------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Command]:
        """Begin, or take over: reach all nodes."""
        if self._replayed is None:
            started = JobStarted(
                t_s=now_s, version=__version__, job=self._job, nodes=self._nodes, started_at=self._started_at
            )
            self._parts.startup.expect_all(now_s)
            self._do((Record(entry=started), *(Connect(node=spec) for spec in self._nodes)), now_s)
        else:
            take_over(self._parts, self._routing, self._job, self._nodes, self._replayed, now_s)
        return self._routing.take()

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take an event in. Raises nothing: what a peer does wrong costs that peer."""
        if self.phase is Phase.ENDED:
            return []
        self._parts.silence.note_call(now_s)
        try:
            self._take_in(event, now_s)
            if self._parts.reconfiguration.is_begun:
                self._do(self._parts.lifecycle.drain_noticed(now_s), now_s)
            self._follow_up(now_s)
        except RunOver as over:
            self._end(over.end, now_s)
        return self._routing.take()

    def next_deadline(self) -> float:
        """When `handle_deadline` wants to be called, at the latest; infinity for never."""
        if self.phase is Phase.ENDED:
            return math.inf
        parts = self._parts
        return min(
            [
                parts.startup.deadline_s,
                parts.reconfiguration.deadline_s,
                parts.progress.hangs_s,
                parts.lifecycle.retries_s,
                parts.saving.due_s,
                parts.shutdown.due_s,
                parts.sharding.due_s if self.phase is Phase.TRAINING else math.inf,
                parts.silence.due_s if parts.reconfiguration.is_begun else math.inf,
                self.reviews_s,
            ]
        )

    @property
    def reviews_s(self) -> float:
        """When it looks again at which nodes should train: a part of `next_deadline`, for who skips time."""
        return math.inf if self.phase is Phase.ENDED else min(self._parts.replanning.rescales_s, self._retries_s)

    @property
    def _retries_s(self) -> float:
        """When a slow node that was left out is to be tried again; infinity for never."""
        return math.inf if self._parts.reconfiguration.is_fencing else self._parts.replanning.retries_s

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self.phase is Phase.ENDED:
            return []
        self._parts.silence.note_call(now_s)
        try:
            held_up_s = self._parts.silence.forgive(now_s, late_s)
            if held_up_s:
                self._hold(now_s, held_up_s)
            self._act_on_time(now_s)
            self._follow_up(now_s)
        except RunOver as over:
            self._end(over.end, now_s)
        return self._routing.take()

    def _do(self, effects: Effects, now_s: float) -> None:
        """Carry out what a part has returned."""
        if effects:
            self._routing.carry_out(effects, now_s)

    def _take_in(self, event: Event, now_s: float) -> None:
        parts, is_begun = self._parts, self._parts.reconfiguration.is_begun
        match event:
            case NodeUp(hello=hello):
                misfit, generation = parts.preparation.misfit(hello), parts.reconfiguration.generations.current
                self._do(parts.lifecycle.node_up(event, now_s, misfit=misfit, generation=generation), now_s)
            case NodeFailed(node=node, loss=loss):
                self._do(parts.lifecycle.unreachable(node, loss, now_s), now_s)
            case NodeLeftOut(node=node, fault=fault):
                self._record(NodeUnfit(t_s=now_s, node=node, fault=fault, is_tried_again=False), now_s)
            case MessageReceived(node=node, message=message):
                self._said(node, message, now_s)
            case BatchReceived():
                self._all_said(event, now_s)
            case ProfileFound():
                self._do(parts.preparation.take_profile(event), now_s)
                self._train_when_ready(now_s)
            case StopRequested():
                self._stop_requested(event, now_s)
            case AddRequested(spec=spec):
                self._do(parts.lifecycle.add(spec, now_s), now_s)
            case DrainRequested(node=node):
                self._do(parts.lifecycle.drain(node, now_s, is_begun=is_begun), now_s)
            case KillRequested(node=node):
                parts.lifecycle.ban(node)
            case Remark(level=level, text=text):
                self._do((notice(now_s, level, text),), now_s)
            case _:
                assert_never(event)

    def _record(self, entry: JournalEntry, now_s: float) -> None:
        self._do((Record(entry=entry),), now_s)

    # --- time passes -------------------------------------------------------------------------------------------

    def _hold(self, now_s: float, late_s: float) -> None:
        """We ourselves were held up: nothing is overdue before what was said meanwhile is read."""
        soon_s = now_s + self._job.control.heartbeat_interval_s
        self._parts.startup.forgive(late_s, soon_s)
        self._do(self._parts.reconfiguration.give(HeldUp(until_s=soon_s), now_s), now_s)
        self._parts.progress.give_time(now_s)

    def _act_on_time(self, now_s: float) -> None:
        parts = self._parts
        recovery, progress, silence = parts.reconfiguration, parts.progress, parts.silence
        if recovery.is_begun:  # a start has a time limit of its own
            self._do(silence.judge(now_s), now_s)
        self._do(parts.startup.handle_deadline(now_s), now_s)
        self._do(recovery.give(TimePassed(is_suspicious=silence.is_suspicious), now_s), now_s)
        if now_s >= progress.hangs_s and silence.is_suspicious:
            progress.give_time(now_s)  # steps may be committed that nobody can tell us of
        elif now_s >= progress.hangs_s:
            self._begin(PlanCause.HANG, now_s, detect_s=now_s - progress.progressed_s)
        if now_s >= parts.saving.due_s:
            self._do(parts.saving.handle_deadline(now_s), now_s)
        if now_s >= parts.replanning.rescales_s:
            self._rescale(now_s)
        if now_s >= self._retries_s:
            self._do(parts.replanning.retry_slow(recovery.generations.plan, now_s), now_s)
        if self.phase is Phase.TRAINING and parts.sharding.takes_regrouping(now_s):
            self._begin(PlanCause.DATA_UNREADABLE, now_s)
        self._do(parts.lifecycle.retry_lost(now_s), now_s)

    def _rescale(self, now_s: float) -> None:
        """Look at how many nodes should train."""
        if self._parts.reconfiguration.is_fencing:
            self._parts.replanning.look_later(now_s)
        else:
            plan = self._parts.reconfiguration.generations.plan
            self._do(self._parts.replanning.rescale(plan, now_s), now_s)

    def _begin(self, cause: PlanCause, now_s: float, *, detect_s: float = 0.0) -> None:
        """Begin a recovery although no node is lost."""
        self._do((BeginRecovery(cause=cause, detect_s=detect_s),), now_s)

    def _follow_up(self, now_s: float) -> None:
        """Do what may have become possible, whatever has happened."""
        parts, generations = self._parts, self._parts.reconfiguration.generations
        if self.phase is Phase.TRAINING:
            save = parts.saving.is_behind
            self._do(parts.sharding.go_on(generations.current, now_s, save=save), now_s)
        self._do(parts.shutdown.follow_up(generations, now_s), now_s)

    # --- nodes and workers report ------------------------------------------------------------------------------

    def _said(self, node: str, message: AgentMessage, now_s: float) -> None:
        member, is_begun = self._parts.members[node], self._parts.reconfiguration.is_begun
        if member.state not in (NodeState.CONNECTED, NodeState.READY):
            return  # late words of a node that was given up
        heard = self._parts.silence.hear(member, now_s)
        if heard:
            self._do(heard, now_s)
            self._parts.progress.give_time(now_s)
        try:
            check_device(member, message)
            if not is_begun and is_of_training(message):
                return  # of a run before, or nonsense: this one has no plan yet that it could be of
            if not is_of_worker_that_ends(member, message):
                self._understand(member, message, now_s)
        except PeerError as error:
            self._do((GiveUp(nodes=(node,), loss=ProtocolBroken(problem=str(error))),), now_s)
        except ConfigError as error:
            if not self._parts.reconfiguration.is_begun:
                self._do((EndRun(exit_code=ExitCode.CONFIG, reason=str(error)),), now_s)
            # Whoever comes later must fit; those who train are not to suffer.
            self._do((GiveUp(nodes=(node,), loss=Misfit(problem=str(error))),), now_s)

    def _all_said(self, event: BatchReceived, now_s: float) -> None:
        """Like `_said` of each; what no worker of ours can say wrong is not checked again for each."""
        speakers = self._parts.members.hear(event.worker_ids, now_s)
        match event.message:
            case Status() | Resumed() | Pace() as message:
                self._understand_plan(speakers, message, now_s)
            case _:
                assert_never(event.message)

    def _understand_plan(self, worker_ids: list[WorkerId], message: Status | Resumed | Pace, now_s: float) -> None:
        """Workers report where they stand, that they compute under a plan, or how fast."""
        recovery = self._parts.reconfiguration
        match message:
            case Status():
                self._do(recovery.status(worker_ids, message, now_s), now_s)
            case Resumed():
                self._do(recovery.give(WorkersResumed(worker_ids=tuple(worker_ids), message=message), now_s), now_s)
            case Pace():
                if not recovery.is_fencing:
                    plan = recovery.generations.plan
                    self._do(self._parts.replanning.note_pace(worker_ids, message, plan, now_s), now_s)
            case _:
                assert_never(message)

    def _understand(self, member: Member, message: AgentMessage, now_s: float) -> None:
        node, parts = member.spec.name, self._parts
        match message:
            case Heartbeat(sequence=sequence):
                if sequence is not None:
                    self._do((Send(node=node, message=message),), now_s)
            case StorePut():
                self._pass_on(node, message, now_s)
            case StepCommitted(record=record):
                self._step_committed(record, now_s)
            case Evaluating() | EvaluationDone():
                self._evaluating(message, now_s)
            case Status() | Resumed() | Pace():
                self._understand_plan([WorkerId(node=node, device=message.device)], message, now_s)
            case LayersMoving():
                self._layers_moving(node, message, now_s)
            case Finished():
                if self.phase is Phase.TRAINING:
                    finished, plans = WorkerId(node=node, device=message.device), parts.reconfiguration.generations
                    self._do(parts.shutdown.worker_finished(finished, plans, now_s), now_s)
            case PeerFailed(generation=generation):
                self._do(parts.reconfiguration.give(FailureSuspected(generation=generation), now_s), now_s)
            case StateSaved() | StateNotSaved() | LayersPersisted() | CheckpointCommitted():
                self._saved(node, message, now_s)
            case CheckpointsFound():
                self._checkpoints_found(WorkerId(node=node, device=message.device), message, now_s)
            case ReplicaDigests():
                self._compare(WorkerId(node=node, device=message.device), message, now_s)
            case RestoreFailed():
                self._restore_failed(node, message, now_s)
            case ScanAnswer():
                self._do(parts.sharding.surveyed(WorkerId(node=node, device=message.device), message, now_s), now_s)
            case RecordsFailed():
                self._do(parts.sharding.failed(parts.reconfiguration.generations.current, message, now_s), now_s)
            case WorkerStarted():
                pass
            case WorkerReady():
                self._worker_ready(member, message, now_s)
            case Profiled():
                self._do(parts.preparation.take_measurement(message), now_s)
                self._train_when_ready(now_s)
            case WorkerExited():
                is_begun = parts.reconfiguration.is_begun
                self._do(parts.workers.worker_exited(member, message, now_s, is_begun=is_begun), now_s)
            case Leaving(reason=reason):
                self._record(TerminationNoticed(t_s=now_s, node=node, reason=reason), now_s)
                self._do(parts.lifecycle.noticed(member, now_s, is_begun=parts.reconfiguration.is_begun), now_s)
            case ForkServerEnded(end=end, is_restarted=is_restarted):
                self._record(ForkServerDown(t_s=now_s, node=node, end=end, is_restarted=is_restarted), now_s)
            case AgentStopped():
                is_in_plan = parts.reconfiguration.is_in_plan(node)
                self._do(parts.lifecycle.agent_stopped(member, message, now_s, is_in_plan=is_in_plan), now_s)
            case Hello():
                raise PeerError("a second hello on one connection")
            case _:
                assert_never(message)

    def _layers_moving(self, node: str, message: LayersMoving, now_s: float) -> None:
        if message.generation == self._parts.reconfiguration.generations.current:
            entry = LayersArriving(
                t_s=now_s,
                generation=message.generation,
                node=node,
                device=message.device,
                received_bytes=message.received_bytes,
                all_bytes=message.all_bytes,
            )
            self._record(entry, now_s)

    def _pass_on(self, origin: str, message: StorePut, now_s: float) -> None:
        ready = self._parts.members.ready_names
        nodes = tuple(node for node in message.nodes if node != origin and node in ready)
        if nodes:
            self._do((PassOn(nodes=nodes, key=message.key, value=message.value),), now_s)

    # --- workers become ready, and training begins -------------------------------------------------------------

    def _worker_ready(self, member: Member, message: WorkerReady, now_s: float) -> None:
        """A worker can be given a part. Raises ConfigError if it does not fit the others."""
        parts, recovery = self._parts, self._parts.reconfiguration
        worker = parts.workers.worker_up(member, message, now_s)
        if worker is not None:
            self._record(worker, now_s)
            self._do(parts.preparation.note_ready(member, message), now_s)
            self._do(parts.sharding.know(message.shards, now_s), now_s)
            member.note_ready(worker, generation=recovery.generations.current)
            if recovery.is_begun and member.is_ready:
                self._join(member.spec.name, now_s)
        self._train_when_ready(now_s)

    def _join(self, node: str, now_s: float) -> None:
        """A node has become ready: it trains at once if it is wanted, else it rests."""
        generations, members = self._parts.reconfiguration.generations, self._parts.members
        num_used = sum(members.took_part(each, generations.newest) for each in generations.plan.nodes)
        if self._parts.reconfiguration.is_fencing or self._parts.replanning.wants_more(num_used):
            self._do((BeginRecovery(cause=PlanCause.JOINED, nodes=(node,)),), now_s)
        else:
            self._parts.replanning.look_soon(now_s)

    def _train_when_ready(self, now_s: float) -> None:
        """Order the first plan once all that it needs is known."""
        if not self._parts.reconfiguration.is_begun:
            self._do(self._parts.startup.look(now_s), now_s)

    # --- steps -------------------------------------------------------------------------------------------------

    def _evaluating(self, message: Evaluating | EvaluationDone, now_s: float) -> None:
        if self.phase is Phase.TRAINING:
            self._parts.progress.expect(HANG_FLOOR_S, now_s)
        if isinstance(message, EvaluationDone):
            self._do(self._parts.progress.evaluate(message, now_s), now_s)

    def _step_committed(self, record: CommitRecord, now_s: float) -> None:
        parts = self._parts
        committed = parts.progress.commit(record, now_s)
        if not committed:
            return
        self._do(committed, now_s)
        parts.saving.step_done(record)
        parts.replanning.step_done(record, generation=parts.reconfiguration.generations.newest)
        parts.sharding.committed(record.step)
        if self.phase is Phase.TRAINING:
            parts.progress.expect(HANG_FLOOR_S, now_s)

    def _compare(self, worker_id: WorkerId, message: ReplicaDigests, now_s: float) -> None:
        generations = self._parts.reconfiguration.generations
        if self.phase is Phase.TRAINING and message.generation == generations.current:
            worker_ids = generations.plan.worker_ids
            self._do(self._parts.replica_check.take(worker_id, message, worker_ids, now_s), now_s)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _saved(
        self,
        node: str,
        message: StateSaved | StateNotSaved | LayersPersisted | CheckpointCommitted,
        now_s: float,
    ) -> None:
        saving = self._parts.saving
        match message:
            case StateSaved():
                self._do(saving.saved(WorkerId(node=node, device=message.device), message, now_s), now_s)
            case LayersPersisted():
                self._do(saving.persisted(message), now_s)
            case CheckpointCommitted():
                self._do(saving.committed(node, message, now_s), now_s)
            case StateNotSaved():
                self._do(saving.failed(node, message, now_s), now_s)
            case _:
                assert_never(message)

    def _checkpoints_found(self, worker_id: WorkerId, message: CheckpointsFound, now_s: float) -> None:
        self._parts.restoring.found(worker_id, message)
        if self._parts.reconfiguration.is_begun:
            self._do(self._parts.reconfiguration.give(CheckpointReported(), now_s), now_s)
        else:
            self._train_when_ready(now_s)

    def _restore_failed(self, node: str, message: RestoreFailed, now_s: float) -> None:
        """Nobody trains on what is broken: all go back to the checkpoint before it."""
        if message.generation != self._parts.reconfiguration.generations.current:
            return
        self._do((notice(now_s, "error", f"{node} cannot restore {message.name}: {message.problem}"),), now_s)
        self._parts.restoring.note_broken(message.name)
        self._begin(PlanCause.CHECKPOINT_BROKEN, now_s)

    # --- the end -----------------------------------------------------------------------------------------------

    def _stop_requested(self, event: StopRequested, now_s: float) -> None:
        if event.now or not self._parts.reconfiguration.is_begun:
            self._do((EndRun(exit_code=event.exit_code, reason=event.reason),), now_s)
        self._parts.shutdown.stop(event)
        self._parts.sharding.stop()
        self._do((notice(now_s, "info", "stopping after the step in flight"),), now_s)

    def _end(self, end: EndRun, now_s: float) -> None:
        parts, exit_code = self._parts, int(end.exit_code)  # what journals and processes know
        error = parts.shutdown.error_behind(end) if parts.reconfiguration.is_begun else None
        reason = end.reason if error is None else error_text(error)
        stop = StopAgent(reason=reason)
        self._do(tuple(Send(node=member.spec.name, message=stop) for member in parts.members.living), now_s)
        self._do(parts.reconfiguration.give(RunEnded(), now_s), now_s)
        self._record(JobEnded(t_s=now_s, exit_code=exit_code, reason=reason, error=error), now_s)
        self._do((End(exit_code=exit_code, reason=reason),), now_s)
