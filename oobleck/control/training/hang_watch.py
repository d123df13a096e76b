"""Whether the workers of a late step make progress. It asks them before anything is interrupted.

    quiet ── some time before it is a hang ──> asked ── none makes progress, or some are stuck ──> all are fenced
      ^                                          │
      └──── as long again, at most ten minutes ── workers make progress

A worker makes progress if it reaches its next wait or gets what it waited for, or if its process uses the processor: a
worker that compiles does nothing else for minutes. So clocks only say when to ask, and never end a run that is slow.

"""

from __future__ import annotations

from collections.abc import Sequence

from oobleck.control.events import SendAll, Turn
from oobleck.control.journal import PlanCause, StepRunsLong
from oobleck.control.protocol import Activity, AskActivity, ProcessorUse
from oobleck.control.recovery import BeginRecovery
from oobleck.control.steps import HANG_FLOOR_S, Progress, stuck_workers
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId

# A process that uses this share of a core computes. One that sleeps, and polls now and then, uses far less.
_BUSY_SHARE = 0.1
# The longest time between two inquiries: a worker may get stuck after it has computed for hours.
_LONGEST_S = 600.0


class HangWatch:
    """Asks the workers of a late step what they do, and judges their answers."""

    def __init__(self, control: ControlSpec, progress: Progress) -> None:
        self._control = control
        self._progress = progress
        self._number = 0
        self._hangs_s = 0.0
        """The deadline that the newest inquiry is about."""
        self._answers: dict[WorkerId, Activity] = {}
        self._busy: set[WorkerId] = set()

    @property
    def due_s(self) -> float:
        """When to ask, or to judge the answers; infinity for never."""
        hangs_s = self._progress.hangs_s
        return hangs_s if hangs_s == self._hangs_s else hangs_s - self._lead_s

    @property
    def _lead_s(self) -> float:
        """How long before the deadline to ask, so that asking delays no finding."""
        return min(self._control.lease_s, (self._progress.hangs_s - self._progress.progressed_s) / 2)

    def answered(self, worker_id: WorkerId, message: Activity | ProcessorUse) -> None:
        """Note an answer to the newest inquiry, and drop others."""
        if message.inquiry != self._number:
            return
        match message:
            case Activity():
                self._answers[worker_id] = message
            case ProcessorUse(used_s=used_s, within_s=within_s):
                if used_s > 0 and used_s >= _BUSY_SHARE * within_s:
                    self._busy.add(worker_id)

    def handle_deadline(self, turn: Turn, asked: Sequence[WorkerId]) -> BeginRecovery | None:
        """Ask these workers, or judge their answers and return the recovery that a hang leads to."""
        if turn.now_s < self.due_s:
            return None
        if self._progress.hangs_s == self._hangs_s or not asked:
            return self._judge(turn)
        left_s = self._progress.hangs_s - turn.now_s
        if left_s <= 0:  # This call is late.
            left_s = self._lead_s
        self._number += 1
        self._hangs_s = max(self._progress.hangs_s, turn.now_s + left_s)
        self._progress.allow(self._hangs_s)
        # The other half of the time is for the answers to arrive.
        ask = AskActivity(device=0, inquiry=self._number, patience_s=left_s / 2)
        turn.do((SendAll(worker_ids=tuple(asked), message=ask),))
        return None

    def _judge(self, turn: Turn) -> BeginRecovery | None:
        answers, busy, running_s = self._answers, self._busy, turn.now_s - self._progress.progressed_s
        # The next judgement may be without an inquiry, if there is no worker left to ask.
        self._answers, self._busy = {}, set()
        # A worker that waits for others does not compute, whatever its process uses the processor for.
        comes_on = busy.difference(worker_id for worker_id, answer in answers.items() if answer.waits_for)
        comes_on.update(worker_id for worker_id, answer in answers.items() if answer.has_come_on)
        # Rejected: a limit for the time of a step. With compilation, on a busy machine, a first step takes longer than
        # any limit that finds a hang in useful time.
        if not comes_on or stuck_workers(answers, busy):
            return BeginRecovery(cause=PlanCause.HANG, detect_s=running_s, busy=tuple(sorted(busy)))
        computing = tuple(sorted(each for each in comes_on if each not in answers or not answers[each].waits_for))
        first = answers.get(computing[0]) if computing else None
        # A step that has taken long may take as long again before all are asked once more.
        self._progress.allow(turn.now_s + min(max(running_s, HANG_FLOOR_S), _LONGEST_S))
        turn.record(
            StepRunsLong(
                t_s=turn.now_s,
                step=self._progress.last_step + 1,
                running_s=running_s,
                computing=computing,
                microbatch=None if first is None else first.microbatches_done,
            )
        )
        return None
