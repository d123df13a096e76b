"""A trace as a system sees it that knows only nodes that are there, or not, and how slow the slowest is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oobleck.sim.trace import ClusterState, Gone, Joined, Trace, WorkerCrashed


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """Everything that happens at one moment."""

    t_s: float
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    """A node may be among both: a process of its died, and it is there."""
    slowest: float = 1.0
    """The greatest factor of a node that is there: in synchronous training all wait for it."""


def happenings(trace: Trace) -> Iterator[MembershipChange]:
    """Read a trace; O(events).

    What is frozen or cut off is not there. Notices are nothing, and so is what happens to masters, or to agents that
    are only stopped: workers train on.
    """
    view = _View(trace)
    index = 0
    while index < len(trace.events):
        t_s = trace.events[index].t_s
        view.begin()
        while index < len(trace.events) and trace.events[index].t_s == t_s:
            view.take(index)
            index += 1
        happening = view.happening(t_s)
        if happening is not None:
            yield happening


class _View:
    def __init__(self, trace: Trace) -> None:
        self._events = trace.events
        self._cluster = ClusterState(trace.start)
        self._well = self._cluster.well
        self._restarted: set[str] = set()
        self._slowest = 1.0

    def begin(self) -> None:
        self._restarted = set()

    def take(self, index: int) -> None:
        event = self._events[index]
        self._cluster.apply(event)
        if isinstance(event, Joined | Gone | WorkerCrashed):
            self._restarted.add(event.node)

    def happening(self, t_s: float) -> MembershipChange | None:
        well = self._cluster.well
        lost = (self._well - well) | (self._restarted & self._well)
        joined = (well - self._well) | (self._restarted & self._well & well)
        slowest = max((factor for node, factor in self._cluster.factors.items() if node in well), default=1.0)
        changed = lost or joined or slowest != self._slowest
        self._well, self._slowest = well, slowest
        if not changed:
            return None
        return MembershipChange(t_s=t_s, lost=tuple(sorted(lost)), joined=tuple(sorted(joined)), slowest=slowest)
