"""The outcome of a simulated run, the same for every policy: its summary, and its activities over time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from oobleck.control.journal import JournalEntry, PlanAdopted, StepDone, StepsDone, Summary, summarize
from oobleck.errors import ConfigError, PeerError
from oobleck.wire import from_builtins, to_builtins


class Activity(StrEnum):
    STARTING = "starting"
    TRAINING = "training"
    REDOING = "redoing"
    """Training of steps that were lost."""
    RECOVERING = "recovering"
    CHECKPOINT = "checkpoint"
    IDLE = "idle"
    """Waiting for enough nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which a run does one activity at one pace."""

    start_s: float
    stop_s: float
    activity: Activity
    samples_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    policy: str
    about: str
    """The policy in a sentence, with its source."""
    summary: Summary
    stretches: tuple[Stretch, ...]
    """In order, without gaps."""
    journal: tuple[JournalEntry, ...] = ()
    """Empty except for the real coordinator."""

    @property
    def samples_per_s(self) -> float:
        """Committed samples over the whole time."""
        return self.summary.samples_committed / self.summary.elapsed_s if self.summary.elapsed_s else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the outcome as plain values, for JSON, with its journal."""
        written = to_builtins(self)
        assert isinstance(written, dict), "a dataclass is written as a map"
        return written

    @classmethod
    def from_dict(cls, values: object) -> Outcome:
        """Read what `to_dict` wrote. Raises ConfigError that names the place."""
        try:
            return from_builtins(cls, values)
        except PeerError as error:
            raise ConfigError(f"the outcome: {error}") from None


def outcome_of_journal(journal: Iterable[JournalEntry], *, policy: str, about: str) -> Outcome:
    """Read a run's journal; O(entries)."""
    entries = tuple(journal)
    summary = summarize(entries)
    return Outcome(
        policy=policy, about=about, summary=summary, stretches=_stretches(entries, summary.elapsed_s), journal=entries
    )


def _stretches(entries: tuple[JournalEntry, ...], end_s: float) -> tuple[Stretch, ...]:
    """Return the committed steps, and between them the activities that kept the run from training."""
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
                start_s = entry.t_s - length_s
                wait_until(start_s)
                activity = Activity.REDOING if record.step <= newest_step else Activity.TRAINING
                rate = record.num_samples * num_steps / length_s if length_s > 0 else 0.0
                found.append(Stretch(start_s=start_s, stop_s=entry.t_s, activity=activity, samples_per_s=rate))
                newest_step, now_s = max(newest_step, record.step), entry.t_s
                waiting = Activity.RECOVERING
            case PlanAdopted(plan=plan) if not plan.pipelines or waiting is Activity.IDLE:
                wait_until(entry.t_s)
                now_s = max(now_s, entry.t_s)
                waiting = Activity.RECOVERING if plan.pipelines else Activity.IDLE
            case _:
                pass
    wait_until(end_s)
    return tuple(found)
