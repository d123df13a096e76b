"""The sweep mode: a failure trace straight into the real coordinator, from one event to the next.

Months of a cluster of thousands of nodes take seconds, since nothing happens between events: no heartbeat is
sent, and steps are summed up. Decisions are the coordinator's and the planner's own; workers answer at once
(see `crew`), and what takes time is said by `costs` and by the schedule's timeline on the profile.

When the coordinator cannot continue, its job is started again from the newest checkpoint, as soon as the nodes
that are there hold the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import assert_never

from oobleck import __version__
from oobleck.control.coordinator import Coordinator, Phase
from oobleck.control.events import (
    AddRequested,
    BatchReceived,
    Command,
    Disconnect,
    DrainRequested,
    End,
    Event,
    MessageReceived,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Record,
    Send,
    SendAll,
)
from oobleck.control.journal import Cause, JobEnded, JobStarted, JournalEntry, NodeConnected, NodeLost, StepDone
from oobleck.control.membership import are_most, patience_s
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    AgentMessage,
    AgentStopped,
    Fence,
    Finished,
    Heartbeat,
    Hello,
    KillWorker,
    PlanUpdate,
    StartWorker,
    StepCommitted,
    StopAgent,
    WorkerExited,
    WorkerReady,
)
from oobleck.control.speed import found_out_s
from oobleck.job import ControlSpec, NodeSpec
from oobleck.planner import WorkerId, profile_to_json
from oobleck.planner.what_if import moved_bytes, transfer_s
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
    ForkServerCrashed,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    MasterFrozen,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
    WorkerCrashed,
)

from .agenda import Agenda
from .analytic_workers import AnalyticWorkers, Stretch
from .node_states import NodeStates
from .reports import Reports
from .run_log import RunLog
from .settings import SweepSettings, most_steps

__all__ = ["sweep"]

_CONTROL = ControlSpec()
_PYTHON = "3.11.0"
_NO_LIMIT = 2**62
"""Steps of a job that continues for as long as its trace does."""
_SOON_S = 0.1
"""How long a node waits that comes while the job is being started."""


def sweep(
    trace: Trace, settings: SweepSettings, *, report: Callable[[float], None] = lambda _: None
) -> tuple[JournalEntry, ...]:
    """Play a trace and return the journal of the run, with entries of many steps in place of one a step.

    `report` is called now and then with the seconds that are simulated. Raises PlanningError where not even all
    nodes of the trace hold the model.
    """
    run = _Sweep(trace, settings)
    run.play(report)
    return tuple(run.log.entries)


class _Sweep:
    """One run; its parts are called by the events of a queue, in the order of time."""

    def __init__(self, trace: Trace, settings: SweepSettings) -> None:
        self._trace = trace
        self._settings = settings
        self._costs = settings.costs
        self.log = RunLog(
            checkpoint_interval_s=settings.checkpoint_interval_s, checkpoint_read_s=settings.costs.checkpoint_read_s
        )
        self._job = settings.job(most_steps(trace, settings))
        self._fewest = min(settings.planner().templates(max(count for _, count in trace.counts)))
        self._profile_json = profile_to_json(settings.profile)
        self._crew = AnalyticWorkers(
            settings.profile,
            num_samples=settings.global_batch_size,
            most_steps=settings.max_steps or _NO_LIMIT,
            costs=settings.costs,
        )
        self._agenda = Agenda()
        self._nodes = NodeStates(trace.nodes, trace.start)
        self._coordinator: Coordinator | None = None
        self._crashed: set[WorkerId] = set()
        """Workers that have ended, and may be started again."""
        self._update: PlanUpdate | None = None
        self._fence = 0
        self._untold_step = 0
        """The first step that is committed and that nobody can tell the master of; 0 where there is none."""
        self._is_over = False
        """All steps of the job are committed."""
        self._reviews_s = inf
        """When the coordinator is next asked which nodes should train."""
        self._reports = Reports(settings.profile) if any(isinstance(event, Slowed) for event in trace.events) else None
        """None where all nodes are always as fast as the profile says."""
        self._reporting = 0
        """The number of the reports that are due."""

    def play(self, report: Callable[[float], None]) -> None:
        self.log.record(
            JobStarted(
                t_s=0.0,
                version=__version__,
                job=self._job,
                nodes=tuple(self._spec(node) for node in self._trace.nodes),
                started_at="",
            )
        )
        for event in self._trace.events:
            self._agenda.at(event.t_s, lambda event=event: self._happen(event))  # type: ignore[misc]
        self._start()
        for node in self._nodes.startable if self._coordinator is None else ():
            self._await_others(node)
        while (next_s := min(self._agenda.next_s, self._crew.next_s)) <= self._trace.duration_s:
            self._move_to(next_s)
            self._agenda.do_due()
            if self._crew.has_finished:
                self._finish()
            if self._is_over:
                return
            report(self._agenda.now_s)
        self._move_to(self._trace.duration_s)
        reason = f"the trace ends after {self.log.newest_step} steps"
        self.log.record(JobEnded(t_s=self._trace.duration_s, exit_code=0, reason=reason))

    def _finish(self) -> None:
        """The workers say that they train no further; once the master has heard all of them, the run is over."""
        coordinator, plan = self._coordinator, self._crew.plan
        if coordinator is None or plan is None or coordinator.phase is not Phase.TRAINING:
            return
        if self._agenda.is_blind:
            self._agenda.at(self._agenda.blind_until_s, lambda: None)  # it is asked again then
        elif all(map(self._nodes.is_well, plan.nodes)):
            for worker_id in plan.worker_ids:
                self._say(worker_id, Finished(device=worker_id.device, applied=self._crew.max_steps))

    # --- time -------------------------------------------------------------------------------------------------

    def _move_to(self, t_s: float) -> None:
        """Let time pass: commit the steps that fit, and adopt a plan whose time has come."""
        update = self._update if self._crew.next_s <= t_s else None
        for stretch in self._crew.advance(t_s):
            self._committed(stretch)
        self._agenda.now_s = t_s
        if update is not None:
            self._update = None
            self._resume(update)
            self._move_to(t_s)

    def _committed(self, stretch: Stretch) -> None:
        record = self._crew.last_record
        worker_id = self._crew.speaker(self._nodes.absent)
        assert record is not None
        first_step = self._untold_step or stretch.first_step
        if self._coordinator is None:
            self.log.save(stretch)
        elif worker_id is None:
            self._untold_step = first_step
        else:
            self._untold_step = 0
            self.log.save(stretch)
            self._agenda.now_s = max(self._agenda.now_s, stretch.end_s)
            message = StepCommitted(device=worker_id.device, record=record)
            self._feed(MessageReceived(node=worker_id.node, message=message), from_step=first_step)

    # --- the coordinator's side ---------------------------------------------------------------------------------

    def _feed(self, event: Event, *, from_step: int = 0) -> None:
        if self._coordinator is not None:
            self._carry_out(self._coordinator.handle(self._agenda.now_s, event), from_step=from_step)

    def _say(self, worker_id: WorkerId, message: AgentMessage) -> None:
        self._feed(MessageReceived(node=worker_id.node, message=message))

    def _carry_out(self, commands: Sequence[Command], *, from_step: int = 0) -> None:
        fence = 0
        ordered: PlanUpdate | None = None
        for command in commands:
            match command:
                case Record(entry=StepDone() as entry):
                    self.log.record_steps(entry, from_step)
                case Record(entry=entry):
                    self.log.record(entry)
                case SendAll(message=Fence(generation=fence)):
                    pass
                case SendAll(message=PlanUpdate(initial=True)) if self._crew.last_record is not None:
                    self._give_up("all state is lost")  # what the coordinator knows no checkpoint of, we do
                    return
                case SendAll(message=PlanUpdate() as update):
                    ordered = update  # the same for all, but for the device
                case Disconnect(node=node):
                    self._nodes.members.pop(node, None)
                case Send(node=node, message=StartWorker(device=device)) if WorkerId(node, device) in self._crashed:
                    self._crashed.discard(WorkerId(node, device))
                    self._worker_restarts(WorkerId(node, device))
                case Send(node=node, message=KillWorker(device=device)):
                    self._end_worker(WorkerId(node, device))
                case Send(node=node, message=StopAgent(reason="drained")):
                    self._say(WorkerId(node=node, device=0), AgentStopped(reason="drained"))
                case End(exit_code=0):
                    self._is_over = True
                    return
                case End(reason=reason):
                    self._give_up(reason)
                    return
                case _:
                    pass
        if fence:
            self._fence = fence
            self._update = None
            self._agenda.when_seen(self._agenda.now_s + self._costs.fence_s, lambda: self._answer(fence))
        if ordered is not None:
            self._take_update(ordered)
        self._review_later()

    def _take_update(self, update: PlanUpdate) -> None:
        self._update = update
        seconds = transfer_s(self._settings.profile, update.transfers)
        self._crew.take_update(update, self._agenda.now_s + self._costs.decide_s, transfer_s=seconds)

    def _answer(self, generation: int, only: Collection[str] | None = None) -> None:
        """Have the workers answer a fence: all who can, or those of some nodes."""
        if generation != self._fence or self._coordinator is None or self._coordinator.phase is not Phase.FENCING:
            return
        plan = self._crew.plan
        at_work = frozenset(plan.nodes) if plan is not None else frozenset()
        well = self._nodes.well
        idle = [
            WorkerId(node=node, device=device)
            for node in sorted(well - at_work)
            for device in range(self._settings.devices_per_node)
        ]
        answers = self._crew.answers(generation, self._agenda.now_s, at_work - well, idle)
        for worker_ids, status in answers:
            speakers = (
                worker_ids if only is None else tuple(worker_id for worker_id in worker_ids if worker_id.node in only)
            )
            self._feed(BatchReceived(worker_ids=speakers, message=status))
        self._tick_later()

    def _tick_later(self) -> None:
        """Let the coordinator act when the time is over in which it waits for what belongs together."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.phase not in (Phase.PREPARING, Phase.FENCING):
            return

        def tick() -> None:
            if self._coordinator is coordinator:
                self._carry_out(coordinator.handle_deadline(self._agenda.now_s))

        self._agenda.when_seen(coordinator.next_deadline(), tick)

    def _review_later(self) -> None:
        """Let the coordinator look at which nodes should train, when it wants to."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.reviews_s >= self._reviews_s:
            return
        due_s = self._reviews_s = max(self._agenda.now_s, coordinator.reviews_s)

        def look() -> None:
            if self._reviews_s == due_s:
                self._reviews_s = inf
            if self._coordinator is not coordinator or self._agenda.now_s < coordinator.reviews_s:
                self._review_later()
            elif self._nodes.members.keys().isdisjoint(self._nodes.silent):
                self._carry_out(coordinator.handle_deadline(self._agenda.now_s))
            else:  # it would find a hang, which is only a loss that nobody has noticed yet
                self._agenda.when_seen(self._agenda.now_s + self._costs.lease_s, look)

        self._agenda.when_seen(due_s, look)

    def _report_later(self) -> None:
        """Let the workers tell how fast they are, once they have computed at their pace for long enough."""
        coordinator, plan, reports = self._coordinator, self._crew.plan, self._reports
        if reports is None or coordinator is None or plan is None or not reports.untold(plan, self._crew.factors):
            return
        number = self._reporting = self._agenda.number()

        def is_listening() -> bool:
            return self._crew.is_computing and coordinator.phase is Phase.TRAINING

        def report() -> None:
            if self._reporting != number or self._coordinator is not coordinator or self._crew.plan is not plan:
                return
            if not is_listening():
                self._report_later()
                return
            for worker_ids, pace in reports.tell(plan, self._crew.factors):
                self._feed(BatchReceived(worker_ids=worker_ids, message=pace))
                if not is_listening():
                    break

        self._agenda.when_seen(self._agenda.now_s + found_out_s(self._crew.step_s), report)

    def _resume(self, update: PlanUpdate) -> None:
        """All have adopted the plan: say so."""
        resumed = self._crew.resumed
        num_bytes = moved_bytes(self._settings.profile, update.transfers)
        well = self._nodes.well
        everybody = (worker_id for pipeline in update.plan.pipelines for worker_id in pipeline.worker_ids)
        worker_ids = tuple(worker_id for worker_id in everybody if worker_id.node in well)
        # The account sums up what each worker received: one of them says all of it.
        self._feed(BatchReceived(worker_ids=worker_ids[:1], message=replace(resumed, received_bytes=num_bytes)))
        self._feed(BatchReceived(worker_ids=worker_ids[1:], message=resumed))
        if any(map(self._crew.is_training, self._nodes.silent)):
            self._crew.stop(self._agenda.now_s)
        self._report_later()

    # --- beginnings and ends ------------------------------------------------------------------------------------

    def _spec(self, node: str) -> NodeSpec:
        return NodeSpec(name=node, host=node, devices=tuple(range(self._settings.devices_per_node)))

    def _start(self) -> None:
        """Start the job, or start it again, if the nodes that are there hold the model."""
        nodes = self._nodes.startable
        if self._coordinator is not None or len(nodes) < self._fewest:
            return
        self._nodes.members = {node: self._nodes.lives[node] for node in nodes}
        job = self._job
        if self._settings.max_steps is not None:
            self._crew.max_steps = self._settings.max_steps - self.log.past_steps
            job = replace(job, max_steps=self._crew.max_steps)
        self._coordinator = Coordinator(job, tuple(map(self._spec, nodes)), started_at="", python_version=_PYTHON)
        self._coordinator.start(self._agenda.now_s)
        read_s = self._costs.checkpoint_read_s if self.log.newest_step else 0.0
        coordinator = self._coordinator

        def come_up() -> None:
            for node in nodes:
                if self._coordinator is coordinator:
                    self._come_up(node)
            if self._coordinator is coordinator:
                self._feed(ProfileFound(profile_json=self._profile_json))
            self._tick_later()

        self._agenda.when_seen(self._agenda.now_s + self._costs.node_start_s + read_s, come_up)

    def _come_up(self, node: str) -> None:
        """A node's agent answers, and its workers are ready."""
        if node not in self._nodes.members:
            return
        if not self._nodes.is_well(node):
            self._fail(node, Cause.UNREACHABLE, "it is gone")
            return
        self._feed(NodeUp(node=node, hello=_hello(node, self._agenda.now_s), address=node))
        for device in range(self._settings.devices_per_node):
            self._say(WorkerId(node=node, device=device), _ready(device))

    def _await_others(self, node: str) -> None:
        """Note that a node is there while no coordinator is: too few are, by now."""
        self.log.record(NodeConnected(t_s=self._agenda.now_s, node=node, agent_pid=1))

    def _give_up(self, reason: str) -> None:
        """The coordinator has ended the run: all state is lost but the newest checkpoint's."""
        self._coordinator, self._update, self._fence, self._reviews_s = None, None, 0, inf
        self._untold_step = 0
        self._crew.disband()
        if self._reports is not None:
            self._reports.clear()
        self.log.lose_all(self._agenda.now_s, reason)
        self._start()

    # --- what the trace says ----------------------------------------------------------------------------------------

    def _happen(self, event: TraceEvent) -> None:
        match event:
            case Lost(node=node) | AgentCrashed(node=node):
                self._lose(node)
            case Joined(node=node):
                self._nodes.come(node)
                self._join(node)
            case Frozen(node=node):
                self._nodes.frozen.add(node)
                self._fall_silent(node)
            case Thawed(node=node):
                self._nodes.frozen.discard(node)
                self._be_heard([node])
            case Slowed(node=node, factor=factor):
                self._crew.set_factor(node, factor, self._agenda.now_s)
                self._report_later()
            case WorkerCrashed(node=node, device=device):
                self._crash(node, device)
            case AgentFrozen(node=node, frozen_s=frozen_s):
                self._freeze_agent(node, frozen_s)
            case ForkServerCrashed():
                pass  # nobody waits for it, unless a worker ends within seconds of it
            case MasterFrozen(frozen_s=down_s) | MasterCrashed(down_s=down_s):
                self._agenda.blind_until_s = max(self._agenda.blind_until_s, self._agenda.now_s + down_s)
            case Partitioned(nodes=nodes):
                for node in sorted(self._nodes.here.intersection(nodes) - self._nodes.cut):
                    self._nodes.cut.add(node)
                    self._fall_silent(node)
            case Healed():
                self._nodes.cut, healed = set(), sorted(self._nodes.cut)
                self._be_heard(healed)
            case Noticed(node=node):
                self._agenda.when_seen(self._agenda.now_s, lambda: self._drain(node))
            case _:
                assert_never(event)

    def _lose(self, node: str) -> None:
        self._nodes.go(node)
        self._crew.forget(node)
        self._go_silent(node, self._costs.detect_s, Cause.CONNECTION_LOST, "its connection was lost")

    def _fall_silent(self, node: str) -> None:
        if node not in self._nodes.silent:
            self._go_silent(node, self._costs.lease_s, Cause.LEASE_EXPIRED, "not heard of")

    def _go_silent(self, node: str, notice_s: float, cause: Cause, evidence: str) -> None:
        """A node stops; all workers that wait for it stop with it; the coordinator notices after a while."""
        if node in self._nodes.members and not self._agenda.is_blind:
            self._feed(MessageReceived(node=node, message=Heartbeat(sequence=0)))  # its last
        number = self._nodes.silent[node] = self._agenda.number()
        if self._crew.is_training(node):
            self._crew.stop(self._agenda.now_s)

        since_s = self._agenda.now_s

        def notice() -> None:
            if self._nodes.silent.get(node) != number:
                return
            if cause is Cause.LEASE_EXPIRED and self._is_waited_for(since_s):
                self._agenda.when_seen(self._agenda.now_s + self._costs.lease_s, notice)
            else:
                del self._nodes.silent[node]
                self._fail(node, cause, evidence)
                is_counted_on = self._coordinator is not None and node in self._nodes.members
                if node in self.log.connected and not is_counted_on:
                    self.log.record(NodeLost(t_s=self._agenda.now_s, node=node, cause=cause, evidence=evidence))

        self._agenda.when_seen(self._agenda.now_s + notice_s, notice)

    def _is_waited_for(self, since_s: float) -> bool:
        """Whether the master suspects itself: most nodes have been silent since then, but not for too long."""
        nodes = self._nodes
        silent = nodes.members.keys() & (nodes.mute.keys() | (nodes.silent.keys() & (nodes.frozen | nodes.cut)))
        limit_s = patience_s(
            lease_s=self._costs.lease_s,
            orphan_timeout_s=_CONTROL.orphan_timeout_s,
            has_others=len(silent) < len(nodes.members),
        )
        return are_most(len(silent), len(nodes.members)) and self._agenda.now_s < since_s + limit_s

    def _freeze_agent(self, node: str, frozen_s: float) -> None:
        """An agent is stopped: its workers train on, and where that lasts longer than its lease, its node is lost."""
        if not self._nodes.is_well(node):
            return
        number = self._nodes.mute[node] = self._agenda.number()
        since_s = self._agenda.now_s

        def is_mute() -> bool:
            return self._nodes.mute.get(node) == number

        def thaw() -> None:
            if is_mute():
                del self._nodes.mute[node]
                if node not in self._nodes.members:
                    self._join(node)

        def notice() -> None:
            if not is_mute() or not self._nodes.is_well(node):
                return
            if self._is_waited_for(since_s):
                self._agenda.when_seen(self._agenda.now_s + self._costs.lease_s, notice)
                return
            if self._crew.is_training(node):
                self._crew.stop(self._agenda.now_s)
            self._fail(node, Cause.LEASE_EXPIRED, "not heard of")

        self._agenda.at(since_s + frozen_s, thaw)
        self._agenda.when_seen(since_s + self._costs.lease_s, notice)

    def _fail(self, node: str, cause: Cause, evidence: str) -> None:
        if node in self._nodes.members:
            self._forget_pace(node)
            self._feed(NodeFailed(node=node, cause=cause, evidence=evidence))
            if not self.log.is_planned:
                self._tick_later()

    def _forget_pace(self, node: str) -> None:
        if self._reports is not None:
            self._reports.forget(node)

    def _be_heard(self, nodes: Iterable[str]) -> None:
        """Nodes that were frozen or cut off are well again: they continue, or join again if they were given up."""
        for node in nodes:
            if node in self._nodes.frozen or node in self._nodes.cut:
                continue
            self._nodes.silent.pop(node, None)
            if self._nodes.is_well(node):
                self._answer(self._fence, only={node})
            else:
                self._join(node)
        is_fenced = self._coordinator is not None and self._coordinator.phase is Phase.FENCING
        if self._update is None and not is_fenced and not any(map(self._crew.is_training, self._nodes.silent)):
            self._crew.go_on(self._agenda.now_s)

    def _join(self, node: str) -> None:
        life = self._nodes.lives[node]

        def join() -> None:
            if node not in self._nodes.here or node in self._nodes.silent or life != self._nodes.lives[node]:
                return
            if self._coordinator is None:
                self._start()
                if self._coordinator is None:
                    self._await_others(node)
            elif self._nodes.members.get(node) == life:
                return
            elif not self.log.is_planned:  # the job is about to start
                self._agenda.when_seen(self._agenda.now_s + self._costs.node_start_s + _SOON_S, join)
            else:
                self._fail(node, Cause.CONNECTION_LOST, "its agent was lost")
                self._nodes.members[node] = life
                self._feed(AddRequested(spec=self._spec(node)))
                self._come_up(node)

        self._agenda.when_seen(self._agenda.now_s + self._costs.node_start_s, join)

    def _crash(self, node: str, device: int) -> None:
        if self._nodes.is_well(node) and self.log.is_planned and device < self._settings.devices_per_node:
            if self._crew.is_training(node):
                self._crew.stop(self._agenda.now_s)
            self._end_worker(WorkerId(node, device))
            if node not in self._nodes.members:
                self._join(node)  # given up; its user takes it back

    def _end_worker(self, worker_id: WorkerId) -> None:
        self._crashed.add(worker_id)
        self._forget_pace(worker_id.node)
        self._say(worker_id, WorkerExited(device=worker_id.device, pid=1, signal=9))

    def _worker_restarts(self, worker_id: WorkerId) -> None:
        life = self._nodes.lives[worker_id.node]

        def ready() -> None:
            if self._nodes.members.get(worker_id.node) == life and self._nodes.is_well(worker_id.node):
                self._say(worker_id, _ready(worker_id.device))

        self._agenda.when_seen(self._agenda.now_s + self._costs.worker_start_s, ready)

    def _drain(self, node: str) -> None:
        if self._nodes.is_well(node) and self.log.is_planned:
            self._feed(DrainRequested(node=node))


def _hello(node: str, now_s: float) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        oobleck_version=__version__,
        python_version=_PYTHON,
        node=node,
        pid=1,
        generation=0,
        workers=(),
        num_cores=1,
        memory_bytes=1,
        clock_s=now_s,
    )


def _ready(device: int) -> WorkerReady:
    return WorkerReady(
        device=device, pid=1, data_digest="", num_samples=1, layer_names=(), parameters=0, torch_version=""
    )
