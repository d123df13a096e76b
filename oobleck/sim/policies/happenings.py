"""A trace as a system sees it that knows only nodes that are there, or not, and how slow the slowest is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
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
    WorkerCrashed,
)

__all__ = ["MembershipChange", "happenings"]


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
        self._here = set(trace.start)
        self._frozen: set[str] = set()
        self._cut: set[str] = set()
        self._factors: dict[str, float] = {}
        self._well = set(trace.start)
        self._crashed: set[str] = set()
        self._slowest = 1.0

    def begin(self) -> None:
        self._crashed = set()

    def take(self, index: int) -> None:
        match self._events[index]:
            case Joined(node=node):
                self._here.add(node)
                self._crashed.add(node)
            case Lost(node=node) | AgentCrashed(node=node):
                for group in (self._here, self._frozen, self._cut):
                    group.discard(node)
                self._factors.pop(node, None)
                self._crashed.add(node)
            case Frozen(node=node):
                self._frozen.add(node)
            case Thawed(node=node):
                self._frozen.discard(node)
            case Slowed(node=node, factor=factor):
                self._factors[node] = factor
            case WorkerCrashed(node=node):
                self._crashed.add(node)
            case Partitioned(nodes=nodes):
                self._cut |= self._here.intersection(nodes)
            case Healed():
                self._cut.clear()
            case MasterCrashed() | MasterFrozen() | AgentFrozen() | Noticed():
                pass

    def happening(self, t_s: float) -> MembershipChange | None:
        well = self._here - self._frozen - self._cut
        lost = (self._well - well) | (self._crashed & self._well)
        joined = (well - self._well) | (self._crashed & self._well & well)
        slowest = max((factor for node, factor in self._factors.items() if node in well), default=1.0)
        changed = lost or joined or slowest != self._slowest
        self._well, self._slowest = well, slowest
        if not changed:
            return None
        return MembershipChange(t_s=t_s, lost=tuple(sorted(lost)), joined=tuple(sorted(joined)), slowest=slowest)
