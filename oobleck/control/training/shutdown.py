"""How a run ends: a requested stop, workers that have finished, the last save, and the reason to report."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from oobleck.control.checkpoints import Saving
from oobleck.control.data import Sharding
from oobleck.control.events import EndRun, StopRequested, Turn
from oobleck.control.journal import WorkerError
from oobleck.control.nodes import Membership
from oobleck.control.protocol import CommitRecord, ErrorKind, FinishStep, Raised
from oobleck.control.steps import PlanHistory, Progress
from oobleck.errors import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

_LAST_SAVE_S = 300.0
"""How long the end of a run may wait for its last save."""
_LAST_WORDS_S = 2.0
_OF_THE_JOB = (ErrorKind.CODE, ErrorKind.DATA, ErrorKind.JOB)
"""What other nodes would not mend."""


class _Error(NamedTuple):
    """What makes two exceptions the same, wherever they were raised."""

    kind: ErrorKind
    message: str


@dataclass(slots=True)
class _Over:
    """Training has ended; its last save may still be on the way to the disk."""

    end: EndRun
    step: int
    """The newest step at that time."""
    due_s: float
    hears_out: bool = False
    """Whether the last save has failed, and all have a moment to report what their memory holds."""


@dataclass(slots=True, eq=False)
class Shutdown:
    """Knows which workers have finished, whether a stop was requested, and what ended workers."""

    _job: JobSpec
    _members: Membership
    _progress: Progress
    _saving: Saving
    _sharding: Sharding
    _errors: dict[WorkerId, tuple[int, Raised]] = field(default_factory=dict)
    """The exception that ended each worker last, and the newest committed step at that time."""
    _met: dict[_Error, dict[WorkerId, int]] = field(default_factory=dict)
    """The workers that each exception has ended, and the newest committed step when it last did."""
    _stop: StopRequested | None = None
    _asked_to_finish: int = 0
    """The generation whose workers were last asked to finish."""
    _finished: tuple[int, set[WorkerId]] = field(default_factory=lambda: (0, set()))
    """(newest generation, its workers that train no further)"""
    _over: _Over | None = None

    @property
    def due_s(self) -> float:
        """When the end no longer waits for the last save."""
        return math.inf if self._over is None else self._over.due_s

    def note_error(self, worker_id: WorkerId, error: Raised) -> None:
        self._errors[worker_id] = (self._progress.last_step, error)
        self._met.setdefault(_Error(error.kind, error.message), {})[worker_id] = self._progress.last_step

    def ask_again(self) -> None:
        """Repeat the request to finish, which may be lost."""
        self._asked_to_finish = 0

    def is_same_error(self, nodes: Collection[str]) -> bool:
        """Whether the same exception has ended a worker on each of these nodes, if any, since the newest step."""
        return any(self._is_met_by_all(error, nodes) for error in self._met)

    def is_met_elsewhere(self, worker_id: WorkerId) -> bool:
        """Whether an exception that ended a worker has ended another one, too, since the newest step."""
        fresh = [[each for each, step in met.items() if step == self._progress.last_step] for met in self._met.values()]
        return any(worker_id in workers and len(workers) > 1 for workers in fresh)

    def is_jobs_own(self, nodes: Collection[str]) -> bool:
        """Whether an error of the job's has ended a worker on each of these nodes, if any, since the newest step.

        At least two nodes of the run must have met it: a single node may be broken.
        """
        return any(
            error.kind in _OF_THE_JOB
            and len({worker_id.node for worker_id in met}) > 1
            and self._is_met_by_all(error, nodes)
            for error, met in self._met.items()
        )

    def _is_met_by_all(self, error: _Error, nodes: Collection[str]) -> bool:
        step = self._progress.last_step
        fresh = {worker_id.node for worker_id, met_at in self._met[error].items() if met_at == step}
        return bool(nodes) and fresh.issuperset(nodes)

    @property
    def _fresh(self) -> dict[WorkerId, Raised]:
        """The exceptions since the newest committed step, by worker."""
        return {
            worker_id: error for worker_id, (step, error) in self._errors.items() if step == self._progress.last_step
        }

    def stop(self, event: StopRequested) -> None:
        """End training with the step in flight."""
        self._stop = event
        self._asked_to_finish = 0

    def stop_over(self, record: CommitRecord) -> bool:
        """End training after a step that was skipped because it was bad, if the job asks for that; return whether."""
        # Gradients that overflow in float16 while the loss is finite only change the loss scale.
        is_bad = not math.isfinite(record.loss) or self._job.dtype != "float16"
        ends = self._job.on_bad_step == "stop" and record.is_skipped and is_bad and self._stop is None
        if ends:
            norm = f"a gradient norm of {record.grad_norm:.4g}"
            reason = (
                f"step {record.step} has a loss of {record.loss:.4g} and {norm}: its update was left out (on_bad_step)"
            )
            self.stop(StopRequested(now=False, exit_code=ExitCode.FAILED, reason=reason))
        return ends

    def worker_finished(self, turn: Turn, worker_id: WorkerId, generations: PlanHistory) -> None:
        """Note that a worker has finished."""
        # Workers repeat their report after a fence, so those of older generations do not count.
        if self._finished[0] != generations.current:
            self._finished = generations.current, set()
        finished, awaited = self._finished[1], generations.plan.worker_ids
        finished.add(worker_id)
        if len(finished) < len(awaited) or not finished.issuperset(awaited):  # O(1) until as many have finished
            return
        self._progress.commit_all(turn, ())
        end, step = self._outcome(), self._progress.last_step
        if self._over is None:
            self._over = _Over(end, step, due_s=turn.now_s + _LAST_SAVE_S)
        else:
            self._over.end, self._over.step = end, step
        self._progress.expect(math.inf, turn.now_s)  # No step can be committed now.

    def _outcome(self) -> EndRun:
        """Say how a run ends whose workers have all finished."""
        number = self._progress.last_step
        steps = "1 step is committed" if number == 1 else f"{number} steps are committed"
        by_data = self._sharding.outcome(steps, can_resume=self._saving.is_enabled)
        if by_data is not None and self._stop is None:
            return by_data
        # A step that ends the run as a failure may be told of when all are done.
        has_failed = self._stop is not None and self._stop.exit_code == ExitCode.FAILED
        if self._progress.last_step >= self._job.max_steps and not has_failed:
            return EndRun(exit_code=ExitCode.DONE, reason=f"all {steps}")
        if self._stop is None:  # The stop was requested from an earlier master.
            return EndRun(exit_code=ExitCode.DONE, reason=f"stopped; {steps}")
        return EndRun(exit_code=self._stop.exit_code, reason=f"{self._stop.reason}; {steps}")

    def follow_up(self, turn: Turn, generations: PlanHistory, *, is_training: bool) -> None:
        """Ask each new plan's workers to finish once a stop is requested; end the run once nothing is awaited."""
        if self._over is not None and self._progress.last_step < self._over.step:  # The state was lost unsaved.
            self._over = None
        if self._over is not None:  # This comes first, because each heartbeat leads here.
            # While no worker is left, none can report what is saved.
            is_settled = bool(self._members.ready) and self._saving.is_settled
            # During a recovery a new plan is on its way, under which unsaved state is saved again.
            is_settled = is_settled and (is_training or self._saving.lacking is None)
            if (is_settled or turn.now_s >= self._over.due_s) and self._is_heard_out(self._over, turn.now_s):
                turn.do((self._settled(self._over.end),))
        if self._stop is None or self._asked_to_finish == generations.newest:
            return
        self._asked_to_finish = generations.newest
        for worker_id in generations.plan.worker_ids:
            if self._members[worker_id.node].is_ready:
                turn.send(worker_id.node, FinishStep(device=worker_id.device))

    def _is_heard_out(self, over: _Over, now_s: float) -> bool:
        if self._saving.lacking is not None and self._saving.may_be_in_memory and not over.hears_out:
            over.hears_out = True
            over.due_s = min(over.due_s, now_s + _LAST_WORDS_S)
        return not over.hears_out or not self._saving.may_be_in_memory or now_s >= over.due_s

    def _settled(self, over: EndRun) -> EndRun:
        """Return the end of the run once its last save is over: a run whose last save failed is no success."""
        lacking = self._saving.lacking
        if lacking is None or over.exit_code == ExitCode.FAILED:
            return over
        return EndRun(exit_code=ExitCode.NOT_SAVED, reason=f"{over.reason}, but {lacking}")

    def error_behind(self, over: EndRun) -> WorkerError | None:
        """Return the error that ended workers and so the run: nothing was committed since."""
        fresh = self._fresh
        if not fresh or over.exit_code != ExitCode.FAILED:
            return None
        worker_id, error = next(iter(fresh.items()))
        return WorkerError(worker_id=worker_id, end=error)
