"""Plays a trace on virtual nodes: each event at its time, whatever the run is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import trio

from oobleck.control.events import AddRequested, Event
from oobleck.job import NodeSpec
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

from .cluster import VirtualCluster


class Faults:
    """What a trace has in store for a run."""

    def __init__(
        self,
        trace: Trace,
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

    def strike(self, event: TraceEvent) -> None:
        """Let one event happen now."""
        cluster = self._cluster
        match event:
            case Lost(node=node):
                cluster.lose(node)
            case Joined(node=node):
                cluster.join(node)
                self._submit(AddRequested(spec=self._spec_of(node)))
            case Frozen(node=node):
                cluster.freeze(node)
            case Thawed(node=node):
                cluster.thaw(node)
            case Slowed(node=node, factor=factor):
                cluster.slow_down(node, factor)
            case WorkerCrashed(node=node, device=device):
                cluster.crash_worker(node, device)
            case ForkServerCrashed(node=node):
                cluster.crash_fork_server(node)
            case AgentCrashed(node=node):
                cluster.crash_agent(node)
            case AgentFrozen(node=node, frozen_s=frozen_s):
                cluster.freeze_agent(node, frozen_s)
            case MasterCrashed(down_s=down_s):
                self._crash_master(down_s)
            case MasterFrozen(frozen_s=frozen_s):
                self._freeze_master(frozen_s)
            case Partitioned(nodes=nodes, spares_master=True):
                cluster.cut_links(nodes)
            case Partitioned(nodes=nodes):
                cluster.separate(nodes)
            case Healed():
                cluster.heal()
            case Noticed(node=node):
                cluster.notice(node)
            case _:
                assert_never(event)
