"""A run that has nothing left to do, by its journal: what the same command line is answered with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec

from .entries import JournalEntry
from .run_entries import JobEnded, JobStarted
from .state_entries import CheckpointSaved
from .step_entries import StepDone

__all__ = ["FinishedRun", "read_finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that has ended well, with all of its steps saved."""

    job: JobSpec
    name: str
    """Of its last checkpoint."""
    step: int

    def is_all_of(self, job: JobSpec) -> bool:
        """Whether it is what `job` asks for: the same model, trained as far at least, in the same place."""
        same = (self.job.tag, self.job.model, self.job.script, self.job.checkpoint.directory) == (
            job.tag,
            job.model,
            job.script,
            job.checkpoint.directory,
        )
        return same and job.checkpoint.enabled and self.step >= job.max_steps


def read_finished(entries: Iterable[JournalEntry]) -> FinishedRun | None:
    """Find the end of a finished run; None for a run that is active, ended otherwise, or saved nothing. O(entries)."""
    job: JobSpec | None = None
    end: JobEnded | None = None
    saved: CheckpointSaved | None = None
    step = 0
    for entry in entries:
        match entry:
            case JobStarted():
                job = entry.job
            case StepDone(record=record):
                step = record.step
            case CheckpointSaved():
                saved = entry
            case JobEnded():
                end = entry
            case _:
                pass
    if (
        job is None
        or end is None
        or end.exit_code != ExitCode.DONE
        or saved is None
        or saved.step < max(step, job.max_steps)
    ):
        return None
    return FinishedRun(job=job, name=saved.name, step=saved.step)
