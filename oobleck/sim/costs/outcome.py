"""What a simulated run came to: its summary, and what it did when. The same for every policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from oobleck.control.journal import JournalEntry, PlanAdopted, StepDone, StepsDone, Summary, summarize


class Activity(StrEnum):
    """What a run does for a while."""

    STARTING = "starting"
    TRAINING = "training"
    REDOING = "redoing"
    """Steps that had been done before, and were lost."""
    RECOVERING = "recovering"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"
    """Too few nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which a run does one thing at one pace."""

    start_s: float
    stop_s: float
    activity: Activity
    samples_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One policy's run over a trace."""

    policy: str
    about: str
    """The policy in a sentence, with its source."""
    summary: Summary
    stretches: tuple[Stretch, ...]
    """All of the time, in order."""
    journal: tuple[JournalEntry, ...] = ()
    """Of policies whose decisions are the coordinator's."""

    @property
    def samples_per_s(self) -> float:
        """Committed samples over the whole time."""
        return self.summary.samples_committed / self.summary.elapsed_s if self.summary.elapsed_s else 0.0


def outcome_of_journal(journal: Iterable[JournalEntry], *, policy: str, about: str) -> Outcome:
    """Read a run's journal; O(entries)."""
    entries = tuple(journal)
    summary = summarize(entries)
    return Outcome(
        policy=policy, about=about, summary=summary, stretches=_stretches(entries, summary.elapsed_s), journal=entries
    )


def _stretches(entries: tuple[JournalEntry, ...], end_s: float) -> tuple[Stretch, ...]:
    """Steps as they were committed, and between them whatever kept the run from it."""
    found: list[Stretch] = []
    now_s, newest_step, waiting = 0.0, 0, Activity.STARTING

    def wait_until(t_s: float) -> None:
        if t_s > now_s:
            found.append(Stretch(start_s=now_s, stop_s=t_s, activity=waiting))

    for entry in entries:
        match entry:
            case StepDone(record=record) | StepsDone(record=record):
                num_steps = entry.num_steps if isinstance(entry, StepsDone) else 1
                length_s = min(record.duration_s * num_steps, entry.t_s - now_s)
                wait_until(entry.t_s - length_s)
                activity = Activity.REDOING if record.step <= newest_step else Activity.TRAINING
                rate = record.num_samples * num_steps / length_s if length_s > 0 else 0.0
                start_s = entry.t_s - length_s
                found.append(Stretch(start_s=start_s, stop_s=entry.t_s, activity=activity, samples_per_s=rate))
                newest_step, now_s = max(newest_step, record.step), entry.t_s
                waiting = Activity.RECOVERING
            case PlanAdopted(plan=plan):
                if not plan.pipelines:
                    wait_until(entry.t_s)
                    now_s, waiting = max(now_s, entry.t_s), Activity.IDLE
                elif waiting is Activity.IDLE:
                    wait_until(entry.t_s)
                    now_s, waiting = max(now_s, entry.t_s), Activity.RECOVERING
            case _:
                pass
    wait_until(end_s)
    return tuple(found)
