"""A trace as a system sees it that knows only present nodes and the slowest one's speed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from oobleck.sim.costs import Activity, Outcome
from oobleck.sim.trace import ClusterState, Gone, Joined, Trace, WorkerCrashed

from .ledger import Ledger
from .throughput import Throughput


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    t_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    """A node whose process restarted is in both."""
    slowest: float = 1.0
    """The greatest factor of a present node, for which synchronous training waits."""


class PolicyRun(ABC):
    def __init__(self, trace: Trace, ledger: Ledger, *, start_s: float) -> None:
        self.ledger = ledger
        self._trace = trace
        self._here = dict.fromkeys(trace.start)  # present nodes, in the order in which they joined
        self._slowest = 1.0
        self._waiting = Activity.STARTING
        self._up_s = start_s  # when training begins or resumes

    def play(self, *, policy: str, about: str, throughput: Throughput, seed: int) -> Outcome:
        """Play the trace, and return the accounts as an outcome."""
        self.play_through()
        best_s = throughput.step_s(max(count for _, count in self._trace.counts))
        max_steps = int(self._trace.duration_s / best_s) if best_s else 0
        return self.ledger.outcome(policy=policy, about=about, seed=seed, max_steps=max_steps)

    def play_through(self) -> None:
        """Play the trace; O(events · nodes that change)."""
        for happening in happenings(self._trace):
            self._move_to(happening.t_s)
            for node in happening.lost:
                # A node whose process restarted is in both, and moves to the end of the order.
                self._here.pop(node, None)
            self._here.update(dict.fromkeys(happening.joined))
            self._happen(happening)
        self._move_to(self._trace.duration_s)

    @abstractmethod
    def pace_s(self) -> float | None:
        """Return the seconds of a step now; None for too few nodes."""

    @abstractmethod
    def _train(self, t_s: float, length_s: float, step_s: float) -> None:
        """Train until `t_s`, for `length_s`, at one pace."""

    @abstractmethod
    def _happen(self, happening: MembershipChange) -> None:
        """React to nodes that have joined, left, or become slower."""

    def _move_to(self, t_s: float) -> None:
        step_s = self.pace_s()
        if step_s is None:
            self.ledger.spend(t_s, Activity.IDLE)
            return
        self.ledger.spend(min(t_s, self._up_s), self._waiting)
        length_s = t_s - self.ledger.now_s
        if length_s > 0:
            self._train(t_s, length_s, step_s)

    def _pause(self, t_s: float, pause_s: float) -> None:
        self._waiting, self._up_s = Activity.RECOVERING, t_s + pause_s


def happenings(trace: Trace) -> Iterator[MembershipChange]:
    """Yield the changes of a trace; O(events)."""
    # Frozen and cut-off nodes count as absent. Notices, and faults of masters or frozen agents, change nothing.
    cluster, slowest = ClusterState(trace.start), 1.0
    well = cluster.well
    for t_s, events in groupby(trace.events, key=lambda event: event.t_s):
        restarted: set[str] = set()
        for event in events:
            cluster.apply(event)
            if isinstance(event, Joined | Gone | WorkerCrashed):
                restarted.add(event.node)
        before, well = (well, slowest), cluster.well
        # Only a node that was present can restart.
        restarted &= before[0]
        lost, joined = (before[0] - well) | restarted, (well - before[0]) | (restarted & well)
        slowest = max((factor for node, factor in cluster.factors.items() if node in well), default=1.0)
        if lost or joined or slowest != before[1]:
            yield MembershipChange(t_s=t_s, lost=tuple(sorted(lost)), joined=tuple(sorted(joined)), slowest=slowest)
