"""Where the time of a run went: the states that partition it, and the goodput that follows from them.

The states are disjoint and their seconds sum to the elapsed time. This is the one place that says how; the
dashboard, the summary and the simulator all ask it. It knows nothing but journal entries.

    from                       until                        counts as
    the start                  the first step begins        starting
    a commit                   the next commit              useful, or redone if that step was committed before
      within it                a recovery's stall           reconfiguring
      within it, new plan      the step begins              reconfiguring
    a plan without pipelines   the next plan                idle
    the last commit            the end                      stopping, or reconfiguring if that never ended
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .entries import JournalEntry
from .plan_entries import PlanAdopted, RecoveryDone, RecoveryStarted
from .run_entries import JobEnded
from .step_entries import StepDone, StepsDone


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSplit:
    """Seconds that a run spent in each state; every moment belongs to one."""

    starting_s: float = 0.0
    useful_s: float = 0.0
    """Steps committed for the first time, at the speed of the best plan."""
    redone_s: float = 0.0
    """Steps that had been committed before."""
    reconfiguring_s: float = 0.0
    degraded_s: float = 0.0
    """The part of useful time that the best plan for the nodes held would have saved."""
    idle_s: float = 0.0
    """No plan: too few nodes."""
    checkpoint_s: float = 0.0
    stopping_s: float = 0.0
    """After the last commit: a step that was never finished, saving, ending the workers."""

    @property
    def elapsed_s(self) -> float:
        return self.useful_s + math.fsum(self.downtime_s.values())

    @property
    def goodput(self) -> float:
        """Useful over elapsed time, 0 to 1; 0 before any time has passed."""
        return self.useful_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def downtime_s(self) -> dict[str, float]:
        """Seconds of every state but the useful one, by its name."""
        return {
            "starting": self.starting_s,
            "redone": self.redone_s,
            "reconfiguring": self.reconfiguring_s,
            "degraded": self.degraded_s,
            "idle": self.idle_s,
            "checkpoint": self.checkpoint_s,
            "stopping": self.stopping_s,
        }

    def plus(
        self,
        *,
        starting_s: float = 0.0,
        useful_s: float = 0.0,
        redone_s: float = 0.0,
        reconfiguring_s: float = 0.0,
        degraded_s: float = 0.0,
        idle_s: float = 0.0,
        stopping_s: float = 0.0,
    ) -> TimeSplit:
        """The split with these seconds added. Each part by its name: a journal of months has millions of steps."""
        return TimeSplit(
            starting_s=self.starting_s + starting_s,
            useful_s=self.useful_s + useful_s,
            redone_s=self.redone_s + redone_s,
            reconfiguring_s=self.reconfiguring_s + reconfiguring_s,
            degraded_s=self.degraded_s + degraded_s,
            idle_s=self.idle_s + idle_s,
            checkpoint_s=self.checkpoint_s,
            stopping_s=self.stopping_s + stopping_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """The time between two commits."""

    length_s: float
    redone: bool
    degraded_share: float


@dataclass(slots=True, kw_only=True)
class TimeAccount:
    """Adds up a run's time from its journal, entry by entry, in O(1) each.

    A recovery's stall is known only when the recovery is over, and then the step that it interrupted may be
    committed already. So intervals stay open from the start of a recovery to its end. A value on the wire.
    """

    _settled: TimeSplit = field(default_factory=TimeSplit)
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
    """The part of the time after the mark that is known to be a stall."""
    _plan_changed: bool = False
    _degraded_share: float = 0.0

    def apply(self, entry: JournalEntry) -> None:
        """Take the next entry into account; entries that take no time change nothing."""
        match entry:
            case StepDone():
                self._commit(entry.t_s, entry.record.step, entry.record.duration_s)
            case StepsDone():
                self._commit(entry.t_s, entry.record.step, entry.record.duration_s * entry.num_steps)
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
        """The split up to the newest moment before which nothing can change any more; None while a recovery lasts."""
        return None if self._open else self._settled

    def at(self, now_s: float, *, ended: bool = False) -> TimeSplit:
        """The split of the first `now_s` seconds; the step in flight counts as if it will be committed."""
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
            stalled_since_s = min(now_s, max(self._mark_s, min(self._recovering.values())))
            reconfiguring_s = now_s - stalled_since_s
        else:
            reconfiguring_s = min(self._stall_due_s, now_s - self._mark_s)
        split = split.plus(reconfiguring_s=reconfiguring_s)
        remaining_s = now_s - self._mark_s - reconfiguring_s
        if not self._has_begun:
            return split.plus(starting_s=remaining_s)
        return split.plus(stopping_s=remaining_s) if ended else self._add_work(split, remaining_s)

    def _add_work(self, split: TimeSplit, length_s: float) -> TimeSplit:
        return _add(split, _Interval(length_s=length_s, redone=False, degraded_share=self._degraded_share))

    def _commit(self, t_s: float, step: int, duration_s: float) -> None:
        """Account for one step, or for several at once, that took so long all in all."""
        length_s = max(0.0, t_s - self._mark_s)
        worked_s = min(length_s, duration_s)
        if not self._has_begun:
            self._settled = self._settled.plus(starting_s=length_s - worked_s)
            self._has_begun = True
            length_s = worked_s
        elif self._plan_changed and not self._recovering and not self._stall_due_s:
            # A plan that follows no loss (a node joined): what the step itself does not explain is the change.
            self._stall_due_s = length_s - worked_s
        stall_s = min(self._stall_due_s, length_s)
        if stall_s:
            self._settled = self._settled.plus(reconfiguring_s=stall_s)
        self._open.append(
            _Interval(
                length_s=length_s - stall_s,
                redone=step <= self._newest_step,
                degraded_share=self._degraded_share,
            )
        )
        self._newest_step = max(self._newest_step, step)
        self._mark_s = max(self._mark_s, t_s)
        self._stall_due_s -= stall_s
        self._plan_changed = False
        self._settle()

    def _recover(self, entry: RecoveryDone) -> None:
        """Move the stall out of the intervals since the recovery began, then out of the time to come."""
        stall_s = entry.stall_s
        for index, interval in enumerate(self._open):
            taken_s = min(stall_s, interval.length_s)
            stall_s -= taken_s
            self._settled = self._settled.plus(reconfiguring_s=taken_s)
            self._open[index] = _Interval(
                length_s=interval.length_s - taken_s, redone=interval.redone, degraded_share=interval.degraded_share
            )
        uncounted_s = max(0.0, entry.t_s - self._mark_s)
        self._stall_due_s = min(self._stall_due_s + stall_s, uncounted_s)
        self._recovering = {g: t_s for g, t_s in self._recovering.items() if g > entry.generation}
        self._settle()

    def _adopt(self, entry: PlanAdopted) -> None:
        is_idle = not entry.plan.pipelines
        if is_idle != self._idle:
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
