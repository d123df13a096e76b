"""Which steps are committed, and when the lack of another one becomes a hang."""

from __future__ import annotations

import math
from collections import deque

from oobleck.control.events import Record
from oobleck.control.journal import Evaluated, StepDone
from oobleck.control.protocol import CommitRecord, EvaluationDone
from oobleck.job import JobSpec

HANG_FLOOR_S = 10.0
_HANG_FACTOR = 10
"""It is a hang when no step is committed for this many times as long as the slowest of the latest took, or the plan
has a step take."""
_ADOPTIONS_TIMED = 5
STEPS_TIMED = 20
"""By the newest steps it is known how long one takes."""


class Progress:
    """The newest committed step, and what depends on it."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._step_times_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._predicted_s = 0.0
        self._adoptions_s: deque[float] = deque(maxlen=_ADOPTIONS_TIMED)
        self._ordered: tuple[int, float] | None = None
        """(generation, when it was ordered) of a plan without a step."""
        self._evaluated_step = 0
        self.last_record: CommitRecord | None = None
        """Of the newest step that is known to be committed, since the checkpoint that was gone back to, if one was."""
        self._base_step = 0
        self._base_generation = 0
        self.furthest_step = 0
        """The newest step that was ever committed, lost ones included."""
        self.progressed_s = 0.0
        """When a step was committed, or a plan ordered, last."""
        self.hangs_s = math.inf
        """When the lack of another step becomes a hang."""

    @property
    def last_step(self) -> int:
        """The newest step that is known to be committed."""
        return self._base_step if self.last_record is None else self.last_record.step

    def commit(self, record: CommitRecord, now_s: float) -> tuple[Record, ...]:
        """Note a committed step, unless another reporter told it before: then nothing is recorded."""
        if record.step <= self.last_step or record.generation < self._base_generation:
            return ()
        self.restore(record)
        if self._ordered is not None and record.generation >= self._ordered[0]:
            self._adoptions_s.append(now_s - self._ordered[1])
            self._ordered = None
        tokens = record.num_samples * self._job.data.sequence_length
        return (Record(entry=StepDone(t_s=now_s, record=record, tokens=tokens)),)

    def evaluate(self, message: EvaluationDone, now_s: float) -> tuple[Record, ...]:
        """Note an evaluation, unless another reporter told it before: then nothing is recorded."""
        if message.step <= self._evaluated_step:
            return ()
        self._evaluated_step = message.step
        entry = Evaluated(
            t_s=now_s,
            step=message.step,
            loss=message.loss,
            num_samples=message.num_samples,
            duration_s=message.duration_s,
        )
        return (Record(entry=entry),)

    def owes_evaluation(self, step: int) -> bool:
        """Whether a step's evaluation is due, and no worker has reported its outcome."""
        return self._job.is_evaluated(step) and step > self._evaluated_step

    def go_back(self, step: int, *, generation: int) -> None:
        """The state is that of a checkpoint; what older generations have done since is as if it had never been."""
        self._evaluated_step = min(self._evaluated_step, step)
        self.last_record = None
        self._base_step, self._base_generation = step, generation

    def restore(self, record: CommitRecord) -> None:
        """Note a step that the journal knows."""
        self.last_record = record
        self.furthest_step = max(self.furthest_step, record.step)
        self._step_times_s.append(record.duration_s)

    def restore_furthest(self, step: int) -> None:
        """Note the newest step that was ever committed, by the journal."""
        self.furthest_step = step

    def restore_evaluated(self, step: int) -> None:
        """Note the newest step whose evaluation the journal knows; 0 where it knows none."""
        self._evaluated_step = step

    def foresee(self, step_s: float) -> None:
        """Steps take so long from here on, by the newest plan."""
        self._predicted_s = step_s

    @property
    def adoptions_s(self) -> tuple[float, ...]:
        """How long the latest plans have taken, from their orders to their first step."""
        return tuple(self._adoptions_s)

    def plan_ordered(self, generation: int, now_s: float) -> None:
        """The next step is committed under this plan."""
        self._ordered = (generation, now_s)

    def expect(self, least_s: float, now_s: float) -> None:
        """Take it for a hang when no step is committed in so many seconds, or many times the usual time.

        Infinity: no step can be committed now.
        """
        self.progressed_s = now_s
        usual_s = max([self._predicted_s, *self._step_times_s])
        self.hangs_s = now_s + max(least_s, _HANG_FACTOR * usual_s)

    def allow(self, until_s: float) -> None:
        """The step in flight may take until then: its workers come on."""
        self.hangs_s = until_s

    def give_time(self, now_s: float) -> None:
        """Steps may be committed that have not been told yet: nothing hangs before they had time to be."""
        if math.isfinite(self.hangs_s):
            self.hangs_s = max(self.hangs_s, now_s + HANG_FLOOR_S)

    def expect_none(self) -> None:
        """No step can be committed now: nothing hangs."""
        self.hangs_s = math.inf
