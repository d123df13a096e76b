"""What a trace says, made to happen to the nodes of a sweep, and when the master notices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from oobleck.control.events import MessageReceived
from oobleck.control.journal import ConnectionLost, NodeLost, Silent
from oobleck.control.nodes import are_most, patience_s
from oobleck.control.protocol import Heartbeat
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId
from oobleck.sim import trace

from .job_run import JobRun

_CONTROL = ControlSpec()


class Faults:
    """Plays a trace's events on a run."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._nodes, self._crew, self._agenda, self._costs = run.nodes, run.crew, run.agenda, run.costs

    def happen(self, event: trace.TraceEvent) -> None:
        """Let an event happen now."""
        changed = self._nodes.apply(event)
        match event:
            case trace.Gone(node=node):
                self._lose(node)
            case trace.Joined(node=node):
                self._run.join(node)
            case trace.Frozen() | trace.Partitioned():
                for node in changed:
                    self._fall_silent(node)
            case trace.Thawed() | trace.Healed():
                self._be_heard(changed)
            case trace.Slowed(node=node, factor=factor):
                self._crew.set_factor(node, factor, self._agenda.now_s)
                self._run.report_later()
            case trace.WorkerCrashed(node=node, device=device):
                self._crash(node, device)
            case trace.AgentFrozen(node=node, frozen_s=frozen_s):
                self._freeze_agent(node, frozen_s)
            case trace.ForkServerCrashed():
                pass  # nothing waits for it, unless a worker ends within seconds of it
            case trace.MasterFrozen(frozen_s=down_s) | trace.MasterCrashed(down_s=down_s):
                self._agenda.blind_until_s = max(self._agenda.blind_until_s, self._agenda.now_s + down_s)
            case trace.Noticed(node=node):
                self._agenda.when_seen(self._agenda.now_s, lambda: self._run.drain(node))
            case _:
                assert_never(event)

    def _lose(self, node: str) -> None:
        self._crew.forget(node)
        self._go_silent(node, self._costs.detect_s, is_seen=True)

    def _fall_silent(self, node: str) -> None:
        if node not in self._nodes.silent:
            self._go_silent(node, self._costs.lease_s, is_seen=False)

    def _go_silent(self, node: str, notice_s: float, *, is_seen: bool) -> None:
        """A node stops; what waits for it stops with it; the coordinator notices after a while.

        `is_seen`: its connection breaks with it; else only its silence shows it.
        """
        if node in self._nodes.members and not self._agenda.is_blind:
            self._run.feed(MessageReceived(node=node, message=Heartbeat(sequence=0)))  # its last
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
        """Whether the master suspects itself: most nodes have been silent since then, but not for too long."""
        nodes = self._nodes
        silent = nodes.members.keys() & (nodes.mute.keys() | (nodes.silent.keys() & nodes.stuck))
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
        """Nodes that were frozen or cut off are well again: they continue, or join again if they were given up."""
        for node in nodes:
            if node in self._nodes.stuck:
                continue
            self._nodes.silent.pop(node, None)
            if self._nodes.is_well(node):
                self._run.answer_from(node)
            else:
                self._run.join(node)
        if self._run.is_undisturbed and not any(map(self._crew.is_training, self._nodes.silent)):
            self._crew.go_on(self._agenda.now_s)

    def _crash(self, node: str, device: int) -> None:
        if self._nodes.is_well(node) and self._run.log.is_planned and device in self._run.kinds.devices_of(node):
            if self._crew.is_training(node):
                self._crew.stop(self._agenda.now_s)
            self._run.end_worker(WorkerId(node, device))
            if node not in self._nodes.members:
                self._run.join(node)  # given up; its user takes it back
