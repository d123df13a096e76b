"""What the time of a run, and of its nodes, went into: the states that partition it, and the goodput.

The states of a run are disjoint, and their seconds sum to the elapsed time:

    from                       until                        counts as
    the start                  the first step begins        starting
    a commit                   the next commit              useful, or redone if that step was committed before
      within it                a recovery's stall           reconfiguring
      within it, new plan      the step begins              reconfiguring
    a plan without pipelines   the next plan                idle
    the last commit            the end                      stopping, or reconfiguring if that never ended

A script's saves count as its commits, and its generations as plans: the first save of a generation ends what its ranks
did not spend on steps.

A node is present from the moment its agent connects until it is lost, leaves, or the run ends; one that is found unfit
stays, and idles. The parts of its time are disjoint too, and sum to the time for which it was present:

    a node of the plan, while        steps are committed for the first time      training
                                     the run recovers, or runs steps again       recovering
                                     it starts, saves, stops                     other
    any other node, or no plan       always                                      idle

Before the first plan all present nodes count as the plan's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, field, replace

from .entries import JournalEntry
from .losses import Unfit
from .node_entries import NodeConnected, NodeLeft, NodeLost
from .plan_entries import PlanAdopted, RecoveryDone, RecoveryStarted
from .rank_entries import StepsSaved
from .run_entries import JobEnded
from .step_entries import StepDone, StepsDone

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Seconds that a run spent in each state."""

    starting_s: float = 0.0
    useful_s: float = 0.0
    """Steps committed for the first time, at the speed of the best plan."""
    redone_s: float = 0.0
    reconfiguring_s: float = 0.0
    degraded_s: float = 0.0
    """The part of useful time that the best plan for the nodes held would have saved."""
    idle_s: float = 0.0
    """Too few nodes for any plan."""
    checkpoint_s: float = 0.0
    stopping_s: float = 0.0
    """After the last commit: an unfinished step, saving, ending the workers."""

    @property
    def elapsed_s(self) -> float:
        # Not sum(), which rounds in another way since Python 3.12: a journal gives the same numbers everywhere.
        return self.useful_s + math.fsum(self.downtime_s.values())

    @property
    def goodput(self) -> float:
        """Useful over elapsed time, 0 to 1; 0 before any time has passed."""
        return self.useful_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def downtime_s(self) -> dict[str, float]:
        """Seconds of every state but the useful one, keyed by state."""
        return {
            "starting": self.starting_s,
            "redone": self.redone_s,
            "reconfiguring": self.reconfiguring_s,
            "degraded": self.degraded_s,
            "idle": self.idle_s,
            "checkpoint": self.checkpoint_s,
            "stopping": self.stopping_s,
        }

    def plus(self, **seconds: float) -> TimeSplit:
        """Return the split with these seconds added, by the names of its fields."""
        return replace(self, **{name: getattr(self, name) + more_s for name, more_s in seconds.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    length_s: float
    redone: bool
    degraded_share: float


@dataclass(slots=True, kw_only=True)
class TimeAccount:
    """Adds up a run's time from its journal, in O(1) an entry. A value on the wire."""

    _settled: TimeSplit = field(default_factory=TimeSplit)
    # A recovery's stall is known only when the recovery is over. By then the step that it interrupted may be committed,
    # so intervals stay open from the start of a recovery to its end.
    _open: list[_Interval] = field(default_factory=list)
    _mark_s: float = 0.0
    """Everything before is in `_settled` or `_open`."""
    _newest_step: int = 0
    _has_begun: bool = False
    _idle: bool = False
    _ended: bool = False
    _recovering: dict[int, float] = field(default_factory=dict)
    """The start of each recovery that is not over, keyed by its generation."""
    _stall_due_s: float = 0.0
    """How much of the time after the mark is known to be a stall."""
    _plan_changed: bool = False
    _saved_in: int = 0
    """The generation of a script's newest saved steps."""
    _degraded_share: float = 0.0

    def apply(self, entry: JournalEntry) -> None:
        match entry:
            case StepDone():
                self._commit(entry.t_s, entry.record.step, entry.record.duration_s)
            case StepsDone():
                self._commit(entry.t_s, entry.record.step, entry.record.duration_s * entry.num_steps)
            case StepsSaved():
                self._save(entry)
            case RecoveryStarted():
                self._recovering.setdefault(entry.generation, entry.t_s)
            case RecoveryDone():
                self._recover(entry)
            case PlanAdopted():
                self._adopt(entry)
            case JobEnded():
                self._settled = self.at(entry.t_s, ended=True)
                self._open.clear()
                self._ended = True
            case _:
                pass

    @property
    def settled(self) -> TimeSplit | None:
        """The split up to the moment before which nothing can change any more; None while a recovery lasts."""
        return None if self._open else self._settled

    def at(self, now_s: float, *, ended: bool = False) -> TimeSplit:
        """Return the split of the first `now_s` seconds; the step in flight counts as committed."""
        split = self._settled
        for interval in self._open:
            split = _add(split, interval)
        if self._ended or now_s <= self._mark_s:
            return split
        if self._idle:
            return split.plus(idle_s=now_s - self._mark_s)
        if not self._has_begun and not self._recovering:
            return split.plus(starting_s=now_s - self._mark_s)
        if self._recovering:
            # Until its end is known, all time since the first recovery began counts as its stall.
            stalled_since_s = min(now_s, max(self._mark_s, min(self._recovering.values())))
            reconfiguring_s = now_s - stalled_since_s
        else:
            reconfiguring_s = min(self._stall_due_s, now_s - self._mark_s)
        split = split.plus(reconfiguring_s=reconfiguring_s)
        remaining_s = now_s - self._mark_s - reconfiguring_s
        if not self._has_begun:
            return split.plus(starting_s=remaining_s)
        if ended:
            return split.plus(stopping_s=remaining_s)
        return _add(split, _Interval(length_s=remaining_s, redone=False, degraded_share=self._degraded_share))

    def _commit(self, t_s: float, step: int, duration_s: float) -> None:
        """Account for one step, or for several at once that took `duration_s` together."""
        length_s = max(0.0, t_s - self._mark_s)
        worked_s = min(length_s, duration_s)
        if not self._has_begun:  # the first step itself is not a part of the start
            self._settled = self._settled.plus(starting_s=length_s - worked_s)
            self._has_begun = True
            length_s = worked_s
        elif self._plan_changed and not self._recovering and not self._stall_due_s:
            # The plan follows no loss (a node joined): time that the step does not explain went into the change.
            self._stall_due_s = length_s - worked_s
        stall_s = min(self._stall_due_s, length_s)
        if stall_s:
            self._settled = self._settled.plus(reconfiguring_s=stall_s)
        is_redone = step <= self._newest_step
        self._open.append(_Interval(length_s=length_s - stall_s, redone=is_redone, degraded_share=self._degraded_share))
        self._newest_step = max(self._newest_step, step)
        self._mark_s = max(self._mark_s, t_s)
        self._stall_due_s -= stall_s
        self._plan_changed = False
        self._settle()

    def _save(self, entry: StepsSaved) -> None:
        """Account for a script's steps, of which the first may have been saved before."""
        # What the ranks' own clock does not explain went into a restart.
        self._plan_changed = self._plan_changed or entry.generation != self._saved_in
        self._saved_in = entry.generation
        num_again = min(max(0, self._newest_step - entry.first_step + 1), entry.num_steps)
        again_s = entry.worked_s * num_again / entry.num_steps
        if 0 < num_again < entry.num_steps:
            self._commit(entry.t_s - entry.worked_s + again_s, entry.first_step + num_again - 1, again_s)
            self._commit(entry.t_s, entry.step, entry.worked_s - again_s)
        else:
            self._commit(entry.t_s, entry.step, entry.worked_s)

    def _recover(self, entry: RecoveryDone) -> None:
        """Take the stall out of the intervals since the recovery began, then out of the time to come."""
        stall_s = entry.stall_s
        for index, interval in enumerate(self._open):
            taken_s = min(stall_s, interval.length_s)
            stall_s -= taken_s
            self._settled = self._settled.plus(reconfiguring_s=taken_s)
            self._open[index] = replace(interval, length_s=interval.length_s - taken_s)
        # The rest of the stall lies between the last commit and now, and is taken from the interval to come.
        uncounted_s = max(0.0, entry.t_s - self._mark_s)
        self._stall_due_s = min(self._stall_due_s + stall_s, uncounted_s)
        # The end of a recovery is also that of earlier ones, which it has overtaken.
        self._recovering = {g: t_s for g, t_s in self._recovering.items() if g > entry.generation}
        self._settle()

    def _adopt(self, entry: PlanAdopted) -> None:
        is_idle = not entry.plan.pipelines
        if is_idle != self._idle:  # idle time begins or ends here, so nothing before it may stay open
            self._settled = self.at(entry.t_s)
            self._open.clear()
            self._recovering.clear()
            self._mark_s = max(self._mark_s, entry.t_s)
            self._idle = is_idle
        self._plan_changed = True
        best_s = entry.best_step_s
        self._degraded_share = max(0.0, 1.0 - best_s / entry.predicted_step_s) if best_s is not None else 0.0

    def _settle(self) -> None:
        if not self._recovering:
            for interval in self._open:
                self._settled = _add(self._settled, interval)
            self._open.clear()


def _add(split: TimeSplit, interval: _Interval) -> TimeSplit:
    if interval.redone:
        return split.plus(redone_s=interval.length_s)
    degraded_s = interval.length_s * interval.degraded_share
    return split.plus(useful_s=interval.length_s - degraded_s, degraded_s=degraded_s)


# --- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHours:
    """Hours of nodes, however many devices they have; the others sum to `there`."""

    there: float = 0.0
    training: float = 0.0
    """Nodes of the plan, in steps that were committed for the first time."""
    recovering: float = 0.0
    """Nodes of the plan, while no committed step made progress, or committed steps ran again."""
    idle: float = 0.0
    """Present nodes outside the plan: spare, resting, just joined, unfit, or too few for any plan."""
    other: float = 0.0
    """Nodes of the plan, starting, saving, and after the last commit."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """How many nodes are present from `since_s` on, and how many of them are in the plan."""

    since_s: float
    there: int
    at_work: int


@dataclass(slots=True, kw_only=True)
class NodeAccount:
    """Adds up the nodes' time from the journal: O(1) an entry, and O(nodes) for a plan. A value on the wire."""

    time: TimeAccount = field(default_factory=TimeAccount)
    _there: set[str] = field(default_factory=set)
    _unfit: set[str] = field(default_factory=set)
    _planned: set[str] | None = None
    """The nodes of the plan in force; None before the first."""
    # What a stretch of time was is known only when no recovery is under way. Until then stretches keep the numbers of
    # nodes; then the time of those at work is shared out as the run's own was.
    _stretches: list[_Stretch] = field(default_factory=lambda: [_Stretch(0.0, 0, 0)])
    _shared: TimeSplit = field(default_factory=TimeSplit)
    """The time of the run that is shared out so far."""
    _seconds: NodeHours = field(default_factory=NodeHours)

    def apply(self, entry: JournalEntry) -> None:
        self.time.apply(entry)
        settled = self.time.settled
        if settled is not None and settled.elapsed_s > self._shared.elapsed_s:
            self._seconds = self._share_out(settled)
            self._shared = settled
            # The stretch that lasts at that moment stays: it counts for the time that follows as well.
            first_kept = bisect_right(self._stretches, settled.elapsed_s, lo=1, key=lambda each: each.since_s) - 1
            del self._stretches[:first_kept]
        match entry:
            case NodeConnected():
                self._there.add(entry.node)
                self._unfit.discard(entry.node)
            # Before the other losses, because an unfit node stays present, and idles.
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
        """Return the hours of the first `now_s` seconds; the step in flight counts as committed."""
        seconds = asdict(self._share_out(self.time.at(now_s)))
        return NodeHours(**{part: each_s / _HOUR_S for part, each_s in seconds.items()})

    def _note(self, now_s: float) -> None:
        working = self._there - self._unfit if self._unfit else self._there
        at_work = len(working) if self._planned is None else len(working & self._planned)
        since_s = max(now_s, self._stretches[-1].since_s)
        self._stretches.append(_Stretch(since_s, len(self._there), at_work))

    def _share_out(self, split: TimeSplit) -> NodeHours:
        """Return the seconds of each part once the run's time up to the end of `split` is shared out."""
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
        """Return the seconds of all present nodes between two moments, and of those at work."""
        there_s = at_work_s = 0.0
        ends = [stretch.since_s for stretch in self._stretches][1:]
        for stretch, end_s in zip(self._stretches, [*ends, stop_s], strict=True):
            seconds = max(0.0, min(end_s, stop_s) - max(stretch.since_s, start_s))
            there_s += stretch.there * seconds
            at_work_s += stretch.at_work * seconds
        return there_s, at_work_s


def _training_s(split: TimeSplit) -> float:
    return split.useful_s + split.degraded_s


def _recovering_s(split: TimeSplit) -> float:
    return split.reconfiguring_s + split.redone_s
