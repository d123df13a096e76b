"""What a run begins from: a checkpoint of its own past, or one that the user names, or the model's initial values."""

from __future__ import annotations

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.events import Effects, RunOver
from oobleck.control.membership import Membership
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import Profile

__all__ = ["Resuming", "finished_text"]


def finished_text(name: str, step: int, *, has_read_all: bool = False) -> str:
    """What is said where there is nothing left to train."""
    what = f"all data is read, in {step} steps" if has_read_all else f"all {step} steps are committed"
    more = "more data.epochs go" if has_read_all else "more --steps go"
    return (
        f"finished before: {what}, and saved as {name}. Nothing was done and nothing removed: {more} on from it, "
        "another --tag trains another model, --resume never trains from the beginning and keeps it"
    )


class Resuming:
    """Finds out what a run begins from."""

    def __init__(
        self, job: JobSpec, saving: Saving, restoring: Restoring, sharding: Sharding, effects: Effects, *, resume: str
    ) -> None:
        """`resume` as in `Coordinator`."""
        self._job = job
        self._saving = saving
        self._restoring = restoring
        self._sharding = sharding
        self._effects = effects
        self._resume = resume

    def forget(self) -> None:
        """A worker is started again: what was reported may not be true any more."""
        self._restoring.forget()

    def is_known(self, members: Membership) -> bool:
        """Whether all workers have reported what they can restore; ask them where they were not."""
        worker_ids = [worker_id for member in members.ready for worker_id in member.worker_ids]
        if not self._saving.is_enabled or self._restoring.is_answered(worker_ids):
            return True
        if not self._restoring.is_asked(worker_ids):
            self._restoring.ask(worker_ids)
        return False

    def begin(self, profile: Profile) -> Candidate | None:
        """Return the checkpoint that the run begins from; None for the model's initial values. Raises RunOver."""
        self._saving.begin([layer.name for layer in profile.layers])
        for problem in self._restoring.problems():
            self._effects.notice("warning", f"cannot be used: {problem}")
        candidate = None if self._resume == "never" else self._restoring.newest(len(profile.layers))
        if self._resume == "auto":
            if candidate is None and (misfits := self._restoring.misfits()):
                text = f"this tag has trained another model: {misfits[0]}"
                keep = "--resume never trains from the beginning and keeps what is there"
                raise RunOver(ExitCode.CONFIG, f"{text}; choose another --tag, or {keep}")
            if candidate is not None:
                self._end_if_finished(candidate)
        elif self._resume != "never" and candidate is None:
            raise RunOver(ExitCode.CONFIG, f"--resume {self._resume}: there is no checkpoint that can be used")
        misfit = None if candidate is None else self._sharding.misfit(candidate.position)
        if candidate is not None and misfit is not None:
            text = f"the checkpoint of step {candidate.step} cannot be gone on from: {misfit}"
            raise RunOver(ExitCode.CONFIG, f"{text}; --resume never starts from scratch")
        if candidate is not None and candidate.position is None and self._sharding.is_on:
            text = f"the checkpoint of step {candidate.step} knows no place in the shards"
            self._effects.notice("warning", f"{text}: they are read from their beginning")
        self._look_after_others(candidate)
        return candidate

    def _end_if_finished(self, candidate: Candidate) -> None:
        """Raise RunOver where a run before has done all that is asked for, and its model is on disk."""
        has_read_all = self._sharding.has_read_all(candidate.position)
        if not candidate.is_on_disk or not (has_read_all or candidate.step >= self._job.max_steps):
            return
        raise RunOver(ExitCode.DONE, finished_text(candidate.name, candidate.step, has_read_all=has_read_all))

    def _look_after_others(self, candidate: Candidate | None) -> None:
        """Tell which checkpoints are this run's own to prune; those of other runs stay, and the user hears of it."""
        is_private = self._job.checkpoint.directory is None
        self._saving.know(
            self._restoring.known(candidate), self._restoring.unfinished(candidate, is_private=is_private)
        )
        others = self._restoring.others(candidate)
        if others:
            text = f"{len(others)} checkpoints of other runs lie in the same directory and stay, from {others[0]}"
            self._effects.notice("info", f"{text} to {others[-1]}; remove by hand what you do not need")
