"""Plays a failure trace on a real run: each event at its time, by requests to the run's master.

Events that the simulator applies to virtual nodes (`sim/cluster/run.py`) apply to processes here: those of a lost node
are killed, those of a frozen node are stopped, the workers of a slow node are stopped and continued in turn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, assert_never

from oobleck.errors import ConfigError, OobleckError
from oobleck.runtime.control_client import (
    AddRequest,
    ControlRequest,
    KillRequest,
    NoActiveRun,
    SignalRequest,
    SlowRequest,
)
from oobleck.sim import trace as traces


class Target(Protocol):
    """A run to play a trace on."""

    def ask(self, asked: ControlRequest) -> Mapping[str, object]:
        """Ask the run's master. Raises NoActiveRun if there is none, and the error that it answers with."""

    def freeze_master(self, frozen_s: float) -> None:
        """Stop the run's master for a while."""

    def crash_master(self, down_s: float) -> None:
        """Kill the run's master, and start it again `down_s` seconds later; return once it listens."""

    def wait_until(self, at_s: float) -> bool:
        """Wait until `time.monotonic()` is `at_s`; return whether the run continues."""


def name_nodes(trace: traces.Trace, here: Sequence[str], spares: Sequence[str] = ()) -> dict[str, str]:
    """Return the node of the run that stands for each node of a trace.

    They match by name if the run has all nodes that the trace begins with, or else by their order. `spares` are nodes
    that may join. Raises ConfigError if the run has too few.
    """
    if set(trace.start) <= set(here):
        return {node: node for node in trace.nodes}
    more = [node for node in trace.nodes if node not in trace.start]
    for words, wanted, there in (("begins with", trace.start, here), ("adds", more, spares)):
        if len(wanted) > len(there):
            raise ConfigError(f"the trace {words} {len(wanted)} nodes, and the run has {len(there)} for that")
    return dict(zip(trace.start, here, strict=False)) | dict(zip(more, spares, strict=False))


def not_played(trace: traces.Trace) -> str | None:
    """Describe the events of a trace that cannot be played; None if all can."""
    counts = Counter(event.kind for event in trace.events if isinstance(event, traces.Partitioned | traces.Healed))
    if not counts:
        return None
    kinds = " and ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
    return f"{kinds} will not be played: a run has no right to cut a network"


class Player:
    """Plays a trace once."""

    def __init__(
        self, target: Target, names: Mapping[str, str], *, speedup: float, tell: Callable[[str], None]
    ) -> None:
        """`tell` takes a line for each event; times of the trace are divided by `speedup`."""
        self._target = target
        self._names = names
        self._speedup = speedup
        self._tell = tell

    def play(self, trace: traces.Trace) -> bool:
        """Play a trace from now on; return False if the run ends before it."""
        began_s = time.monotonic()
        for event in trace.events:
            # Times count from the beginning, so that a slow event delays none after it.
            if not self._target.wait_until(began_s + event.t_s / self._speedup):
                return False
            try:
                done = self._do(event)
            except NoActiveRun:
                return False
            except OobleckError as error:  # the trace continues
                done = f"{event.kind} is refused: {error}"
            self._tell(f"{event.t_s:g} s: {done}")
        return self._target.wait_until(began_s + trace.duration_s / self._speedup)

    def _do(self, event: traces.TraceEvent) -> str:
        """Apply an event, and describe it."""
        match event:
            case traces.Partitioned() | traces.Healed():
                return f"{event.kind} is not played"
            case traces.MasterCrashed(down_s=down_s):
                self._target.crash_master(down_s / self._speedup)
                return f"the master was killed, and started again after {down_s / self._speedup:g} s"
            case traces.MasterFrozen(frozen_s=frozen_s):
                self._target.freeze_master(frozen_s / self._speedup)
                return f"the master was stopped for {frozen_s / self._speedup:g} s"
            case _:
                return self._strike_node(event, self._names[event.node])

    def _strike_node(self, event: traces.NodeEvent, node: str) -> str:
        match event:
            case traces.Lost():
                self._target.ask(KillRequest(node=node))
                return f"all processes of {node} were killed"
            case traces.Joined():
                self._target.ask(AddRequest(node=node))
                return f"{node} was added"
            case traces.Frozen():
                return self._signal(node, "STOP", "*", "was frozen")
            case traces.Thawed():
                return self._signal(node, "CONT", "*", "was thawed")
            case traces.Slowed(factor=factor):
                self._target.ask(SlowRequest(node=node, factor=factor))
                return f"{node} takes {factor:g} times as long"
            case traces.WorkerCrashed(device=device):
                return self._signal(node, "KILL", f"worker{device}", f"lost the worker of device {device}")
            case traces.AgentFrozen(frozen_s=frozen_s):
                self._signal(node, "STOP", "agent", "")
                self._target.wait_until(time.monotonic() + frozen_s / self._speedup)
                return self._signal(node, "CONT", "agent", f"had its agent stopped for {frozen_s / self._speedup:g} s")
            case traces.ForkServerCrashed():
                return self._signal(node, "KILL", "fork_server", "lost its fork server")
            case traces.AgentCrashed():
                return self._signal(node, "KILL", "agent", "lost its agent")
            case traces.Noticed():
                return self._signal(node, "TERM", "agent", "was given notice")
            case _:
                assert_never(event)

    def _signal(self, node: str, signal: str, processes: str, done: str) -> str:
        self._target.ask(SignalRequest(node=node, signal=signal, processes=processes))
        return f"{node} {done}"
