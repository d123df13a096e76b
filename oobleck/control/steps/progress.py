"""Which steps are committed, and when a step that does not come counts as a hang."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from oobleck.control.events import Turn
from oobleck.control.journal import Evaluated, StepDone
from oobleck.control.protocol import CommitRecord, EvaluationDone
from oobleck.job import JobSpec

HANG_FLOOR_S = 10.0
# A step hangs if it takes this many times as long as the slowest of the latest, or as the plan predicts.
_HANG_FACTOR = 10
_ADOPTIONS_TIMED = 5
STEPS_TIMED = 20
"""How many of the newest steps say how long a step takes."""


class Progress:
    """The newest committed step, and what depends on it."""

    def __init__(self, job: JobSpec) -> None:
        self._job = job
        self._step_times_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._predicted_s = 0.0
        self._adoptions_s: deque[float] = deque(maxlen=_ADOPTIONS_TIMED)
        self._ordered: tuple[int, float] | None = None
        """(generation, time of its order) of a plan without a step."""
        self._evaluated_step = 0
        self.last_record: CommitRecord | None = None
        """The newest committed step since the run last went back to a checkpoint."""
        self._early: dict[int, CommitRecord] = {}
        """Reported steps of a plan whose boundary step is not reported yet."""
        self._base_step = 0
        self._base_generation = 0
        self.furthest_step = 0
        """The newest step that was ever committed, including lost ones."""
        self.progressed_s = 0.0
        """When a step was last committed, or a plan ordered."""
        self.hangs_s = math.inf
        """When the step in flight counts as a hang; infinity while none can be committed."""

    @property
    def last_step(self) -> int:
        """The newest committed step that is known."""
        return self._base_step if self.last_record is None else self.last_record.step

    def in_order(self, record: CommitRecord, *, boundary: int) -> list[CommitRecord]:
        """Return the reported steps that can be committed now, in order; `boundary` is the step before the plan's."""
        # A newcomer's report may arrive before those of the workers that finished the step before its plan, of which
        # it knows nothing; after a takeover, so may all that its agent has kept for the master. If that step's report
        # was lost with its reporters, the recovery from their loss commits what waits.
        if record.generation < self._base_generation:
            return []
        if self.last_step < boundary < record.step:
            self._early[record.step] = record
            return []
        early, self._early = self._early, {}
        return [each for _, each in sorted((early | {record.step: record}).items())]

    def commit_all(self, turn: Turn, records: Iterable[CommitRecord]) -> None:
        """Commit these steps, and those that wait for an earlier one, once no report can be on its way."""
        early, self._early = self._early, {}
        for _, record in sorted((early | {record.step: record for record in records}).items()):
            self.commit(turn, record)

    def commit(self, turn: Turn, record: CommitRecord) -> bool:
        """Note and record a committed step; False if it was reported before."""
        # The run may have gone back to a checkpoint before the step of a late report.
        if record.step <= self.last_step or record.generation < self._base_generation:
            return False
        self.restore(record)
        if self._ordered is not None and record.generation >= self._ordered[0]:
            self._adoptions_s.append(turn.now_s - self._ordered[1])
            self._ordered = None
        tokens = record.num_samples * self._job.data.sequence_length
        turn.record(StepDone(t_s=turn.now_s, record=record, tokens=tokens))
        return True

    def evaluate(self, turn: Turn, message: EvaluationDone) -> None:
        """Note and record an evaluation, unless it was reported before."""
        if message.step <= self._evaluated_step:
            return
        self._evaluated_step = message.step
        entry = Evaluated(
            t_s=turn.now_s,
            step=message.step,
            loss=message.loss,
            num_samples=message.num_samples,
            duration_s=message.duration_s,
        )
        turn.record(entry)

    def owes_evaluation(self, step: int) -> bool:
        """Whether a step's evaluation is due and not reported yet."""
        return self._job.is_evaluated(step) and step > self._evaluated_step

    def go_back(self, step: int, *, generation: int) -> None:
        """Take the state of a checkpoint for the newest."""
        self._evaluated_step = min(self._evaluated_step, step)
        self.last_record = None
        self._early = {}
        self._base_step, self._base_generation = step, generation

    def restore(self, record: CommitRecord) -> None:
        """Note a committed step, without an entry in the journal."""
        self.last_record = record
        self.furthest_step = max(self.furthest_step, record.step)
        self._step_times_s.append(record.duration_s)

    def take_over(self, furthest_step: int, evaluated_step: int, *, step_s: float) -> None:
        """Continue from what the journal knows besides `restore`; steps take `step_s` seconds by the newest plan."""
        self.furthest_step, self._evaluated_step, self._predicted_s = furthest_step, evaluated_step, step_s

    @property
    def adoptions_s(self) -> tuple[float, ...]:
        """How long the latest plans took from their orders to their first step."""
        return tuple(self._adoptions_s)

    def plan_ordered(self, generation: int, step_s: float, now_s: float) -> None:
        """Expect the next step under this plan, whose steps take `step_s` seconds."""
        self._ordered, self._predicted_s = (generation, now_s), step_s

    def expect(self, least_s: float, now_s: float) -> None:
        """Allow the next step this many seconds, or more if steps usually take long; infinity if none can come now."""
        self.progressed_s = now_s
        usual_s = max([self._predicted_s, *self._step_times_s])
        self.hangs_s = now_s + max(least_s, _HANG_FACTOR * usual_s)

    def allow(self, until_s: float) -> None:
        self.hangs_s = until_s

    def give_time(self, now_s: float) -> None:
        """Allow time for reports of committed steps that are still on their way."""
        if math.isfinite(self.hangs_s):
            self.hangs_s = max(self.hangs_s, now_s + HANG_FLOOR_S)
