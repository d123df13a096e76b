"""The job of a sweep: the real coordinator with workers in closed form, restarted when all state is lost."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import replace
from itertools import chain
from math import inf

from oobleck import __version__
from oobleck.control import events, journal, protocol
from oobleck.control.speed import found_out_s
from oobleck.control.training import Coordinator, Phase
from oobleck.errors import ExitCode
from oobleck.planner import WorkerId, profile_to_json
from oobleck.planner.what_if import moved_bytes, transfer_s
from oobleck.sim.trace import Slowed, Trace

from .analytic_workers import AnalyticWorkers, CommittedSteps
from .reports import Reports
from .run_log import RunLog
from .settings import SweepSettings, most_steps
from .world import Agenda, NodeStates

_PYTHON = "3.11.0"
_NO_LIMIT = 2**62
# A node that joins while the job is starting tries again this much later.
_SOON_S = 0.1


class JobRun:
    """One run; the events of an agenda call its methods in the order of time."""

    def __init__(self, trace: Trace, settings: SweepSettings) -> None:
        self._trace = trace
        self._settings = settings
        self.costs = settings.costs
        interval_s = settings.interval_s(trace, at_least=settings.fault_threshold + 1)
        self.log = RunLog(checkpoint_interval_s=interval_s)
        self._job = settings.job(most_steps(trace, settings))
        self._planner = settings.planner_of(trace)
        self.kinds = settings.nodes_of(trace)
        self.crew = AnalyticWorkers(
            self.kinds,
            num_samples=settings.global_batch_size,
            most_steps=settings.max_steps or _NO_LIMIT,
            costs=settings.costs,
            saving_share=self.costs.saving_s(trace.most_nodes, settings.state_bytes) / interval_s,
        )
        self.agenda = Agenda()
        self.nodes = NodeStates(trace.nodes, trace.start)
        self._coordinator: Coordinator | None = None
        self._crashed: set[WorkerId] = set()  # ended workers that may be started again
        self._wanted_kinds: list[str] = []  # the kinds of nodes whose profiles the coordinator has requested
        self._pids: dict[WorkerId, int] = {}
        self._update: protocol.PlanUpdate | None = None
        self._fence = 0
        self._answered = 0  # the newest fence that every well node has answered
        self._unreported_step = 0  # the first committed step that no worker could report to the master, or 0
        self.is_over = False
        self._reviews_s = inf  # when the coordinator next reviews which nodes should train
        self._reports = Reports(
            self.kinds.profile_of, is_needed=any(isinstance(event, Slowed) for event in trace.events)
        )
        self._reporting = 0  # the number of the reports that are due

    @property
    def is_undisturbed(self) -> bool:
        """Whether no plan is being adopted, and no fence waits for answers."""
        is_fenced = self._coordinator is not None and self._coordinator.phase is Phase.FENCING
        return self._update is None and not is_fenced

    def counts_on(self, node: str) -> bool:
        """Return whether there is a coordinator that has not given the node up."""
        return self._coordinator is not None and node in self.nodes.members

    def begin(self) -> None:
        """Start the job on the nodes of the start, or wait for more."""
        nodes = tuple(map(self.kinds.spec, self._trace.nodes))
        self.log.record(journal.JobStarted(t_s=0.0, version=__version__, job=self._job, nodes=nodes, started_at=""))
        self._start()
        for node in self.nodes.startable(self.agenda.now_s) if self._coordinator is None else ():
            self._await_others(node)

    def finish(self) -> None:
        """Let the workers report that they have finished; the run is over once the master has all reports."""
        coordinator, plan = self._coordinator, self.crew.plan
        if coordinator is None or plan is None or coordinator.phase is not Phase.TRAINING:
            return
        if self.agenda.is_blind:
            self.agenda.at(self.agenda.blind_until_s, lambda: None)  # the sweep calls `finish` again then
        elif all(map(self.nodes.is_well, plan.nodes)):
            for worker_id in plan.worker_ids:
                self._report(worker_id, protocol.Finished(device=worker_id.device, applied=self.crew.max_steps))

    def move_to(self, t_s: float) -> None:
        """Let time pass: commit the steps that fit, and adopt a plan that is due."""
        update = self._update if self.crew.next_s <= t_s else None
        for stretch in self.crew.advance(t_s):
            self._committed(stretch)
        self.agenda.now_s = t_s
        if update is not None:
            self._update = None
            self._resume(update)
            self.move_to(t_s)

    def _committed(self, stretch: CommittedSteps) -> None:
        record = self.crew.last_record
        worker_id = self.crew.speaker(self.nodes.is_well)
        assert record is not None
        first_step = self._unreported_step or stretch.first_step
        if self._coordinator is None:
            self.log.save(stretch)
        elif worker_id is None:
            self._unreported_step = first_step
        else:
            self._unreported_step = 0
            self.log.save(stretch)
            # A report arrives at the end of its last step, not with the next event of the trace.
            self.agenda.now_s = max(self.agenda.now_s, stretch.end_s)
            message = protocol.StepCommitted(device=worker_id.device, record=record)
            self.feed(events.MessageReceived(node=worker_id.node, message=message), from_step=first_step)

    def feed(self, event: events.Event, *, from_step: int = 0) -> None:
        """Pass the coordinator, if there is one, an event, and carry out its commands."""
        if self._coordinator is not None:
            is_answered = self._coordinator.phase is Phase.FENCING and self._answered == self._fence
            self._carry_out(self._coordinator.handle(self.agenda.now_s, event), from_step=from_step)
            if is_answered and isinstance(event, events.NodeFailed | events.MessageReceived):
                self._tick_later()  # no answer follows a loss that belongs to the previous one

    def _report(self, worker_id: WorkerId, message: protocol.AgentMessage) -> None:
        self.feed(events.MessageReceived(node=worker_id.node, message=message))

    def _carry_out(self, commands: Sequence[events.Command], *, from_step: int = 0) -> None:
        fence = 0
        ordered: protocol.PlanUpdate | None = None
        for command in commands:
            match command:
                case events.Record(entry=journal.StepDone() as entry):
                    # Answers to a fence may include steps that no worker could report.
                    self.log.record_steps(entry, from_step or self._unreported_step)
                    self._unreported_step = 0
                case events.Record(entry=entry):
                    self.log.record(entry)
                # The pattern binds `fence`: answers come after all commands of this turn.
                case events.SendAll(message=protocol.Fence(generation=fence)):
                    pass
                # Workers that compute are not stuck: all their time is processor time.
                case events.SendAll(worker_ids=worker_ids, message=protocol.AskActivity() as asked) if (
                    self.crew.is_computing
                ):
                    device = worker_ids[0].device
                    use = protocol.ProcessorUse(device=device, inquiry=asked.inquiry, used_s=1.0, within_s=1.0)
                    self._report(worker_ids[0], use)
                case events.SendOrders(update=protocol.PlanUpdate(initial=True)) if self.crew.last_record is not None:
                    self._give_up("all state is lost")  # the log has checkpoints that the coordinator does not know
                    return
                case events.LookUpProfile(kind=kind):
                    self._wanted_kinds.append(kind)
                case events.SendOrders(update=update):
                    ordered = update
                case events.Disconnect(node=node):
                    self.nodes.members.pop(node, None)
                    self._crashed.difference_update([each for each in self._crashed if each.node == node])
                case events.Connect(node=spec) if spec.num_devices < len(self.kinds.devices_of(spec.name)):
                    self._refuse_later(spec.name)
                case events.Send(node=node, message=protocol.StartWorker(device=device)) if (
                    WorkerId(node, device) in self._crashed
                ):
                    self._crashed.discard(WorkerId(node, device))
                    self._worker_restarts(WorkerId(node, device))
                case events.Send(node=node, message=protocol.KillWorker(device=device)):
                    self.end_worker(WorkerId(node, device))
                case events.Send(message=protocol.FinishStep()):
                    self.crew.finish_step()
                case events.Send(node=node, message=protocol.StopAgent(is_dismissal=True)):
                    self._report(WorkerId(node=node, device=0), protocol.AgentStopped(reason="drained"))
                case events.End(exit_code=0):
                    self.is_over = True
                    return
                case events.End(exit_code=exit_code, reason=reason):
                    if exit_code == ExitCode.RESUMABLE:
                        self.log.save_all()
                    self._give_up(reason)
                    return
                case _:
                    pass
        if fence:
            self._fence = fence
            self._update = None
            asking_s = self.costs.asking_s(self.kinds.num_workers(self.nodes.members))
            self.agenda.when_seen(self.agenda.now_s + asking_s, lambda: self._answer(fence))
        if ordered is not None:
            self._update = ordered
            seconds, num_workers = transfer_s(self.kinds.profile, ordered.transfers), len(ordered.plan.worker_ids)
            ordered_s = self.costs.deciding_s(num_workers) + self.costs.ordering_s(num_workers)
            self.crew.take_update(ordered, self.agenda.now_s + ordered_s, transfer_s=seconds)
        self._review_later()

    def _refuse_later(self, node: str) -> None:
        """Keep a node away that the coordinator tries without a device: a sweep's nodes have all of theirs, or none."""
        loss = journal.Misfit(problem="a node of a sweep has all of its devices")
        self.agenda.when_seen(self.agenda.now_s, lambda: self.feed(events.NodeFailed(node=node, loss=loss)))

    def _answer(self, generation: int, only: Collection[str] | None = None) -> None:
        """Answer a fence for all well workers, or for those of some nodes."""
        if generation != self._fence or self._coordinator is None or self._coordinator.phase is not Phase.FENCING:
            return
        self._answered = generation
        plan = self.crew.plan
        at_work: Set[str] = plan.pipeline_of.keys() if plan is not None else frozenset()
        well = self.nodes.well
        idle = [
            WorkerId(node=node, device=device)
            for node in sorted(well - at_work)
            for device in self.kinds.devices_of(node)
        ]
        for worker_ids, status in self.crew.answers(generation, self.agenda.now_s, at_work - well, idle):
            speakers = worker_ids if only is None else tuple(each for each in worker_ids if each.node in only)
            self.feed(events.BatchReceived(worker_ids=speakers, message=status))
        self._tick_later()

    def answer_from(self, node: str) -> None:
        """Answer the current fence, if there is one, for a node's workers."""
        self._answer(self._fence, only={node})

    def _tick_later(self) -> None:
        """Let the coordinator act when it has waited long enough for losses that belong together."""
        coordinator = self._coordinator
        if coordinator is None or coordinator.phase not in (Phase.PREPARING, Phase.FENCING):
            return

        def tick() -> None:
            # Another coordinator has deadlines of its own.
            if self._coordinator is coordinator:
                self._carry_out(coordinator.handle_deadline(self.agenda.now_s))

        self.agenda.when_seen(coordinator.next_deadline(), tick)

    def _review_later(self) -> None:
        coordinator = self._coordinator
        if coordinator is None or coordinator.reviews_s >= self._reviews_s:
            return
        due_s = self._reviews_s = max(self.agenda.now_s, coordinator.reviews_s)

        def look() -> None:
            if self._reviews_s == due_s:
                self._reviews_s = inf
            if self._coordinator is not coordinator or self.agenda.now_s < coordinator.reviews_s:
                self._review_later()
            elif self.nodes.members.keys().isdisjoint(self.nodes.silent):
                self._carry_out(coordinator.handle_deadline(self.agenda.now_s))
            else:  # the coordinator would find a hang, which is only a loss that it has not noticed yet
                self.agenda.when_seen(self.agenda.now_s + self.costs.lease_s, look)

        self.agenda.when_seen(due_s, look)

    def report_later(self) -> None:
        """Let the workers report their pace once they have computed at it for long enough."""
        coordinator, plan, reports = self._coordinator, self.crew.plan, self._reports
        if coordinator is None or plan is None or not reports.due(plan, self.crew.factors):
            return
        number = self._reporting = self.agenda.number()

        def is_listening() -> bool:
            return self.crew.is_computing and coordinator.phase is Phase.TRAINING

        def report() -> None:
            if self._reporting != number or self._coordinator is not coordinator or self.crew.plan is not plan:
                return
            if not is_listening():
                self.report_later()
                return
            for worker_ids, pace in reports.make(plan, self.crew.schedules, self.crew.factors):
                self.feed(events.BatchReceived(worker_ids=worker_ids, message=pace))
                # A report may lead to a new plan, for which the others come too late.
                if not is_listening():
                    break

        found_s = found_out_s(self.crew.step_s, len(plan.worker_ids))
        self.agenda.when_seen(self.agenda.now_s + found_s, report)

    def _resume(self, update: protocol.PlanUpdate) -> None:
        """Report that all workers have adopted a plan."""
        resumed = self.crew.resumed
        num_bytes = moved_bytes(self.kinds.profile, update.transfers)
        well = self.nodes.well
        all_ids = chain.from_iterable([pipeline.worker_ids for pipeline in update.plan.pipelines])
        worker_ids = tuple([worker_id for worker_id in all_ids if worker_id.node in well])
        # The account sums the bytes over workers, so one of them reports all.
        self.feed(events.BatchReceived(worker_ids=worker_ids[:1], message=replace(resumed, received_bytes=num_bytes)))
        self.feed(events.BatchReceived(worker_ids=worker_ids[1:], message=resumed))
        # A node of the new plan may have fallen silent before its adoption.
        if any(map(self.crew.is_training, self.nodes.silent)):
            self.crew.stop(self.agenda.now_s)
        self.report_later()

    def _start(self) -> None:
        """Start or restart the job, if the present nodes hold the model."""
        nodes = self.nodes.startable(self.agenda.now_s)
        if self._coordinator is not None or not self._planner.can_hold(nodes):
            return
        self.nodes.members = {node: self.nodes.lives[node] for node in nodes}
        job, most_steps = self._job, self._settings.max_steps
        self.crew.max_steps = _NO_LIMIT if most_steps is None else most_steps - self.log.past_steps
        if most_steps is not None:
            job = replace(job, max_steps=self.crew.max_steps)
        self._wanted_kinds.clear()
        self._coordinator = Coordinator(job, tuple(map(self.kinds.spec, nodes)), started_at="", python_version=_PYTHON)
        self._coordinator.start(self.agenda.now_s)
        if job.control.waits_for_script:
            self._coordinator.handle(self.agenda.now_s, events.ScriptEnded())  # there is none here
        read_s = self.costs.reading_s(len(nodes), self._settings.state_bytes) if self.log.newest_step else 0.0
        self.log.checkpoint_read_s = read_s
        coordinator = self._coordinator

        def connect() -> None:
            # The report about one node may end this coordinator's run before the next.
            for node in nodes:
                if self._coordinator is coordinator:
                    self._connect(node)
            if self._coordinator is coordinator:
                self._find_profiles()
            self._tick_later()

        self.agenda.when_seen(self.agenda.now_s + self.costs.starting_s(len(nodes)) + read_s, connect)

    def _connect(self, node: str) -> None:
        if node not in self.nodes.members:
            return
        if not self.nodes.is_well(node):
            self.fail(node, journal.Unreachable(problem="it is gone"))
            return
        self.feed(events.NodeUp(node=node, hello=_hello(node, self.agenda.now_s), address=node))
        for device in self.kinds.devices_of(node):
            self._report_ready(WorkerId(node=node, device=device))

    def _find_profiles(self) -> None:
        """Return the requested profiles to the coordinator, all of which count as cached."""
        wanted, self._wanted_kinds = self._wanted_kinds, []
        for kind in wanted:
            (profile,) = (each.profile for each in self.kinds.named if each.name == kind)
            # A sweep times no links, so the profile's network counts as measured.
            profile = replace(profile, network=replace(profile.network, assumed=()))
            self.feed(events.ProfileFound(profile_json=profile_to_json(profile), kind=kind))

    def _await_others(self, node: str) -> None:
        """Record a node that is present while too few are for a coordinator."""
        self.log.record(journal.NodeConnected(t_s=self.agenda.now_s, node=node, agent_pid=1))

    def _give_up(self, reason: str) -> None:
        """End the coordinator's run: all state is lost but the newest checkpoint's."""
        self._coordinator, self._update, self._fence, self._reviews_s = None, None, 0, inf
        self._unreported_step = 0
        self.crew.disband()
        self._reports.clear()
        self.log.lose_all(self.agenda.now_s, reason)
        self._start()
        for leaves_s in {each for each in self.nodes.leaves_s.values() if each > self.agenda.now_s}:
            self.agenda.at(leaves_s, self._start)

    def fail(self, node: str, loss: journal.Loss) -> None:
        """Report the failure of a node that the coordinator counts on."""
        if node in self.nodes.members:
            self._reports.forget(node)
            self.feed(events.NodeFailed(node=node, loss=loss))
            if not self.log.is_planned:
                self._tick_later()

    def join(self, node: str) -> None:
        """Start a node up; it takes part once it is ready, unless it changes before."""
        life, starting_s = self.nodes.lives[node], self.costs.starting_s(1)

        def join() -> None:
            if node not in self.nodes.here or node in self.nodes.silent or life != self.nodes.lives[node]:
                return
            if self._coordinator is None:
                self._start()
                if self._coordinator is None:
                    self._await_others(node)
            elif self.nodes.members.get(node) == life:
                return
            elif not self.log.is_planned:  # the job is about to start
                self.agenda.when_seen(self.agenda.now_s + starting_s + _SOON_S, join)
            else:
                # The coordinator may still count on the node's earlier life.
                self.fail(node, journal.AgentLost())
                self.nodes.members[node] = life
                self.feed(events.AddRequested(spec=self.kinds.spec(node)))
                self._connect(node)
                self._find_profiles()

        self.agenda.when_seen(self.agenda.now_s + starting_s, join)

    def end_worker(self, worker_id: WorkerId) -> None:
        self._crashed.add(worker_id)
        self._reports.forget(worker_id.node)
        pid, end = self._pids[worker_id], protocol.Killed(signal=9)
        self._report(worker_id, protocol.WorkerExited(device=worker_id.device, pid=pid, end=end))

    def _worker_restarts(self, worker_id: WorkerId) -> None:
        life = self.nodes.lives[worker_id.node]

        def ready() -> None:
            if self.nodes.members.get(worker_id.node) == life and self.nodes.is_well(worker_id.node):
                self._report_ready(worker_id)

        self.agenda.when_seen(self.agenda.now_s + self.costs.worker_start_s, ready)

    def _report_ready(self, worker_id: WorkerId) -> None:
        self._pids[worker_id] = self._pids.get(worker_id, 0) + 1
        ready = protocol.WorkerReady(
            device=worker_id.device,
            pid=self._pids[worker_id],
            data_digest="",
            num_samples=1,
            layer_names=(),
            parameters=0,
            torch_version="",
        )
        self._report(worker_id, ready)

    def notice(self, node: str) -> None:
        """Let a node report that it will be taken away."""
        if self.nodes.is_well(node) and self.log.is_planned:
            leaving = protocol.Leaving(reason="its provider takes it away")
            self._report(WorkerId(node=node, device=0), leaving)


def _hello(node: str, now_s: float) -> protocol.Hello:
    return protocol.Hello(
        protocol=protocol.PROTOCOL_VERSION,
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
