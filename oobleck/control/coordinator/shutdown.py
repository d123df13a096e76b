"""How a run ends: a stop that was asked for, workers that train no further, the last save, and the reason to tell."""

from __future__ import annotations

import math
from collections.abc import Collection

from oobleck.control.checkpoints import Saving
from oobleck.control.commit import Progress
from oobleck.control.data import Sharding
from oobleck.control.events import Effects, RunOver, StopRequested
from oobleck.control.journal import WorkerError
from oobleck.control.membership import Membership
from oobleck.control.protocol import FinishStep, Raised
from oobleck.exit_codes import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .reconfiguration import Reconfiguration

__all__ = ["Shutdown"]

_LAST_SAVE_S = 300.0
"""How long the end of a run may wait for its last save."""
_LAST_WORDS_S = 2.0


class Shutdown:
    """Mutable: knows who has finished, what was asked, and what workers died of."""

    def __init__(
        self,
        job: JobSpec,
        members: Membership,
        progress: Progress,
        saving: Saving,
        reconfiguration: Reconfiguration,
        sharding: Sharding,
        effects: Effects,
    ) -> None:
        self._job = job
        self._members = members
        self._progress = progress
        self._saving = saving
        self._reconfiguration = reconfiguration
        self._sharding = sharding
        self._effects = effects
        self._errors: dict[WorkerId, tuple[int, Raised]] = {}
        """By worker: the exception that ended it, and the newest step that was committed by then."""
        self._stop: StopRequested | None = None
        self._asked_to_finish = 0
        """The generation whose workers were last asked to."""
        self._finished: set[tuple[int, WorkerId]] = set()
        """(generation, worker) of those that train no further."""
        self._over: RunOver | None = None
        """Training has ended; its last save may still be on the way to the disk."""
        self._over_step = 0
        """The step after which it has."""
        self._hears_out = False
        self.due_s = math.inf

    def note_error(self, worker_id: WorkerId, error: Raised) -> None:
        """An exception ended a worker."""
        self._errors[worker_id] = (self._progress.last_step, error)

    def ask_again(self) -> None:
        """What was asked may be lost."""
        self._asked_to_finish = 0

    def is_same_error(self, nodes: Collection[str]) -> bool:
        """Whether one exception has ended a worker on each of these nodes since the newest step."""
        fresh = {worker_id.node: error for worker_id, error in self._fresh.items()}
        errors = {(error.kind, error.message) for node, error in fresh.items() if node in nodes}
        return len(errors) == 1 and fresh.keys() >= set(nodes)

    @property
    def _fresh(self) -> dict[WorkerId, Raised]:
        """By worker: the exceptions since the newest committed step."""
        return {
            worker_id: error for worker_id, (step, error) in self._errors.items() if step == self._progress.last_step
        }

    def stop(self, event: StopRequested) -> None:
        """Have training end with the step in flight."""
        self._stop = event
        self._sharding.stop()
        self._asked_to_finish = 0

    def worker_finished(self, worker_id: WorkerId) -> None:
        """A worker trains no further. What was said before a fence is said again after it."""
        generations = self._reconfiguration.generations
        self._finished.add((generations.current, worker_id))
        if not self._finished.issuperset((generations.current, each) for each in generations.plan.worker_ids):
            return
        steps = f"{self._progress.last_step} steps are committed"
        by_data = self._sharding.outcome(steps, can_resume=self._saving.is_enabled)
        if by_data is not None and self._stop is None:
            self._over = by_data
        elif self._progress.last_step >= self._job.max_steps:
            self._over = RunOver(ExitCode.DONE, f"all {steps}")
        elif self._stop is None:  # it was the master before who was asked to stop
            self._over = RunOver(ExitCode.DONE, f"stopped; {steps}")
        else:
            self._over = RunOver(self._stop.exit_code, f"{self._stop.reason}; {steps}")
        self._over_step = self._progress.last_step
        self._progress.expect_none()
        self.due_s = min(self.due_s, self._effects.now_s + _LAST_SAVE_S)

    def follow_up(self) -> None:
        """Ask every new plan's workers to finish once a stop is wanted. Raises RunOver once nothing is waited for."""
        if self._progress.last_step < self._over_step:  # its state was lost before it was saved
            self._over, self._over_step, self.due_s = None, 0, math.inf
        if self._over is not None and (self._is_settled or self._effects.now_s >= self.due_s):
            self._end(self._over)
        generations = self._reconfiguration.generations
        if self._stop is not None and self._asked_to_finish != generations.newest:
            self._asked_to_finish = generations.newest
            for worker_id in generations.plan.worker_ids:
                if self._members[worker_id.node].is_ready:
                    self._effects.send(worker_id.node, FinishStep(device=worker_id.device))

    @property
    def _is_settled(self) -> bool:
        """Whether saves have come to an end. While no worker is left, nobody can tell what is saved."""
        return bool(self._members.ready) and self._saving.is_settled

    def _end(self, over: RunOver) -> None:
        """Raise RunOver, but where the last save has failed only after all had a moment to say what memory has."""
        if self._saving.lacking is not None and self._saving.may_be_in_memory and not self._hears_out:
            self._hears_out = True
            self.due_s = min(self.due_s, self._effects.now_s + _LAST_WORDS_S)
        if not self._hears_out or not self._saving.may_be_in_memory or self._effects.now_s >= self.due_s:
            raise self._settled(over)

    def _settled(self, over: RunOver) -> RunOver:
        """What the end is called once the last save has come to an end: without it, none is a success."""
        lacking = self._saving.lacking
        if lacking is None or over.exit_code == ExitCode.FAILED:
            return over
        return RunOver(ExitCode.NOT_SAVED, f"{over.reason}, but {lacking}")

    def error_behind(self, over: RunOver) -> WorkerError | None:
        """What ended workers, if nothing was committed since: it is the reason behind the other."""
        fresh = self._fresh
        if not fresh or over.exit_code != ExitCode.FAILED:
            return None
        worker_id, error = next(iter(fresh.items()))
        return WorkerError(worker_id=worker_id, end=error)
