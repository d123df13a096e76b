"""What a run begins from: a checkpoint of its own past, or one that the user names, or the model's initial values."""

from __future__ import annotations

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.events import EndRun, Record, notice
from oobleck.control.nodes import Membership
from oobleck.errors import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import NodeKind, WorkerId

from .requests import BeginTraining, Effects, KnowCheckpoints, LocateCheckpoints, ReportProblems


def finished_text(name: str, step: int, *, has_read_all: bool = False) -> str:
    """Return what to say when there is nothing left to train."""
    what = f"all data is read, in {step} steps" if has_read_all else f"all {step} steps are committed"
    more = "data.epochs" if has_read_all else "--steps"
    return (
        f"already finished: {what}, and saved as {name}. Raise {more} to continue from it, use another --tag to train "
        "another model, or --resume never to start over; what is saved stays"
    )


class Resuming:
    """Finds out what a run begins from."""

    def __init__(self, job: JobSpec, saving: Saving, restoring: Restoring, sharding: Sharding, *, resume: str) -> None:
        """`resume` as in `Coordinator`."""
        self._job = job
        self._saving = saving
        self._restoring = restoring
        self._sharding = sharding
        self._resume = resume

    def is_known(self, members: Membership) -> bool:
        """Whether all workers have reported what they can restore, or nothing is saved at all."""
        return not self._saving.is_enabled or self._restoring.is_answered(_workers(members))

    def questions(self, members: Membership) -> tuple[LocateCheckpoints, ...]:
        """Have workers asked what they can restore, unless all were."""
        worker_ids = _workers(members)
        return () if self._restoring.is_asked(worker_ids) else (LocateCheckpoints(worker_ids=worker_ids),)

    def begin(self, kinds: tuple[NodeKind, ...], now_s: float) -> Effects:
        """Have training begin with the checkpoint that fits, or with the model's initial values, or end the run."""
        candidate = None if self._resume == "never" else self._restoring.newest(kinds[0].profile.num_layers)
        over = self._lacking() if candidate is None else self._misfit(candidate)
        if over is not None:
            return (ReportProblems(), over)
        return (
            ReportProblems(),
            *self._warning(candidate, now_s),
            *self._look_after_others(candidate, now_s),
            BeginTraining(kinds=kinds, candidate=candidate),
        )

    def _lacking(self) -> EndRun | None:
        """Why a run does not begin without a checkpoint; None where it does."""
        if self._resume == "never":
            return None
        if self._resume != "auto":
            text = f"--resume {self._resume}: there is no checkpoint that can be used"
            return EndRun(exit_code=ExitCode.CONFIG, reason=text)
        misfits = self._restoring.misfits()
        if not misfits:
            return None
        text = f"this tag has trained another model: {misfits[0]}"
        keep = "--resume never trains from the beginning and keeps what is there"
        return EndRun(exit_code=ExitCode.CONFIG, reason=f"{text}; choose another --tag, or {keep}")

    def _misfit(self, candidate: Candidate) -> EndRun | None:
        """Why a run does not begin from a checkpoint; None where it does.

        There is nothing to do if an earlier run has done all that is asked for, and its model is on disk.
        """
        has_read_all = self._sharding.has_read_all(candidate.position)
        if self._resume == "auto" and candidate.is_on_disk and (has_read_all or candidate.step >= self._job.max_steps):
            text = finished_text(candidate.name, candidate.step, has_read_all=has_read_all)
            return EndRun(exit_code=ExitCode.DONE, reason=text)
        misfit = self._sharding.misfit(candidate.position)
        if misfit is None:
            return None
        text = f"the checkpoint of step {candidate.step} cannot be resumed: {misfit}"
        return EndRun(exit_code=ExitCode.CONFIG, reason=f"{text}; --resume never starts from scratch")

    def _warning(self, candidate: Candidate | None, now_s: float) -> tuple[Record, ...]:
        if candidate is None or candidate.position is not None or not self._sharding.is_on:
            return ()
        text = f"the checkpoint of step {candidate.step} knows no place in the shards"
        return (notice(now_s, "warning", f"{text}: they are read from their beginning"),)

    def _look_after_others(self, candidate: Candidate | None, now_s: float) -> tuple[KnowCheckpoints | Record, ...]:
        """Say which checkpoints are this run's own to prune; those of other runs stay, and the user hears of it."""
        is_private = self._job.checkpoint.directory is None
        known = KnowCheckpoints(
            complete=self._restoring.known(candidate),
            unfinished=self._restoring.unfinished(candidate, is_private=is_private),
        )
        others = self._restoring.others(candidate)
        if not others:
            return (known,)
        text = f"{len(others)} checkpoints of other runs lie in the same directory and stay, from {others[0]}"
        return (known, notice(now_s, "info", f"{text} to {others[-1]}; remove by hand what you do not need"))


def _workers(members: Membership) -> tuple[WorkerId, ...]:
    return tuple(worker_id for member in members.ready for worker_id in member.worker_ids)
