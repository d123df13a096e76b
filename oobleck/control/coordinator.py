"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

    PREPARING ── all workers ready, profile known ──> TRAINING <──────────────┐
        │                                                │ a node is lost     │ all survivors answered:
        │ a node fails                                   v                    │ orders
        v                                            FENCING ─────────────────┘
      ENDED <── all finished, a stop, no way on ─────────┘

Here nodes come and go, and the run begins and ends. Its parts: `preparation` leads to the first plan,
`reconfiguration` from one plan to the next, `progress` knows the steps, `rejoining` the nodes to try again.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import partial
from typing import assert_never

from oobleck import __version__
from oobleck.errors import ConfigError, PeerError, UsageError
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import Place

from .beginning import Beginning
from .comparing import Comparing
from .diagnosis import TERMINATION_WORDS
from .ending import Ending
from .events import (
    AddRequested,
    AllSaid,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    End,
    Event,
    KillRequested,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Remark,
    Said,
    StopRequested,
)
from .journal import (
    Cause,
    JobEnded,
    JobStarted,
    LayersArriving,
    MasterResumed,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    Notice,
    WorkerDown,
    WorkerUp,
)
from .manifest import run_digest
from .membership import Member, Membership, NodeState
from .messages import (
    AgentMessage,
    AgentStopped,
    CheckpointCommitted,
    CheckpointsFound,
    CommitRecord,
    Evaluating,
    EvaluationDone,
    Finished,
    Heartbeat,
    Hello,
    KillWorker,
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
    StartWorker,
    StateNotSaved,
    StateSaved,
    Status,
    StepCommitted,
    StopAgent,
    StorePut,
    Surveyed,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from .outbox import Outbox, RunOver
from .planning import planner_for
from .preparation import Preparation
from .progress import HANG_FLOOR_S, Progress
from .reconfiguration import Reconfiguration
from .rejoining import QUARANTINE_LOSSES, Rejoining
from .remains import Remains
from .restoring import Restoring
from .saving import Saving
from .scaling import Scaling
from .sharding import Sharding

__all__ = ["Coordinator", "Phase"]

_MAX_RESTARTS = 3
"""How often a node's worker is started again before the node is taken for broken."""
_MAY_COME_BACK = frozenset({Cause.CONNECTION_LOST, Cause.LEASE_EXPIRED, Cause.UNREACHABLE})
"""What a node is tried again after."""


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
        remains: Remains | None = None,
        resume: str = "auto",
    ) -> None:
        """With `remains`, take over a run that goes on without a master: its job is `job`.

        `resume` says what a run begins from: `auto`, its newest checkpoint; `never`, the model's initial values; or a
        path, on the nodes, to a checkpoint or a directory of checkpoints.
        """
        self._job = job
        self._nodes = nodes
        self._started_at = started_at
        self._remains = remains
        self._outbox = Outbox()
        self._members = remains.members if remains else Membership(nodes)
        self._progress = Progress(job, self._outbox)
        run = run_digest(job.tag, remains.started.started_at if remains else started_at)
        self._preparation = Preparation(job, self._members, python_version=python_version, run=run)
        self._saving = Saving(job, self._members, self._outbox, run=run)
        self._restoring = Restoring(self._outbox, run=run, directory=None if resume in ("auto", "never") else resume)
        self._scaling = Scaling(job, self._members, self._progress, self._outbox)
        self._sharding = Sharding(job, self._progress, self._outbox, places=self._training_places)
        self._reconfiguration = Reconfiguration(
            job,
            self._members,
            self._progress,
            self._saving,
            self._restoring,
            self._scaling,
            self._sharding,
            self._outbox,
            make_planner=partial(planner_for, job, devices_per_node=nodes[0].num_devices),
        )
        self._beginning = Beginning(
            job,
            nodes,
            self._members,
            self._preparation,
            self._saving,
            self._restoring,
            self._reconfiguration,
            self._sharding,
            self._outbox,
            resume=resume,
        )
        self._ending = Ending(
            job, self._members, self._progress, self._saving, self._reconfiguration, self._sharding, self._outbox
        )
        self._comparing = Comparing(self._outbox, degree=job.tensor_parallel)
        self._rejoining = Rejoining(first_wait_s=job.control.rejoin_after_s)
        self._has_ended = False

    @property
    def phase(self) -> Phase:
        if self._has_ended:
            return Phase.ENDED
        if not self._beginning.is_over:
            return Phase.PREPARING
        return Phase.FENCING if self._reconfiguration.is_fencing else Phase.TRAINING

    # --- the machine's interface ---------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Command]:
        """Begin, or take over: reach all nodes."""
        self._outbox.now_s = now_s
        if self._remains is None:
            self._outbox.record(
                JobStarted(
                    t_s=now_s, version=__version__, job=self._job, nodes=self._nodes, started_at=self._started_at
                )
            )
            self._beginning.expect_all()
            self._outbox.command(*(Connect(node=spec) for spec in self._nodes))
        else:
            self._take_over(self._remains)
        return self._outbox.take()

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take an event in. Raises nothing: what a peer does wrong costs that peer."""
        self._outbox.now_s = now_s
        if self._has_ended:
            return []
        try:
            self._take_in(event)
            self._go_on_with_shards()
            self._ending.follow_up()
        except RunOver as over:
            self._end(over)
        return self._outbox.take()

    def next_deadline(self) -> float:
        """When `handle_deadline` wants to be called, at the latest; infinity for never."""
        if self._has_ended:
            return math.inf
        lease_s = self._job.control.lease_s
        return min(
            [
                self._beginning.deadline_s,
                self._reconfiguration.deadline_s,
                self._progress.hangs_s,
                self._rejoining.due_s,
                self._saving.due_s,
                self._scaling.due_s,
                self._ending.due_s,
                self._sharding.due_s if self.phase is Phase.TRAINING else math.inf,
                *(member.last_heard_s + lease_s for member in self._members.living),
            ]
        )

    @property
    def scales_s(self) -> float:
        """When it looks again at how many nodes should train: a part of `next_deadline`, for who skips time."""
        return math.inf if self._has_ended else self._scaling.due_s

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self._has_ended:
            return []
        self._outbox.now_s = now_s
        if late_s > self._job.control.heartbeat_interval_s:
            self._forgive_lateness(now_s)
        try:
            self._act_on_time(now_s)
            self._go_on_with_shards()
            self._ending.follow_up()
        except RunOver as over:
            self._end(over)
        return self._outbox.take()

    def _take_in(self, event: Event) -> None:
        match event:
            case NodeUp():
                self._node_up(event)
            case NodeFailed(node=node, cause=cause, evidence=evidence):
                self._unreachable(node, cause, evidence)
            case Said(node=node, message=message):
                self._said(node, message)
            case AllSaid():
                self._all_said(event)
            case ProfileFound():
                self._outbox.command(*self._preparation.take_profile(event))
                self._beginning.train_when_prepared()
            case StopRequested():
                self._stop_requested(event)
            case AddRequested(spec=spec):
                self._rejoining.forgive(spec.name)
                self._add(spec)
            case DrainRequested(node=node):
                self._drain(node)
            case KillRequested(node=node):
                self._rejoining.forget(node)
                self._members[node].is_banned = True
            case Remark(level=level, text=text):
                self._notice(level, text)
            case _:
                assert_never(event)

    def _forgive_lateness(self, now_s: float) -> None:
        """We ourselves were held up: what nodes said meanwhile waits to be read, so no lease has lapsed."""
        for member in self._members.living:
            member.last_heard_s = now_s
        soon_s = now_s + self._job.control.heartbeat_interval_s
        self._beginning.deadline_s = max(self._beginning.deadline_s, soon_s)
        self._reconfiguration.deadline_s = max(self._reconfiguration.deadline_s, soon_s)
        self._progress.hangs_s = max(self._progress.hangs_s, soon_s)

    def _act_on_time(self, now_s: float) -> None:
        for member in self._members.living:
            # Compared as `next_deadline` computes it: a difference may round to less, and be due for ever.
            if now_s >= member.last_heard_s + self._job.control.lease_s:
                evidence = f"not heard of for {now_s - member.last_heard_s:.1f} s"
                self._node_failed(member.spec.name, Cause.LEASE_EXPIRED, evidence)
        if now_s >= self._beginning.deadline_s:
            self._beginning.handle_deadline()
        if now_s >= self._reconfiguration.deadline_s:
            silent = self._reconfiguration.silent_nodes()
            for node in silent:
                evidence = f"its worker did not answer for {self._job.control.lease_s:g} s"
                self._node_failed(node, Cause.LEASE_EXPIRED, evidence)
            if not silent:
                self._reconfiguration.handle_deadline()
                self._deal_with_accused()
        if now_s >= self._progress.hangs_s:
            self._reconfiguration.begin([], Cause.HANG, detect_s=now_s - self._progress.progressed_s)
        if now_s >= self._saving.due_s:
            self._saving.handle_deadline()
        if now_s >= self._scaling.due_s:
            self._reconfiguration.scale()
        if self.phase is Phase.TRAINING and self._sharding.takes_regrouping():
            self._reconfiguration.begin([], Cause.DATA_UNREADABLE, detect_s=0.0)
        self._outbox.command(*(Connect(node=spec) for spec in self._rejoining.take_due(now_s)))

    # --- nodes come and go -----------------------------------------------------------------------------------

    def _take_over(self, remains: Remains) -> None:
        """Go on with a run that its master left: nobody stops for it, unless orders may have been lost."""
        now_s = self._outbox.now_s
        self._outbox.record(MasterResumed(t_s=now_s, away_s=now_s - remains.last_s))
        restored = remains.restored
        if restored is not None and restored.restored_step is not None:
            self._progress.go_back(restored.restored_step, generation=restored.generation)
        if remains.origin is not None:
            self._restoring.begin_from(remains.origin)
        for record in remains.records:
            self._progress.restore(record)
        self._preparation.profile = remains.profile
        self._reconfiguration.restore(
            remains.profile,
            remains.generations,
            restored_generation=restored.generation if restored else 0,
        )
        self._saving.begin([layer.name for layer in remains.profile.layers])
        self._saving.know(remains.saved, ())
        self._scaling.restore(remains.target)
        self._saving.plan_adopted(remains.generations.plan, boundary=self._progress.last_step, redundant=True)
        self._sharding.restore(remains.shards)
        self._beginning.is_over = True
        self._progress.expect(self._job.control.start_timeout_s)
        for member in self._members.living:
            member.last_heard_s = now_s + self._job.control.connect_timeout_s
            self._outbox.command(Connect(node=member.spec, attach=True))
        if not remains.is_settled:
            self._reconfiguration.begin([], Cause.MASTER_LOST, detect_s=0.0)
        for spec in remains.interrupted:
            self._add(spec)
        for spec in self._nodes:
            if spec.name not in self._members:
                self._add(spec)

    def _node_up(self, event: NodeUp) -> None:
        node = event.node
        if (spec := self._rejoining.forget(node)) is not None:
            self._members.add(spec)
            self._outbox.record(NodeAdded(t_s=self._outbox.now_s, node=spec))
        member = self._members[node]
        misfit = self._preparation.misfit(event.hello)
        if misfit is not None:
            self._node_failed(node, Cause.UNREACHABLE, misfit)
        elif member.state is NodeState.CONNECTING:
            member.last_heard_s = self._outbox.now_s
            self._outbox.record(NodeConnected(t_s=self._outbox.now_s, node=node, agent_pid=event.hello.pid))
            self._outbox.command(*self._preparation.configure(event, self._outbox.now_s))
        elif member.agent_pid != event.hello.pid:
            self._node_failed(node, Cause.CONNECTION_LOST, "its agent was lost while there was no master")
        elif event.hello.generation > self._reconfiguration.generations.current:
            raise RunOver(
                1,
                f"{node} trains in generation {event.hello.generation}, and the journal knows none after "
                f"{self._reconfiguration.generations.current}: its end is lost; start anew with --resume never",
            )
        else:
            member.meet(event.hello, address=event.address, now_s=self._outbox.now_s)
            self._sharding.tell(place for place in self._training_places() if place.node == node)
            for device in sorted({*range(member.spec.num_devices)} - {*member.ready} - {*event.hello.workers}):
                self._start_again(member, device)
            for device in sorted(member.ending.intersection(event.hello.workers)):
                self._outbox.send(node, KillWorker(device=device))  # said before, and lost perhaps

    def _unreachable(self, node: str, cause: Cause, evidence: str) -> None:
        """A connection failed, or could not be made."""
        if node in self._rejoining:
            self._rejoining.note_failed(node, self._outbox.now_s)
            if cause is Cause.UNFIT:
                self._notice("warning", f"{node}: {evidence}")
        else:
            self._node_failed(node, cause, evidence)

    def _node_failed(self, node: str, cause: Cause, evidence: str, *, is_user_error: bool = False) -> None:
        member = self._members[node]
        if member.state in (NodeState.LOST, NodeState.LEFT):
            return
        now_s = self._outbox.now_s
        silent_s = max(0.0, now_s - member.last_heard_s)
        trained = member.is_ready
        member.move_to(NodeState.LOST)
        self._reconfiguration.forget_pace(node)
        self._outbox.command(Disconnect(node=node))
        is_over = self._beginning.is_over
        may_come_back = is_over and cause in _MAY_COME_BACK and not member.is_banned and not member.is_draining
        is_tried_again = may_come_back and self._rejoining.note_lost(member.spec, now_s)
        self._outbox.record(
            NodeLost(
                t_s=now_s,
                node=node,
                cause=cause,
                evidence=evidence,
                is_requested=member.is_banned,
                is_tried_again=is_tried_again and self._job.control.rejoin_after_s > 0,
            )
        )
        if not is_over:
            self._beginning.node_failed(node, evidence, is_user_error=is_user_error)
            return
        self._saving.node_lost(node)
        self._sharding.lost(node)
        if may_come_back and not is_tried_again:
            self._tell_quarantine(node)
        if trained:  # else it had no part in any plan
            self._reconfiguration.begin([node], cause, detect_s=silent_s)

    def _tell_quarantine(self, node: str) -> None:
        self._notice(
            "warning",
            f"{node} was lost {QUARANTINE_LOSSES} times within ten minutes and is not tried again; "
            f"test it with `oobleck check`, then `oobleck add {node}` lets it back",
        )

    def _add(self, spec: NodeSpec) -> None:
        """Take another node in. Training goes on; it joins once its workers are ready."""
        try:
            self._check_devices(spec)
            self._members.add(spec)
        except UsageError as error:
            self._notice("warning", str(error))
            return
        self._outbox.record(NodeAdded(t_s=self._outbox.now_s, node=spec))
        self._outbox.command(Connect(node=spec))

    def _check_devices(self, spec: NodeSpec) -> None:
        wanted = self._nodes[0].num_devices
        if spec.num_devices != wanted:
            raise UsageError(f"{spec.name} has {spec.num_devices} devices; all nodes of the job have {wanted}")

    def _drain(self, node: str) -> None:
        """Let a node go: it finishes the step in flight, gives away what only it holds, and leaves."""
        if self._rejoining.forget(node) is not None:
            self._notice("info", f"{node} is lost, and is not tried again")
        elif not self._beginning.is_over or node not in self._members or not self._members[node].is_ready:
            self._notice("warning", f"{node} is not training, so it cannot be drained")
        elif not self._members[node].is_draining:
            self._members[node].is_draining = True
            self._reconfiguration.begin([node], Cause.DRAINED, detect_s=0.0)

    def _said(self, node: str, message: AgentMessage) -> None:
        member = self._members[node]
        if member.state not in (NodeState.CONNECTED, NodeState.READY):
            return  # late words of a node that was given up
        member.last_heard_s = max(member.last_heard_s, self._outbox.now_s)
        try:
            _check_device(member, message)
            if not _is_of_worker_that_ends(member, message):
                self._understand(member, message)
        except PeerError as error:
            self._node_failed(node, Cause.CONNECTION_LOST, f"broke the protocol: {error}")
        except ConfigError as error:
            if not self._beginning.is_over:
                raise RunOver(78, str(error)) from error
            # Whoever comes later must fit; those who train are not to suffer.
            self._node_failed(node, Cause.UNREACHABLE, str(error))

    def _all_said(self, event: AllSaid) -> None:
        """Like `_said` of each; what no worker of ours can say wrong is not checked again for each."""
        speakers = self._members.hear(event.places, self._outbox.now_s)
        match event.message:
            case Status() as status:
                self._reconfiguration.status(speakers, status)
            case Resumed() as resumed:
                self._reconfiguration.resumed(speakers, resumed)
            case _:
                assert_never(event.message)

    def _understand(self, member: Member, message: AgentMessage) -> None:
        node = member.spec.name
        match message:
            case Heartbeat():
                self._outbox.send(node, message)
            case StorePut():
                self._pass_on(node, message)
            case StepCommitted(record=record):
                self._step_committed(record)
            case Evaluating() | EvaluationDone():
                self._evaluating(message)
            case Status():
                self._reconfiguration.status([Place(node=node, device=message.device)], message)
                self._deal_with_accused()
            case Resumed():
                self._reconfiguration.resumed([Place(node=node, device=message.device)], message)
            case LayersMoving():
                self._layers_moving(node, message)
            case Finished():
                if self.phase is Phase.TRAINING:
                    self._ending.worker_finished(Place(node=node, device=message.device))
            case Pace():
                self._reconfiguration.note_pace(Place(node=node, device=message.device), message)
            case PeerFailed():
                self._reconfiguration.suspect(message)
            case StateSaved() | StateNotSaved() | LayersPersisted() | CheckpointCommitted():
                self._saved(node, message)
            case CheckpointsFound():
                self._checkpoints_found(Place(node=node, device=message.device), message)
            case ReplicaDigests():
                self._compare(Place(node=node, device=message.device), message)
            case RestoreFailed():
                self._restore_failed(node, message)
            case Surveyed():
                self._sharding.surveyed(Place(node=node, device=message.device), message)
            case RecordsFailed():
                self._sharding.failed(self._reconfiguration.generations.current, message)
            case WorkerStarted():
                pass
            case WorkerReady():
                self._worker_ready(member, message)
            case Profiled():
                self._outbox.command(*self._preparation.take_measurement(message))
                self._beginning.train_when_prepared()
            case WorkerExited():
                self._worker_exited(member, message)
            case Leaving(reason=reason):
                self._notice("warning", f"{node}{TERMINATION_WORDS}{reason}")
                self._drain(node)
            case AgentStopped(reason=reason):
                self._agent_stopped(member, reason)
            case Hello():
                raise PeerError("a second hello on one connection")
            case _:
                assert_never(message)

    def _layers_moving(self, node: str, message: LayersMoving) -> None:
        if message.generation == self._reconfiguration.generations.current:
            self._outbox.record(
                LayersArriving(
                    t_s=self._outbox.now_s,
                    generation=message.generation,
                    node=node,
                    device=message.device,
                    received_bytes=message.received_bytes,
                    all_bytes=message.all_bytes,
                )
            )

    def _agent_stopped(self, member: Member, reason: str) -> None:
        node = member.spec.name
        if not member.is_draining or node in self._reconfiguration.generations.plan.nodes:
            self._node_failed(node, Cause.USER, f"its agent stopped: {reason}")
            return
        member.move_to(NodeState.LEFT)
        self._outbox.record(NodeLeft(t_s=self._outbox.now_s, node=node))
        self._outbox.command(Disconnect(node=node))
        self._reconfiguration.note_left(node)

    def _worker_ready(self, member: Member, message: WorkerReady) -> None:
        known = member.ready.get(message.device)
        if known is not None and known.pid == message.pid:
            return  # said again to a new master
        entry = WorkerUp(
            t_s=self._outbox.now_s,
            node=member.spec.name,
            device=message.device,
            pid=message.pid,
            data_digest=message.data_digest,
            weights_digest=message.weights_digest,
            doorbell=message.doorbell,
            saves=message.saves,
        )
        self._outbox.record(entry)
        self._outbox.command(*self._preparation.note_ready(member, message))
        self._sharding.know(message.shards)
        member.note_ready(entry, generation=self._reconfiguration.generations.current)
        if not self._beginning.is_over:
            self._beginning.train_when_prepared()
        elif member.is_ready:
            self._reconfiguration.take_in(member.spec.name)

    def _worker_exited(self, member: Member, message: WorkerExited) -> None:
        known = member.ready.get(message.device)
        if member.is_dismissed or (known is not None and known.pid != message.pid):
            return
        if member.gone.get(message.device) == message.pid:
            if message.device in member.ending:
                self._start_again(member, message.device)
            return  # else said again to a new master
        place = Place(node=member.spec.name, device=message.device)
        if message.traceback is not None:
            self._ending.note_traceback(place, message.traceback)
        evidence = message.user_error or f"worker process {message.pid} ended: {message.reason}"
        is_stable = member.restarts < _MAX_RESTARTS and not member.is_draining
        if not self._beginning.is_over or not is_stable:
            is_user_error = message.user_error is not None
            self._node_failed(member.spec.name, Cause.WORKER_EXITED, evidence, is_user_error=is_user_error)
        else:
            self._restart_worker(member, place, message)

    def _deal_with_accused(self) -> None:
        """Leave out nodes that their peers do not reach; have stuck workers ended, which starts them again."""
        accused = self._reconfiguration.accused
        for node in accused.cut_off:
            self._node_failed(node, Cause.CUT_OFF, "it reaches the master, and its peers do not reach it")
        for place in accused.stuck:
            self._outbox.send(place.node, KillWorker(device=place.device))

    def _restart_worker(self, member: Member, place: Place, message: WorkerExited) -> None:
        """Go on without the node until its worker is back: a fork of a warm process, not a start from nothing.

        The node's other workers go that way with it. What they hold others hold too, for a node has a part in one
        pipeline alone; and the survivors may go on without what they have done.
        """
        now_s = self._outbox.now_s
        trained = member.is_ready
        also = tuple(device for device in member.taken_along if device != place.device)
        member.note_restart(place.device, message.pid, also=also)
        self._reconfiguration.forget_pace(place.node)
        self._outbox.record(
            WorkerDown(
                t_s=now_s, node=place.node, device=place.device, pid=message.pid, reason=message.reason, also=also
            )
        )
        for device in also:
            self._outbox.send(place.node, KillWorker(device=device))
        self._start_again(member, place.device)
        self._saving.worker_lost(place.node)
        self._sharding.lost(place.node)
        if trained:
            self._reconfiguration.begin([place.node], Cause.WORKER_EXITED, detect_s=now_s - member.last_heard_s)

    def _start_again(self, member: Member, device: int) -> None:
        member.ending.discard(device)
        self._outbox.send(member.spec.name, StartWorker(device=device))

    def _pass_on(self, origin: str, message: StorePut) -> None:
        for node in message.nodes:
            if node != origin and node in self._members and self._members[node].is_ready:
                self._outbox.send(node, message)

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

    def _training_places(self) -> list[Place]:
        """The workers of the newest plan that can be spoken to."""
        plan = self._reconfiguration.generations.plan
        return [place for place in plan.places if self._members[place.node].is_ready]

    def _go_on_with_shards(self) -> None:
        if self.phase is Phase.TRAINING:
            generation = self._reconfiguration.generations.current
            self._sharding.go_on(generation, save=self._saving.is_behind)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _saved(self, node: str, message: StateSaved | StateNotSaved | LayersPersisted | CheckpointCommitted) -> None:
        match message:
            case StateSaved():
                self._saving.saved(Place(node=node, device=message.device), message)
            case LayersPersisted():
                self._saving.persisted(message)
            case CheckpointCommitted():
                self._saving.committed(message)
            case StateNotSaved():
                self._saving.failed(node, message)
            case _:
                assert_never(message)

    def _checkpoints_found(self, place: Place, message: CheckpointsFound) -> None:
        self._restoring.found(place, message)
        if self._beginning.is_over:
            self._reconfiguration.found()
        else:
            self._beginning.train_when_prepared()

    def _compare(self, place: Place, message: ReplicaDigests) -> None:
        generations = self._reconfiguration.generations
        if self.phase is not Phase.TRAINING or message.generation != generations.current:
            return
        distrusted = self._comparing.take(place, message, generations.plan.places)
        if distrusted:
            self._reconfiguration.repair(distrusted)

    def _restore_failed(self, node: str, message: RestoreFailed) -> None:
        """Nobody trains on what is broken: all go back to the checkpoint before it."""
        if message.generation != self._reconfiguration.generations.current:
            return
        self._notice("error", f"{node} cannot restore {message.name}: {message.problem}")
        self._restoring.note_broken(message.name)
        self._reconfiguration.begin([], Cause.CHECKPOINT_BROKEN, detect_s=0.0)

    # --- the end -----------------------------------------------------------------------------------------------

    def _stop_requested(self, event: StopRequested) -> None:
        if event.now or not self._beginning.is_over:
            raise RunOver(event.exit_code, event.reason)
        self._ending.stop(event)
        self._notice("info", "stopping after the step in flight")

    def _end(self, over: RunOver) -> None:
        reason = self._ending.explain(over) if self._beginning.is_over else over.reason
        for member in self._members.living:
            self._outbox.send(member.spec.name, StopAgent(reason=reason))
        self._reconfiguration.close()
        self._outbox.record(JobEnded(t_s=self._outbox.now_s, exit_code=over.exit_code, reason=reason))
        self._outbox.command(End(exit_code=over.exit_code, reason=reason))
        self._has_ended = True

    def _notice(self, level: str, text: str) -> None:
        self._outbox.record(Notice(t_s=self._outbox.now_s, level=level, text=text))


def _is_of_worker_that_ends(member: Member, message: AgentMessage) -> bool:
    """Whether these are words of a worker that was told to end: what it does has no part in the run any more."""
    match message:
        case (
            StepCommitted(device=device)
            | Evaluating(device=device)
            | EvaluationDone(device=device)
            | Status(device=device)
            | Resumed(device=device)
            | Pace(device=device)
            | LayersMoving(device=device)
            | PeerFailed(device=device)
            | Finished(device=device)
            | ReplicaDigests(device=device)
            | RestoreFailed(device=device)
            | WorkerReady(device=device)
        ):
            return device in member.ending
        case _:
            return False


def _check_device(member: Member, message: AgentMessage) -> None:
    """Raise PeerError for words of a worker that the node does not have."""
    match message:
        case (
            WorkerStarted(device=device)
            | WorkerReady(device=device)
            | WorkerExited(device=device)
            | Profiled(device=device)
            | StepCommitted(device=device)
            | Evaluating(device=device)
            | EvaluationDone(device=device)
            | Status(device=device)
            | Resumed(device=device)
            | Pace(device=device)
            | LayersMoving(device=device)
            | PeerFailed(device=device)
            | Finished(device=device)
            | StateSaved(device=device)
            | StateNotSaved(device=device)
            | LayersPersisted(device=device)
            | CheckpointsFound(device=device)
            | RestoreFailed(device=device)
            | ReplicaDigests(device=device)
            | Surveyed(device=device)
            | RecordsFailed(device=device)
        ) if device not in range(member.spec.num_devices):
            raise PeerError(f"speaks for device {device}; it has {member.spec.num_devices}")
        case _:
            pass
