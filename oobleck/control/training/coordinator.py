"""The coordinator: every decision of a run, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay.

A report goes to the part that it concerns: `node_lifecycle` knows which nodes come and go, `startup` leads to the
first plan, `reconfiguration` from one plan to the next, `progress` knows the steps, `saving` the checkpoints. Each part
takes values and the time, may read other parts, and changes none: it returns what it asks of them, and `routing.py`
carries it out. The phase of a run follows from the state in `recovery/`, whose transitions are drawn in
`docs/architecture.md`.
"""

from __future__ import annotations

import math
from typing import assert_never

from oobleck import __version__
from oobleck.control import events
from oobleck.control.journal import (
    JobEnded,
    JobStarted,
    NodeUnfit,
    PlanCause,
)
from oobleck.control.nodes import (
    Membership,
)
from oobleck.control.protocol import (
    StopAgent,
    run_digest,
)
from oobleck.control.recovery import HeldUp, Phase, RunEnded, TimePassed
from oobleck.job import JobSpec, NodeSpec

from .parts import make_parts
from .replayed_run import ReplayedRun
from .reports import Reports
from .routing import Routing, RunOver
from .takeover import take_over


class Coordinator:
    """Makes all decisions of one run. Only `start`, `handle` and `handle_deadline` change it."""

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
        self._reports = Reports(self._parts, self._routing)
        self._do = self._routing.carry_out

    @property
    def phase(self) -> Phase:
        return self._parts.reconfiguration.phase

    # --- the machine's interface ---------------------------------------------------------------------------

    def start(self, now_s: float) -> list[events.Command]:
        """Begin, or take over: reach all nodes."""
        if self._replayed is None:
            started = JobStarted(
                t_s=now_s, version=__version__, job=self._job, nodes=self._nodes, started_at=self._started_at
            )
            self._parts.startup.expect_all(now_s)
            self._do((events.Record(entry=started), *(events.Connect(node=spec) for spec in self._nodes)), now_s)
        else:
            take_over(self._parts, self._routing, self._job, self._nodes, self._replayed, now_s)
        return self._routing.take()

    def handle(self, now_s: float, event: events.Event) -> list[events.Command]:
        """Take in an event. Raises nothing: a peer that does wrong is the one that is lost for it."""
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
        """The latest time at which `handle_deadline` must be called; infinity for never."""
        if self.phase is Phase.ENDED:
            return math.inf
        parts = self._parts
        return min(
            [
                parts.startup.deadline_s,
                parts.link_timing.deadline_s,
                parts.reconfiguration.deadline_s,
                parts.hang_watch.due_s,
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
        """When it next reviews which nodes should train: a part of `next_deadline`, for callers that skip time."""
        return math.inf if self.phase is Phase.ENDED else min(self._parts.replanning.rescales_s, self._retries_s)

    @property
    def _retries_s(self) -> float:
        """When a slow node that was left out is to be tried again; infinity for never."""
        return math.inf if self._parts.reconfiguration.is_fencing else self._parts.replanning.retries_s

    def handle_deadline(self, now_s: float) -> list[events.Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        self._parts.silence.recount()
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self.phase is Phase.ENDED:
            return []
        self._parts.silence.note_call(now_s)
        try:
            held_up_s = self._parts.silence.forgive(now_s, late_s)
            if held_up_s:
                self._parts.members.forgive(now_s)
                self._hold(now_s, held_up_s)
            self._act_on_time(now_s)
            self._follow_up(now_s)
        except RunOver as over:
            self._end(over.end, now_s)
        return self._routing.take()

    def _take_in(self, event: events.Event, now_s: float) -> None:
        parts, is_begun = self._parts, self._parts.reconfiguration.is_begun
        match event:
            case events.NodeUp(hello=hello):
                misfit, generation = parts.preparation.misfit(hello), parts.reconfiguration.generations.current
                self._do(parts.lifecycle.node_up(event, now_s, misfit=misfit, generation=generation), now_s)
            case events.NodeFailed(node=node, loss=loss):
                self._do(parts.lifecycle.unreachable(node, loss, now_s), now_s)
            case events.NodeLeftOut(node=node, fault=fault):
                self._routing.record(NodeUnfit(t_s=now_s, node=node, fault=fault, is_tried_again=False))
            case events.MessageReceived(node=node, message=message):
                self._reports.said(node, message, now_s)
            case events.NodesHeard():
                self._reports.heard(event, now_s)
            case events.BatchReceived():
                self._reports.all_said(event, now_s)
            case events.ProfileFound():
                self._do(parts.preparation.take_profile(event), now_s)
                self._reports.profile_known(now_s)
            case events.LinkFound():
                self._do(parts.link_timing.take_found(event, now_s), now_s)
                self._reports.train_when_ready(now_s)
            case events.StopRequested():
                self._stop_requested(event, now_s)
            case events.AddRequested(spec=spec, by_itself=by_itself):
                self._do(parts.lifecycle.add(spec, now_s, by_itself=by_itself), now_s)
            case events.DrainRequested(node=node):
                self._do(parts.lifecycle.drain(node, now_s, is_begun=is_begun), now_s)
            case events.KillRequested(node=node):
                parts.lifecycle.ban(node)
            case events.Remark(level=level, text=text):
                self._do((events.notice(now_s, level, text),), now_s)
            case _:
                assert_never(event)

    # --- time passes -------------------------------------------------------------------------------------------

    def _hold(self, now_s: float, late_s: float) -> None:
        """This master itself was held up: nothing is overdue until the messages that came meanwhile are read."""
        soon_s = now_s + self._job.control.heartbeat_interval_s
        self._parts.startup.forgive(late_s, soon_s)
        self._do(self._parts.reconfiguration.give(HeldUp(until_s=soon_s), now_s), now_s)
        self._parts.progress.give_time(now_s)

    def _act_on_time(self, now_s: float) -> None:
        parts = self._parts
        recovery, progress, silence = parts.reconfiguration, parts.progress, parts.silence
        if recovery.is_begun:  # a start has a time limit of its own
            self._do(silence.give_up_silent(now_s), now_s)
        if late := parts.link_timing.handle_deadline(now_s):
            self._do(late, now_s)
            self._reports.train_when_ready(now_s)
        self._do(parts.startup.handle_deadline(now_s), now_s)
        self._do(recovery.give(TimePassed(is_suspicious=silence.is_suspicious), now_s), now_s)
        if now_s >= parts.hang_watch.due_s and silence.is_suspicious:
            progress.give_time(now_s)  # steps may be committed that nobody can report to us
        elif now_s >= parts.hang_watch.due_s:
            self._do(parts.hang_watch.handle_deadline(recovery.training_places(), now_s), now_s)
        if now_s >= parts.saving.due_s:
            self._do(parts.saving.handle_deadline(now_s), now_s)
        if now_s >= parts.replanning.rescales_s:
            self._rescale(now_s)
        if now_s >= self._retries_s:
            self._do(parts.replanning.retry_slow(recovery.generations.plan, now_s), now_s)
        if self.phase is Phase.TRAINING and parts.sharding.takes_regrouping(now_s):
            self._routing.begin(PlanCause.DATA_UNREADABLE, now_s)
        self._do(parts.lifecycle.retry_lost(now_s), now_s)

    def _rescale(self, now_s: float) -> None:
        """Review how many nodes should train."""
        if self._parts.reconfiguration.is_fencing:
            self._parts.replanning.look_later(now_s)
        else:
            plan = self._parts.reconfiguration.generations.plan
            self._do(self._parts.replanning.rescale(plan, now_s), now_s)

    def _follow_up(self, now_s: float) -> None:
        """Do what has become possible after any input."""
        parts, generations = self._parts, self._parts.reconfiguration.generations
        if self.phase is Phase.TRAINING:
            save = parts.saving.is_behind
            self._do(parts.sharding.go_on(generations.current, now_s, save=save), now_s)
        is_training = self.phase is Phase.TRAINING
        self._do(parts.shutdown.follow_up(generations, now_s, is_training=is_training), now_s)

    # --- the end -----------------------------------------------------------------------------------------------

    def _stop_requested(self, event: events.StopRequested, now_s: float) -> None:
        if event.now or not self._parts.reconfiguration.is_begun:
            self._do((events.EndRun(exit_code=event.exit_code, reason=event.reason),), now_s)
        self._parts.shutdown.stop(event)
        self._parts.sharding.stop()
        self._parts.replanning.stop()
        self._do((events.notice(now_s, "info", "stopping after the step in flight"),), now_s)

    def _end(self, end: events.EndRun, now_s: float) -> None:
        parts, exit_code = self._parts, int(end.exit_code)  # what journals and processes know
        error = parts.shutdown.error_behind(end) if parts.reconfiguration.is_begun else None
        reason = end.reason if error is None else error.text
        stop = StopAgent(reason=reason)
        self._do(tuple(events.Send(node=member.spec.name, message=stop) for member in parts.members.living), now_s)
        self._do(parts.reconfiguration.give(RunEnded(), now_s), now_s)
        self._routing.record(JobEnded(t_s=now_s, exit_code=exit_code, reason=reason, error=error))
        self._do((events.End(exit_code=exit_code, reason=reason),), now_s)
