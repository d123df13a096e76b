"""Sweep mode: a failure trace straight into the real coordinator, from one event to the next.

Months of a cluster of thousands of nodes take seconds, since nothing happens between events: no heartbeats are sent,
and steps are summed up. The real coordinator and planner decide; workers answer at once (see `analytic_workers`), and
times come from `costs` and from the schedule's timeline on the profile.

When the coordinator cannot continue, its job restarts from the newest checkpoint once the present nodes hold the model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import assert_never

from oobleck.control.events import MessageReceived
from oobleck.control.journal import ConnectionLost, JobEnded, JournalEntry, NodeLost, Silent
from oobleck.control.nodes import are_most, patience_s
from oobleck.control.protocol import Heartbeat
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId
from oobleck.sim import trace as traces

from .job_run import JobRun
from .settings import SweepSettings

_CONTROL = ControlSpec()
_GARBAGE = 2_000_000
"""New objects between two collections."""


def sweep(
    trace: traces.Trace, settings: SweepSettings, *, report: Callable[[float], None] = lambda _: None
) -> tuple[JournalEntry, ...]:
    """Play a trace and return the journal of the run, with entries of many steps in place of one a step.

    `report` receives the simulated seconds as progress. Raises PlanningError where all nodes do not hold the model.
    """
    # Collect cycles rarely: there are hardly any, and each collection traverses the newest plans, or all so far.
    before = gc.get_threshold()
    gc.set_threshold(_GARBAGE, *before[1:])
    try:
        return _play(trace, settings, report)
    finally:
        gc.set_threshold(*before)


def _play(trace: traces.Trace, settings: SweepSettings, report: Callable[[float], None]) -> tuple[JournalEntry, ...]:
    run = JobRun(trace, settings)
    faults = Faults(run)
    for event in trace.events:
        run.agenda.at(event.t_s, partial(faults.happen, event))
    run.begin()
    while (next_s := min(run.agenda.next_s, run.crew.next_s)) <= trace.duration_s:
        run.move_to(next_s)
        run.agenda.do_due()
        if run.crew.has_finished:
            run.finish()
        if run.is_over:
            return tuple(run.log.entries)
        report(run.agenda.now_s)
    run.move_to(trace.duration_s)
    reason = f"the trace ends after {run.log.newest_step} steps"
    run.log.record(JobEnded(t_s=trace.duration_s, exit_code=0, reason=reason))
    return tuple(run.log.entries)


class Faults:
    """Carries out a trace's events on the nodes of a run, and times when the master notices."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._nodes, self._crew, self._agenda, self._costs = run.nodes, run.crew, run.agenda, run.costs

    def happen(self, event: traces.TraceEvent) -> None:
        changed = self._nodes.apply(event)
        match event:
            case traces.Gone(node=node):
                self._crew.factors.pop(node, None)  # a node that returns has its usual speed
                self._go_silent(node, self._costs.detect_s, is_seen=True)
            case traces.Joined(node=node):
                self._run.join(node)
            case traces.Frozen() | traces.Partitioned():
                for node in [each for each in changed if each not in self._nodes.silent]:
                    self._go_silent(node, self._costs.lease_s, is_seen=False)
            case traces.Thawed() | traces.Healed():
                self._be_heard(changed)
            case traces.Slowed(node=node, factor=factor):
                self._crew.set_factor(node, factor, self._agenda.now_s)
                self._run.report_later()
            case traces.WorkerCrashed(node=node, device=device):
                self._crash(node, device)
            case traces.AgentFrozen(node=node, frozen_s=frozen_s):
                self._freeze_agent(node, frozen_s)
            case traces.ForkServerCrashed():
                pass  # nothing depends on it, unless a worker ends within seconds
            case traces.MasterFrozen(frozen_s=down_s) | traces.MasterCrashed(down_s=down_s):
                self._agenda.blind_until_s = max(self._agenda.blind_until_s, self._agenda.now_s + down_s)
            case traces.Noticed(node=node, grace_s=grace_s):
                self._nodes.leaves_s[node] = self._agenda.now_s + grace_s
                self._agenda.when_seen(self._agenda.now_s, lambda: self._run.notice(node))
            case _:
                assert_never(event)

    def _go_silent(self, node: str, notice_s: float, *, is_seen: bool) -> None:
        """Stop a node, and all training that waits for it; the coordinator notices after `notice_s`.

        With `is_seen` the node's connection breaks, else only its silence shows the loss.
        """
        if node in self._nodes.members and not self._agenda.is_blind:
            self._run.feed(MessageReceived(node=node, message=Heartbeat(sequence=0)))  # the last one
        # The number tells this silence from the node's next one.
        number = self._nodes.silent[node] = self._agenda.number()
        if self._crew.is_training(node):
            self._crew.stop(self._agenda.now_s)

        since_s = self._agenda.now_s

        def notice() -> None:
            if self._nodes.silent.get(node) != number:
                return
            if not is_seen and self._is_waited_for(since_s):
                self._agenda.when_seen(self._agenda.now_s + self._costs.lease_s, notice)
            else:
                del self._nodes.silent[node]
                loss = ConnectionLost() if is_seen else Silent(silent_s=self._agenda.now_s - since_s)
                self._run.fail(node, loss)
                if node in self._run.log.connected and not self._run.counts_on(node):
                    self._run.log.record(NodeLost(t_s=self._agenda.now_s, node=node, loss=loss))

        self._agenda.when_seen(self._agenda.now_s + notice_s, notice)

    def _is_waited_for(self, since_s: float) -> bool:
        """Return whether the master suspects itself, since most nodes are silent and not for too long."""
        nodes = self._nodes
        silent = nodes.members.keys() & (nodes.mute.keys() | (nodes.silent.keys() & nodes.stuck))
        limit_s = patience_s(
            lease_s=self._costs.lease_s,
            orphan_timeout_s=_CONTROL.orphan_timeout_s,
            has_others=len(silent) < len(nodes.members),
        )
        return are_most(len(silent), len(nodes.members)) and self._agenda.now_s < since_s + limit_s

    def _freeze_agent(self, node: str, frozen_s: float) -> None:
        """Freeze an agent while its workers train on; if it stays so longer than its lease, its node is lost."""
        if not self._nodes.is_well(node):
            return
        number = self._nodes.mute[node] = self._agenda.number()
        since_s = self._agenda.now_s

        def is_mute() -> bool:
            return self._nodes.mute.get(node) == number

        def thaw() -> None:
            if is_mute():
                del self._nodes.mute[node]
                # The master may have given it up meanwhile.
                if node not in self._nodes.members:
                    self._run.join(node)

        def notice() -> None:
            if not is_mute() or not self._nodes.is_well(node):
                return
            if self._is_waited_for(since_s):
                self._agenda.when_seen(self._agenda.now_s + self._costs.lease_s, notice)
                return
            if self._crew.is_training(node):
                self._crew.stop(self._agenda.now_s)
            self._run.fail(node, Silent(silent_s=self._agenda.now_s - since_s))

        self._agenda.at(since_s + frozen_s, thaw)
        self._agenda.when_seen(since_s + self._costs.lease_s, notice)

    def _be_heard(self, nodes: Iterable[str]) -> None:
        """Let nodes that were frozen or cut off continue, or join again if the master gave them up."""
        for node in nodes:
            if node in self._nodes.stuck:
                continue
            self._nodes.silent.pop(node, None)
            if self._nodes.is_well(node):
                # A fence may have waited for its answer.
                self._run.answer_from(node)
            else:
                self._run.join(node)
        if self._run.is_undisturbed and not any(map(self._crew.is_training, self._nodes.silent)):
            self._crew.resume(self._agenda.now_s)

    def _crash(self, node: str, device: int) -> None:
        if self._nodes.is_well(node) and self._run.log.is_planned and device in self._run.kinds.devices_of(node):
            if self._crew.is_training(node):
                self._crew.stop(self._agenda.now_s)
            self._run.end_worker(WorkerId(node, device))
            if node not in self._nodes.members:
                self._run.join(node)  # the master gave it up, and its user adds it again
