"""What became of the nodes that a run had: how much of their time trained, and what took the rest.

A node is there from the moment its agent connects until it is lost, leaves, or the run ends; one that is there and
found unfit stays, and idles. Computed from the journal alone, beside `goodput`, which says what the run did meanwhile.
The parts are disjoint and sum to what was there:

    a node of the plan, while        steps are committed for the first time      training
                                     the run recovers, or runs steps again       recovering
                                     it starts, saves, stops                     other
    any other node, or no plan       always                                      idle

Before the first plan all nodes that are there count as the plan's.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from .entries import JournalEntry
from .goodput import TimeAccount, TimeSplit
from .losses import Unfit
from .node_entries import NodeConnected, NodeLeft, NodeLost
from .plan_entries import PlanAdopted
from .run_entries import JobEnded

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHours:
    """Hours of nodes, whatever their devices; all but `there` sum to it."""

    there: float = 0.0
    training: float = 0.0
    """Of nodes in the plan, in steps that were committed for the first time."""
    recovering: float = 0.0
    """Of nodes in the plan, while nothing of a committed step made progress, or committed steps were run again."""
    idle: float = 0.0
    """Of nodes that were there and not in the plan: spare, resting, just come, unfit, or too few for any plan."""
    other: float = 0.0
    """Of nodes in the plan: starting, saving, and after the last commit."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """From then on so many nodes are there, and so many of them in the plan."""

    since_s: float
    there: int
    at_work: int


@dataclass(slots=True, kw_only=True)
class NodeAccount:
    """Adds up the nodes' time from the journal, entry by entry: O(1) each, and O(nodes) for a plan.

    What a stretch of time was is known only when no recovery is under way. Until then how many nodes there were is
    remembered; then the time of those at work is shared out as the run's own was. A value on the wire.
    """

    time: TimeAccount = field(default_factory=TimeAccount)
    _there: set[str] = field(default_factory=set)
    _unfit: set[str] = field(default_factory=set)
    _planned: set[str] | None = None
    """The nodes of the plan in force; None before the first."""
    _stretches: list[_Stretch] = field(default_factory=lambda: [_Stretch(0.0, 0, 0)])
    _shared: TimeSplit = field(default_factory=TimeSplit)
    """The time of the run that is shared out."""
    _seconds: NodeHours = field(default_factory=NodeHours)

    def apply(self, entry: JournalEntry) -> None:
        """Take the next entry into account."""
        self.time.apply(entry)
        settled = self.time.settled
        if settled is not None and settled.elapsed_s > self._shared.elapsed_s:
            self._seconds = self._share_out(settled)
            self._shared = settled
            self._forget(settled.elapsed_s)
        match entry:
            case NodeConnected():
                self._there.add(entry.node)
                self._unfit.discard(entry.node)
            case NodeLost(loss=Unfit()):
                self._unfit.add(entry.node)
            case NodeLost() | NodeLeft():
                self._there.discard(entry.node)
                self._unfit.discard(entry.node)
            case PlanAdopted():
                self._planned = set(entry.plan.nodes)
            case JobEnded():
                self._there.clear()
            case _:
                return
        self._note(entry.t_s)

    def at(self, now_s: float) -> NodeHours:
        """The hours of the first `now_s` seconds; the step in flight counts as if it will be committed."""
        seconds = self._share_out(self.time.at(now_s))
        return NodeHours(
            there=seconds.there / _HOUR_S,
            training=seconds.training / _HOUR_S,
            recovering=seconds.recovering / _HOUR_S,
            idle=seconds.idle / _HOUR_S,
            other=seconds.other / _HOUR_S,
        )

    def _note(self, now_s: float) -> None:
        working = self._there - self._unfit if self._unfit else self._there
        at_work = len(working) if self._planned is None else len(working & self._planned)
        since_s = max(now_s, self._stretches[-1].since_s)
        self._stretches.append(_Stretch(since_s, len(self._there), at_work))

    def _share_out(self, split: TimeSplit) -> NodeHours:
        """What comes to the books, in seconds, when the run's time up to the end of `split` is shared out."""
        before, books = self._shared, self._seconds
        begun_s = before.elapsed_s + split.starting_s - before.starting_s
        starting_s, started_s = self._counted(before.elapsed_s, begun_s)
        there_s, at_work_s = self._counted(begun_s, split.elapsed_s)
        length_s = split.elapsed_s - begun_s
        at_once = at_work_s / length_s if length_s > 0 else 0.0
        trained_s = at_once * (_training_s(split) - _training_s(before))
        recovered_s = at_once * (_recovering_s(split) - _recovering_s(before))
        idled_s = at_once * (split.idle_s - before.idle_s)
        return NodeHours(
            there=books.there + starting_s + there_s,
            training=books.training + trained_s,
            recovering=books.recovering + recovered_s,
            idle=books.idle + (starting_s - started_s) + (there_s - at_work_s) + idled_s,
            other=books.other + started_s + (at_work_s - trained_s - recovered_s - idled_s),
        )

    def _counted(self, start_s: float, stop_s: float) -> tuple[float, float]:
        """Seconds of all nodes there between two moments, and of those of them at work."""
        there_s = at_work_s = 0.0
        ends = [stretch.since_s for stretch in self._stretches][1:]
        for stretch, end_s in zip(self._stretches, [*ends, stop_s], strict=True):
            seconds = max(0.0, min(end_s, stop_s) - max(stretch.since_s, start_s))
            there_s += stretch.there * seconds
            at_work_s += stretch.at_work * seconds
        return there_s, at_work_s

    def _forget(self, until_s: float) -> None:
        """Drop the stretches that end before a moment."""
        del self._stretches[: bisect_right(self._stretches, until_s, lo=1, key=lambda each: each.since_s) - 1]


def _training_s(split: TimeSplit) -> float:
    return split.useful_s + split.degraded_s


def _recovering_s(split: TimeSplit) -> float:
    return split.reconfiguring_s + split.redone_s
