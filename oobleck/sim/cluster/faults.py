"""Plays a trace on virtual nodes: each event at its time, whatever the run is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import trio

from oobleck.control.events import AddRequested, Event
from oobleck.job import NodeSpec
from oobleck.sim import trace as traces

from .cluster import VirtualCluster


class Faults:
    """What a trace has in store for a run."""

    def __init__(
        self,
        trace: traces.Trace,
        cluster: VirtualCluster,
        *,
        spec_of: Callable[[str], NodeSpec],
        submit: Callable[[Event], None],
        crash_master: Callable[[float], None],
        freeze_master: Callable[[float], None],
    ) -> None:
        """`submit` feeds the master, as its user would.

        `crash_master` and `freeze_master` take the seconds until it is started again, or continues.
        """
        self._trace = trace
        self._cluster = cluster
        self._spec_of = spec_of
        self._submit = submit
        self._crash_master = crash_master
        self._freeze_master = freeze_master

    async def play(self) -> None:
        """Return at the trace's end. Seconds count from the beginning of the simulation."""
        for event in self._trace.events:
            await trio.sleep_until(event.t_s)
            self.strike(event)
        await trio.sleep_until(self._trace.duration_s)

    def strike(self, event: traces.TraceEvent) -> None:
        """Let one event happen now."""
        cluster = self._cluster
        match event:
            case traces.Lost(node=node):
                cluster.lose(node)
            case traces.Joined(node=node):
                cluster.join(node)
                self._submit(AddRequested(spec=self._spec_of(node)))
            case traces.Frozen(node=node):
                cluster.freeze(node)
            case traces.Thawed(node=node):
                cluster.thaw(node)
            case traces.Slowed(node=node, factor=factor):
                cluster.slow_down(node, factor)
            case traces.WorkerCrashed(node=node, device=device):
                cluster.crash_worker(node, device)
            case traces.ForkServerCrashed(node=node):
                cluster.crash_fork_server(node)
            case traces.AgentCrashed(node=node):
                cluster.crash_agent(node)
            case traces.AgentFrozen(node=node, frozen_s=frozen_s):
                cluster.freeze_agent(node, frozen_s)
            case traces.MasterCrashed(down_s=down_s):
                self._crash_master(down_s)
            case traces.MasterFrozen(frozen_s=frozen_s):
                self._freeze_master(frozen_s)
            case traces.Partitioned(nodes=nodes, spares_master=True):
                cluster.cut_links(nodes)
            case traces.Partitioned(nodes=nodes):
                cluster.separate(nodes)
            case traces.Healed():
                cluster.heal()
            case traces.Noticed(node=node):
                cluster.notice(node)
            case _:
                assert_never(event)
