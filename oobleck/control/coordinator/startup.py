"""How a run begins: once all workers are ready and the profile is known, with what a checkpoint holds, if there is one.

Until then every failure of a node ends the run, as nothing is lost by it: all are waited for a moment, and told at
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.events import Effects, RunOver
from oobleck.control.journal import Loss, Notice, ProfileKnown
from oobleck.control.membership import Membership, StartupFailures
from oobleck.errors import PlanningError
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId, profile_to_json

from .preparation import Preparation
from .reconfiguration import Reconfiguration

__all__ = ["Startup", "finished_text"]

_SETTLE_S = 1.0
"""How long other nodes' failures to start are waited for, so that all are told at once."""


def finished_text(name: str, step: int, *, has_read_all: bool = False) -> str:
    """What is said where there is nothing left to train."""
    what = f"all data is read, in {step} steps" if has_read_all else f"all {step} steps are committed"
    more = "more data.epochs go" if has_read_all else "more --steps go"
    return (
        f"finished before: {what}, and saved as {name}. Nothing was done and nothing removed: {more} on from it, "
        "another --tag trains another model, --resume never trains from the beginning and keeps it"
    )


class Startup:
    """Mutable: leads to the first plan, or to the end of a run that cannot begin."""

    def __init__(
        self,
        job: JobSpec,
        nodes: Sequence[NodeSpec],
        members: Membership,
        preparation: Preparation,
        saving: Saving,
        restoring: Restoring,
        reconfiguration: Reconfiguration,
        sharding: Sharding,
        effects: Effects,
        *,
        resume: str,
    ) -> None:
        """`resume` as in `Coordinator`."""
        self._job = job
        self._nodes = nodes
        self._members = members
        self._preparation = preparation
        self._saving = saving
        self._restoring = restoring
        self._reconfiguration = reconfiguration
        self._sharding = sharding
        self._effects = effects
        self._resume = resume
        self._failures = StartupFailures(len(nodes))
        self.is_over = False
        """The first plan is ordered, or a master before ours has ordered it."""
        self.deadline_s = math.inf

    def expect_all(self) -> None:
        """Give all nodes the time that the job has for its start."""
        self.deadline_s = self._effects.now_s + self._job.control.start_timeout_s

    def node_failed(self, node: str, loss: Loss) -> None:
        """A node cannot start; others may be about to say the same."""
        self._failures.note(node, loss)
        self.deadline_s = min(self.deadline_s, self._effects.now_s + _SETTLE_S)

    def worker_lost(self, worker_id: WorkerId) -> None:
        """A worker has ended, and is started again: what it was asked, another one is, or it itself."""
        self._effects.command(*self._preparation.worker_lost(worker_id))
        self._restoring.forget()

    def handle_deadline(self) -> None:
        """Raise RunOver: the run cannot begin."""
        if self._failures:
            raise RunOver(self._failures.exit_code, str(self._failures))
        limit_s = self._job.control.start_timeout_s
        raise RunOver(
            ExitCode.FAILED, f"not ready within {limit_s:g} s: {self._preparation.waiting_for()}{self._silence()}"
        )

    def _silence(self) -> str:
        """Who has fallen silent, for an error message; during a start nobody is lost by it."""
        since_s = self._effects.now_s - self._job.control.lease_s
        silent = [member.spec.name for member in self._members.living if member.last_heard_s < since_s]
        return f"; nothing is heard of {', '.join(silent)}" if silent else ""

    def train_when_prepared(self) -> None:
        """Order the first plan if everything that it needs is known. Raises RunOver where there is none."""
        if self.is_over or not self._preparation.is_complete or self._failures:
            return
        profile = self._preparation.profile
        assert profile is not None
        self._check_devices()
        worker_ids = [worker_id for member in self._members.ready for worker_id in member.worker_ids]
        if self._saving.is_enabled and not self._restoring.is_answered(worker_ids):
            if not self._restoring.is_asked(worker_ids):
                self._restoring.ask(worker_ids)
            return
        self._effects.record(ProfileKnown(t_s=self._effects.now_s, profile_json=profile_to_json(profile)))
        self._saving.begin([layer.name for layer in profile.layers])
        try:
            self._reconfiguration.begin_training(profile, self._candidate(len(profile.layers)))
        except PlanningError as error:
            raise RunOver(ExitCode.CONFIG, str(error)) from error
        self.is_over = True
        self.deadline_s = math.inf

    def _check_devices(self) -> None:
        if len({spec.num_devices for spec in self._nodes}) > 1:
            counts = ", ".join(f"{spec.name} has {spec.num_devices}" for spec in self._nodes)
            raise RunOver(
                ExitCode.CONFIG,
                f"all nodes need the same number of devices: {counts}; change slots= or devices=",
            )

    def _candidate(self, num_layers: int) -> Candidate | None:
        """The checkpoint that the run begins from; None for the model's initial values."""
        for problem in self._restoring.problems():
            self._notice("warning", f"cannot be used: {problem}")
        candidate = None if self._resume == "never" else self._restoring.newest(num_layers)
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
            raise RunOver(ExitCode.CONFIG, f"{text}; --resume never starts anew")
        if candidate is not None and candidate.position is None and self._sharding.is_on:
            text = f"the checkpoint of step {candidate.step} knows no place in the shards"
            self._notice("warning", f"{text}: they are read from their beginning")
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
            self._notice("info", f"{text} to {others[-1]}; remove by hand what you do not need")

    def _notice(self, level: str, text: str) -> None:
        self._effects.record(Notice(t_s=self._effects.now_s, level=level, text=text))
