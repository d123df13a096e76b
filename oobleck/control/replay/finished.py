"""A run that has nothing left to do, by its journal: what the same command line is answered with."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.journal import CheckpointSaved, JobEnded, JobStarted
from oobleck.errors import ExitCode
from oobleck.job import JobSpec


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


def finished_run(
    started: JobStarted | None, end: JobEnded | None, saved: CheckpointSaved | None, *, step: int
) -> FinishedRun | None:
    """Return a run that has finished; None for one that is active, ended otherwise, or did not save all.

    `saved` is the newest checkpoint, and `step` the newest committed step.
    """
    if started is None or end is None or saved is None or end.exit_code != ExitCode.DONE:
        return None
    job = started.job
    return None if saved.step < max(step, job.max_steps) else FinishedRun(job=job, name=saved.name, step=saved.step)
