"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

    PREPARING ── all workers ready, profile known ──> TRAINING <──────────────┐
        │                                                │ a node is lost     │ all survivors answered:
        │ a node fails                                   v                    │ orders
        v                                            FENCING ─────────────────┘
      ENDED <── all finished, a stop, no way on ─────────┘
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from oobleck import __version__
from oobleck.errors import ConfigError, OobleckError, PeerError, PlanningError, Unrecoverable, UsageError
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import Decision, Place, Planner, PlannerSettings

from .account import RecoveryAccount
from .events import (
    AddRequested,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    End,
    Event,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Record,
    Said,
    Send,
    StopRequested,
)
from .generations import Generations
from .journal import (
    Action,
    Cause,
    JobEnded,
    JobStarted,
    JournalEntry,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    Notice,
    PlanAdopted,
    RecoveryStarted,
    StepDone,
    WorkerDown,
    WorkerUp,
)
from .membership import Member, Membership, NodeState
from .messages import (
    AgentMessage,
    AgentStopped,
    CommitRecord,
    Fence,
    Finished,
    FinishStep,
    Heartbeat,
    Hello,
    MasterMessage,
    Order,
    PeerFailed,
    Profiled,
    Resumed,
    StartWorker,
    Status,
    StepCommitted,
    StopAgent,
    StorePut,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from .preparation import Preparation
from .recovery import (
    Verdict,
    judge,
    microbatches_redone,
    planned_layers,
)
from .startup_failures import StartupFailures

__all__ = ["Coordinator", "Phase"]

_SETTLE_S = 0.01
"""Losses within this are one: nodes that are killed together are seen to go within milliseconds."""
_STARTUP_SETTLE_S = 1.0
"""How long other nodes' failures to start are waited for, so that all are told at once."""
_MAX_RESTARTS = 3
"""How often a node's worker is started again before the node is taken for broken."""
_SUSPICION_S = 0.2
"""How long a failed collective waits for its cause, usually the loss of a node; then all regroup."""
_MAX_REGROUPS = 3
"""Regroupings without a loss and without a committed step between them, before the run is given up."""
_HANG_FACTOR = 10
"""It is a hang when no step is committed for this many times as long as the slowest of the latest took."""
_HANG_FLOOR_S = 10.0
_STEPS_TIMED = 20


class Phase(StrEnum):
    """What the run is doing, as the coordinator sees it."""

    PREPARING = "preparing"
    TRAINING = "training"
    FENCING = "fencing"
    ENDED = "ended"


class Coordinator:
    """Decides everything of one run. Mutable; changes through `start`, `handle` and `handle_deadline` alone."""

    def __init__(self, job: JobSpec, nodes: tuple[NodeSpec, ...], *, started_at: str, python_version: str) -> None:
        self._job = job
        self._nodes = nodes
        self._started_at = started_at
        self._members = Membership(nodes)
        self._preparation = Preparation(job, self._members, python_version=python_version)
        self._planner: Planner | None = None
        self._phase = Phase.PREPARING
        self._now_s = 0.0
        self._commands: list[Command] = []
        self._deadline_s = math.inf
        self._startup_failures = StartupFailures(len(nodes))
        self._tracebacks: dict[Place, str] = {}
        self._stop: StopRequested | None = None
        self._generations = Generations(max_steps=job.max_steps)
        self._last_record: CommitRecord | None = None
        self._finished: set[Place] = set()
        self._regroups = 0
        self._step_times_s: deque[float] = deque(maxlen=_STEPS_TIMED)
        self._progressed_s = 0.0
        """When a step was committed, or a plan ordered, last."""
        self._hangs_s = math.inf
        """When the lack of another step becomes a hang."""
        self._recovery: RecoveryAccount | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    # --- the machine's interface ---------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Command]:
        """Begin: reach all nodes."""
        self._now_s = now_s
        self._record(
            JobStarted(t_s=now_s, version=__version__, job=self._job, nodes=self._nodes, started_at=self._started_at)
        )
        self._deadline_s = now_s + self._job.control.start_timeout_s
        self._commands.extend(Connect(node=spec) for spec in self._nodes)
        return self._take_commands()

    def handle(self, now_s: float, event: Event) -> list[Command]:
        """Take an event in. Raises nothing: what a peer does wrong costs that peer."""
        self._now_s = now_s
        if self._phase is Phase.ENDED:
            return []
        match event:
            case NodeUp():
                self._node_up(event)
            case NodeFailed(node=node, cause=cause, evidence=evidence):
                self._node_failed(node, cause, evidence)
            case Said(node=node, message=message):
                self._said(node, message)
            case ProfileFound():
                self._commands.extend(self._preparation.take_profile(event))
                self._train_when_prepared()
            case StopRequested():
                self._stop_requested(event)
            case AddRequested(spec=spec):
                self._add(spec)
            case DrainRequested(node=node):
                self._drain(node)
            case _:
                assert_never(event)
        return self._take_commands()

    def next_deadline(self) -> float:
        """When `handle_deadline` wants to be called, at the latest; infinity for never."""
        if self._phase is Phase.ENDED:
            return math.inf
        lease_s = self._job.control.lease_s
        return min(
            [self._deadline_s, self._hangs_s, *(member.last_heard_s + lease_s for member in self._members.living)]
        )

    def handle_deadline(self, now_s: float) -> list[Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self._phase is Phase.ENDED:
            return []
        self._now_s = now_s
        if late_s > self._job.control.heartbeat_interval_s:
            # We ourselves were held up: what nodes said meanwhile waits to be read, so no lease has lapsed.
            for member in self._members.living:
                member.last_heard_s = now_s
            soon_s = now_s + self._job.control.heartbeat_interval_s
            self._deadline_s, self._hangs_s = max(self._deadline_s, soon_s), max(self._hangs_s, soon_s)
        for member in self._members.living:
            silent_s = now_s - member.last_heard_s
            if silent_s >= self._job.control.lease_s:
                self._node_failed(member.spec.name, Cause.LEASE_EXPIRED, f"not heard of for {silent_s:.1f} s")
        if now_s >= self._deadline_s:
            self._deadline_s = math.inf
            self._phase_deadline()
        if now_s >= self._hangs_s:
            self._begin_recovery([], Cause.HANG, detect_s=now_s - self._progressed_s)
        return self._take_commands()

    # --- nodes come and go -----------------------------------------------------------------------------------

    def _node_up(self, event: NodeUp) -> None:
        misfit = self._preparation.misfit(event.hello)
        if misfit is not None:
            self._node_failed(event.node, Cause.UNREACHABLE, misfit)
            return
        self._members[event.node].last_heard_s = self._now_s
        self._record(NodeConnected(t_s=self._now_s, node=event.node, agent_pid=event.hello.pid))
        self._commands.extend(self._preparation.configure(event, self._now_s))

    def _node_failed(self, node: str, cause: Cause, evidence: str, *, is_user_error: bool = False) -> None:
        member = self._members[node]
        if member.state in (NodeState.LOST, NodeState.LEFT) or self._phase is Phase.ENDED:
            return
        silent_s = self._now_s - member.last_heard_s
        trained = member.state is NodeState.READY
        member.move_to(NodeState.LOST)
        self._commands.append(Disconnect(node=node))
        self._record(NodeLost(t_s=self._now_s, node=node, cause=cause, evidence=evidence))
        match self._phase:
            case Phase.PREPARING:
                self._startup_failures.note(node, evidence, is_user_error=is_user_error)
                self._deadline_s = min(self._deadline_s, self._now_s + _STARTUP_SETTLE_S)
            case Phase.TRAINING | Phase.FENCING if trained:
                self._begin_recovery([node], cause, detect_s=silent_s)
            case _:
                pass  # it had no part in any plan

    def _add(self, spec: NodeSpec) -> None:
        """Take another node in. Training goes on; it joins once its workers are ready."""
        try:
            self._check_devices(spec)
            self._members.add(spec)
        except UsageError as error:
            self._record(Notice(t_s=self._now_s, level="warning", text=str(error)))
            return
        self._record(NodeAdded(t_s=self._now_s, node=spec))
        self._commands.append(Connect(node=spec))

    def _check_devices(self, spec: NodeSpec) -> None:
        wanted = self._nodes[0].num_devices
        if spec.num_devices != wanted:
            raise UsageError(f"{spec.name} has {spec.num_devices} devices; all nodes of the job have {wanted}")

    def _drain(self, node: str) -> None:
        """Let a node go: it finishes the step in flight, gives away what only it holds, and leaves."""
        if self._phase is Phase.PREPARING or node not in self._members or not self._members[node].is_ready:
            text = f"{node} is not training, so it cannot be drained"
            self._record(Notice(t_s=self._now_s, level="warning", text=text))
        elif not self._members[node].is_draining:
            self._members[node].is_draining = True
            self._begin_recovery([node], Cause.DRAINED, detect_s=0.0)

    def _said(self, node: str, message: AgentMessage) -> None:
        member = self._members[node]
        if member.state not in (NodeState.CONNECTED, NodeState.READY):
            return  # late words of a node that was given up
        member.last_heard_s = self._now_s
        try:
            self._understand(member, message)
        except PeerError as error:
            self._node_failed(node, Cause.CONNECTION_LOST, f"broke the protocol: {error}")
        except ConfigError as error:
            if self._phase is Phase.PREPARING:
                self._end(78, str(error))
            else:  # whoever comes later must fit; those who train are not to suffer
                self._node_failed(node, Cause.UNREACHABLE, str(error))

    def _understand(self, member: Member, message: AgentMessage) -> None:
        node = member.spec.name
        _check_device(member, message)
        match message:
            case Heartbeat():
                self._send(node, message)
            case StorePut():
                self._pass_on(node, message)
            case StepCommitted(record=record):
                self._step_committed(record)
            case Status():
                self._status(Place(node=node, device=message.device), message)
            case Resumed():
                self._resumed(Place(node=node, device=message.device), message)
            case Finished():
                if self._phase is Phase.TRAINING:  # one that was said before a fence is said again after it
                    self._finished.add(Place(node=node, device=message.device))
                    self._end_when_finished()
            case PeerFailed():
                self._suspect(message)
            case WorkerStarted():
                pass
            case WorkerReady():
                self._worker_ready(member, message)
            case Profiled():
                self._commands.extend(self._preparation.take_measurement(message))
                self._train_when_prepared()
            case WorkerExited():
                self._worker_exited(member, message)
            case AgentStopped(reason=reason):
                self._agent_stopped(member, reason)
            case Hello():
                raise PeerError("a second hello on one connection")
            case _:
                assert_never(message)

    def _agent_stopped(self, member: Member, reason: str) -> None:
        node = member.spec.name
        if not member.is_draining or node in self._generations.plan.nodes:
            self._node_failed(node, Cause.USER, f"its agent stopped: {reason}")
            return
        member.move_to(NodeState.LEFT)
        self._record(NodeLeft(t_s=self._now_s, node=node))
        self._commands.append(Disconnect(node=node))

    def _worker_ready(self, member: Member, message: WorkerReady) -> None:
        self._record(WorkerUp(t_s=self._now_s, node=member.spec.name, device=message.device, pid=message.pid))
        self._commands.extend(self._preparation.note_ready(member, message, generation=self._generations.current))
        if self._phase is Phase.PREPARING:
            self._train_when_prepared()
        elif member.state is NodeState.READY:
            self._begin_recovery([member.spec.name], Cause.JOINED, detect_s=0.0)

    def _worker_exited(self, member: Member, message: WorkerExited) -> None:
        if member.is_dismissed:
            return
        place = Place(node=member.spec.name, device=message.device)
        if message.traceback is not None:
            self._tracebacks[place] = message.traceback
        evidence = message.user_error or f"worker process {message.pid} ended: {message.reason}"
        is_stable = member.spec.num_devices == 1 and member.restarts < _MAX_RESTARTS and not member.is_draining
        if self._phase is Phase.PREPARING or not is_stable:
            is_user_error = message.user_error is not None
            self._node_failed(member.spec.name, Cause.WORKER_EXITED, evidence, is_user_error=is_user_error)
        else:
            self._restart_worker(member, place, message)

    def _restart_worker(self, member: Member, place: Place, message: WorkerExited) -> None:
        """Go on without the node until its worker is back: a fork of a warm process, not a start from nothing."""
        trained = member.state is NodeState.READY
        member.restarts += 1
        member.ready.clear()
        if trained:
            member.move_to(NodeState.CONNECTED)
        self._record(WorkerDown(t_s=self._now_s, node=place.node, device=place.device, reason=message.reason))
        self._send(place.node, StartWorker(device=place.device))
        if trained:
            self._begin_recovery([place.node], Cause.WORKER_EXITED, detect_s=self._now_s - member.last_heard_s)

    def _pass_on(self, origin: str, message: StorePut) -> None:
        for node in message.nodes:
            if node != origin and node in self._members and self._members[node].state is NodeState.READY:
                self._send(node, message)

    # --- preparing ---------------------------------------------------------------------------------------------

    def _train_when_prepared(self) -> None:
        if self._phase is not Phase.PREPARING or not self._preparation.is_complete or self._startup_failures:
            return
        assert self._preparation.profile is not None
        devices = {spec.num_devices for spec in self._nodes}
        if len(devices) > 1:
            counts = ", ".join(f"{spec.name} has {spec.num_devices}" for spec in self._nodes)
            self._end(78, f"all nodes need the same number of devices: {counts}; change slots= or devices=")
            return
        settings = PlannerSettings(
            num_microbatches=self._job.num_microbatches,
            devices_per_node=devices.pop(),
            max_devices_per_stage=1,
            fault_threshold=self._job.fault_threshold,
            num_pipelines=self._job.num_pipelines,
        )
        try:
            self._planner = Planner(self._preparation.profile, settings)
            decision = self._planner.initial_plan([member.spec.name for member in self._members.ready])
        except PlanningError as error:
            self._end(78, str(error))
            return
        self._order(decision, Verdict(applied=0, catch_up=None, adopted=None, held={}), finish=None)

    def _phase_deadline(self) -> None:
        match self._phase:
            case Phase.PREPARING if self._startup_failures:
                self._end(self._startup_failures.exit_code, str(self._startup_failures))
            case Phase.PREPARING:
                limit_s = self._job.control.start_timeout_s
                self._end(1, f"not ready within {limit_s:g} s: {self._preparation.waiting_for()}")
            case Phase.FENCING:
                self._fail_silent_workers()
                self._decide_when_answered()
            case Phase.TRAINING:
                self._begin_recovery([], Cause.PEER_FAILED, detect_s=_SUSPICION_S)

    # --- training ----------------------------------------------------------------------------------------------

    def _step_committed(self, record: CommitRecord) -> None:
        if record.step <= self._last_step:
            return  # another reporter of the same step
        self._last_record = record
        self._regroups = 0
        self._tracebacks.clear()
        self._step_times_s.append(record.duration_s)
        if self._phase is Phase.TRAINING:
            self._expect_progress(_HANG_FLOOR_S)
        tokens = record.num_samples * self._job.data.sequence_length
        self._record(StepDone(t_s=self._now_s, record=record, tokens=tokens))

    def _expect_progress(self, least_s: float) -> None:
        """Take it for a hang when no step is committed in so many seconds, or many times the usual time."""
        self._progressed_s = self._now_s
        self._hangs_s = self._now_s + max([least_s, *(_HANG_FACTOR * step_s for step_s in self._step_times_s)])

    def _suspect(self, message: PeerFailed) -> None:
        """A survivor met a failure first. Its cause is usually seen within milliseconds; else all regroup."""
        if self._phase is Phase.TRAINING and message.generation == self._generations.current:
            self._deadline_s = min(self._deadline_s, self._now_s + _SUSPICION_S)

    def _stop_requested(self, event: StopRequested) -> None:
        if event.now or self._phase is Phase.PREPARING:
            self._end(event.exit_code, event.reason)
            return
        self._stop = event
        self._record(Notice(t_s=self._now_s, level="info", text="stopping after the step in flight"))
        self._ask_to_finish()

    def _ask_to_finish(self) -> None:
        for place in self._generations.plan.places:
            if self._members[place.node].state is NodeState.READY:
                self._send(place.node, FinishStep(device=place.device))

    def _end_when_finished(self) -> None:
        if self._phase is not Phase.TRAINING or not self._finished.issuperset(self._generations.plan.places):
            return
        if self._stop is not None and self._last_step < self._job.max_steps:
            self._end(self._stop.exit_code, f"{self._stop.reason}; {self._last_step} steps are committed")
        else:
            self._end(0, f"all {self._last_step} steps are committed")

    def _end(self, exit_code: int, reason: str) -> None:
        for member in self._members.living:
            self._send(member.spec.name, StopAgent(reason=reason))
        self._close_recovery()
        self._record(JobEnded(t_s=self._now_s, exit_code=exit_code, reason=reason))
        self._commands.append(End(exit_code=exit_code, reason=reason))
        self._phase = Phase.ENDED
        self._deadline_s = self._hangs_s = math.inf

    # --- recovering --------------------------------------------------------------------------------------------

    def _begin_recovery(self, nodes: list[str], cause: Cause, *, detect_s: float) -> None:
        """Fence all survivors under a new generation; losses during a recovery begin it anew."""
        recovery = self._recovery
        if recovery is None or recovery.ordered_s:
            self._close_recovery()
            recovery = RecoveryAccount(began_s=self._now_s, detect_s=detect_s, cause=cause)
            self._recovery = recovery
        recovery.nodes.extend(nodes)
        recovery.statuses.clear()
        recovery.settles_s = self._now_s + _SETTLE_S
        self._regroups += cause in (Cause.PEER_FAILED, Cause.HANG)
        self._phase = Phase.FENCING
        self._generations.begin()
        self._finished.clear()
        self._deadline_s = self._now_s + self._job.control.lease_s
        self._hangs_s = math.inf
        self._record(
            RecoveryStarted(
                t_s=self._now_s, generation=self._generations.current, nodes=tuple(recovery.nodes), cause=recovery.cause
            )
        )
        survivors = self._members.ready
        if not survivors or self._regroups > _MAX_REGROUPS:
            self._give_up()
            return
        lost = self._lost_for(self._generations.newest)
        for member in survivors:
            for place in member.places:
                self._send(
                    member.spec.name, Fence(device=place.device, generation=self._generations.current, lost=lost)
                )

    def _status(self, place: Place, status: Status) -> None:
        if self._phase is not Phase.FENCING or status.generation != self._generations.current:
            return
        assert self._recovery is not None
        self._recovery.statuses[place] = status
        self._decide_when_answered()

    def _fail_silent_workers(self) -> None:
        """Workers answer a fence at once, whatever they compute; one that does not is frozen, if its agent is not."""
        assert self._recovery is not None
        answered = self._recovery.statuses.keys()
        silent = [member.spec.name for member in self._members.ready if not answered >= set(member.places)]
        for node in silent:
            evidence = f"its worker did not answer for {self._job.control.lease_s:g} s"
            self._node_failed(node, Cause.LEASE_EXPIRED, evidence)

    def _decide_when_answered(self) -> None:
        recovery = self._recovery
        if self._phase is not Phase.FENCING or recovery is None:
            return
        places = [place for member in self._members.ready for place in member.places]
        if not recovery.statuses.keys() >= set(places):
            return
        if self._now_s < recovery.settles_s:
            self._deadline_s = recovery.settles_s
            return
        self._decide({place: recovery.statuses[place] for place in places})

    def _decide(self, statuses: dict[Place, Status]) -> None:
        """All survivors have answered: find what is committed, a plan for those who are left, and order it."""
        assert self._planner is not None
        assert self._recovery is not None
        # Only now: all that reporters said before they answered is known, so that no step is told out of turn.
        records = {status.last_record.step: status.last_record for status in statuses.values() if status.last_record}
        for _, record in sorted(records.items()):
            self._step_committed(record)
        self._generations.forget_before(min([said.adopted for said in statuses.values() if said.adopted], default=0))
        verdict = self._confirm(judge(statuses, self._last_record, self._generations.plans), statuses)
        staying = [member.spec.name for member in self._members.ready if not member.is_draining]
        in_force = self._generations.in_force(verdict)
        base = self._generations.plans[in_force]
        finish = self._generations.step_to_finish(verdict, statuses, self._lost_for(in_force))
        try:
            held = verdict.held
            if finish is not None:
                # What was kept of the plan before is a step behind once this one is finished.
                held = {place: layers & planned_layers(base, place) for place, layers in held.items()}
            elif verdict.applied == 0:
                # Nothing is trained yet: everybody can make the initial values of any layer.
                held = {place: frozenset(range(base.num_layers)) for place in statuses}
            known = (*base.nodes, *base.spares)
            living = [member.spec.name for member in self._members.ready]
            gone = [node for node in known if node not in living or node in self._lost_for(in_force)]
            decision = self._planner.reconfigure(
                base,
                lost=gone,
                joined=[node for node in staying if node not in known or node in gone],
                leaving=[node for node in living if node not in staying and node not in gone],
                held=held,
            )
        except (PlanningError, Unrecoverable) as error:
            if self._keep_draining_nodes():
                self._decide(statuses)
            else:
                self._cannot_go_on(error)
            return
        lost = [node for node in base.nodes if node in self._lost_for(in_force)]
        redone = microbatches_redone(base, lost, statuses) if verdict.adopted is not None else 0
        self._recovery.steps_lost += max(0, self._last_step - verdict.applied)
        self._recovery.microbatches_redone += redone
        self._order(decision, verdict, finish=finish)

    def _keep_draining_nodes(self) -> bool:
        """Let no node go after all: the run cannot go on without them. Returns whether there were any."""
        draining = [member for member in self._members.ready if member.is_draining]
        for member in draining:
            member.is_draining = False
            text = f"{member.spec.name} stays: the job cannot go on without it"
            self._record(Notice(t_s=self._now_s, level="warning", text=text))
        return bool(draining)

    def _confirm(self, verdict: Verdict, statuses: dict[Place, Status]) -> Verdict:
        """Take a plan for the one in force only if all who are in it, and live, have adopted it."""
        if verdict.adopted is None:
            return verdict
        plan, lost = self._generations.plans[verdict.adopted], self._lost_for(verdict.adopted)
        members = [statuses[place] for place in plan.places if place.node not in lost]
        return (
            verdict if all(status.adopted == verdict.adopted for status in members) else replace(verdict, adopted=None)
        )

    def _order(self, decision: Decision, verdict: Verdict, *, finish: int | None) -> None:
        """Send everyone the orders of a new generation, and train."""
        if self._phase is Phase.PREPARING:
            self._generations.begin()
        lost = () if verdict.adopted is None else self._lost_for(verdict.adopted)
        order = self._generations.order(decision, verdict, finish=finish, lost=lost)
        for member in self._members.ready:
            for place in member.places:
                self._send(member.spec.name, replace(order, device=place.device))
        self._phase = Phase.TRAINING
        self._deadline_s = math.inf
        self._expect_progress(self._job.control.start_timeout_s)
        self._record_plan(decision)
        if self._recovery is not None:
            self._note_orders(self._recovery, decision, order)
        if self._stop is not None:
            self._ask_to_finish()

    def _note_orders(self, recovery: RecoveryAccount, decision: Decision, order: Order) -> None:
        recovery.ordered_s = self._now_s
        recovery.action = Action(decision.action)
        if recovery.cause is Cause.JOINED and any(self._members[node].restarts for node in recovery.nodes):
            recovery.action = Action.RESTART_WORKER
        recovery.layers_moved = len({(item.layer, item.target) for item in order.transfers})

    def _record_plan(self, decision: Decision) -> None:
        self._record(
            PlanAdopted(
                t_s=self._now_s,
                generation=self._generations.current,
                plan=decision.plan,
                action=Action(decision.action),
                reason=decision.reason,
                predicted_step_s=decision.predicted_step_s,
                num_layers=decision.plan.num_layers,
                redundant=decision.redundant,
            )
        )
        if not decision.redundant:
            threshold = self._job.fault_threshold
            text = f"redundancy is below f = {threshold}: losing {threshold} more nodes may cost the model's state"
            self._record(Notice(t_s=self._now_s, level="warning", text=text))

    def _resumed(self, place: Place, message: Resumed) -> None:
        recovery = self._recovery
        if recovery is None or not recovery.ordered_s or message.generation != self._generations.current:
            return
        recovery.resumed[place] = message
        if recovery.resumed.keys() >= set(self._generations.plan.places):
            self._close_recovery()
            self._dismiss_drained()

    def _dismiss_drained(self) -> None:
        """Drained nodes hold nothing any more that the plan in force needs: end their agents."""
        for member in self._members.ready:
            if member.is_draining:
                member.is_dismissed = True
                member.move_to(NodeState.CONNECTED)  # its agent is there until it says goodbye; its workers are not
                self._send(member.spec.name, StopAgent(reason="drained"))

    def _close_recovery(self) -> None:
        """Tell what a recovery cost; one that another loss overtook is told with what is known of it."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            self._record(recovery.close(self._now_s, self._generations.current, self._our_time))

    def _our_time(self, place: Place, theirs_s: float) -> float:
        return theirs_s + self._members[place.node].clock_offset_s

    def _give_up(self) -> None:
        if self._tracebacks:
            place, text = next(iter(self._tracebacks.items()))
            self._end(1, f"an error ended the workers; {place} said:\n{text}")
        elif not self._members.ready:
            self._end(1, "all nodes are lost")
        else:
            self._end(1, f"no step was committed through {_MAX_REGROUPS} regroupings")

    def _cannot_go_on(self, error: OobleckError) -> None:
        if self._tracebacks:
            self._give_up()
        else:
            self._end(
                1, f"cannot go on after losing {', '.join(self._recovery.nodes if self._recovery else ())}: {error}"
            )

    # --- small things ------------------------------------------------------------------------------------------

    @property
    def _last_step(self) -> int:
        """The newest step that is known to be committed."""
        return 0 if self._last_record is None else self._last_record.step

    def _lost_for(self, generation: int) -> tuple[str, ...]:
        """The nodes that have no part, or no part any more, in the plan that was ordered in `generation`."""
        names = (member.spec.name for member in self._members.all)
        return tuple(name for name in names if not self._members.took_part(name, generation))

    def _send(self, node: str, message: MasterMessage) -> None:
        self._commands.append(Send(node=node, message=message))

    def _record(self, entry: JournalEntry) -> None:
        self._commands.append(Record(entry=entry))

    def _take_commands(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands


def _check_device(member: Member, message: AgentMessage) -> None:
    """Raise PeerError for words of a worker that the node does not have."""
    match message:
        case (
            WorkerStarted(device=device)
            | WorkerReady(device=device)
            | WorkerExited(device=device)
            | Profiled(device=device)
            | StepCommitted(device=device)
            | Status(device=device)
            | Resumed(device=device)
            | PeerFailed(device=device)
            | Finished(device=device)
        ) if device not in range(member.spec.num_devices):
            raise PeerError(f"speaks for device {device}; it has {member.spec.num_devices}")
        case _:
            pass
