"""The consent to each next step, of a job's script and of its saves: callbacks hear of a step before another begins.

    a step is committed ──> in the journal, which the script follows ──> ScriptAnswered ──> StepsAllowed to all workers
                                                                    └──> StopRequested ──> StepsOver

So a callback that stops training stops it at the step where it asks for that. A script answers where its callbacks can
act, which may be every step, or those with an evaluation; steps up to there need no other word. With
`checkpoint.waits_for_disk` a step to save begins once the save before it is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from oobleck.control import protocol
from oobleck.control.events import ScriptAnswered, SendAll, Turn
from oobleck.control.steps import HANG_FLOOR_S, Progress
from oobleck.job import JobSpec
from oobleck.planner import WorkerId


class Consent:
    def __init__(
        self,
        job: JobSpec,
        progress: Progress,
        *,
        worker_ids: Callable[[], Iterable[WorkerId]],
        let_begin: Callable[[], float],
    ) -> None:
        """`worker_ids` returns the newest plan's reachable workers; `let_begin` the last step that saves let begin."""
        self._job = job
        self._progress = progress
        self._worker_ids = worker_ids
        self._let_begin = let_begin
        self._script_through = 0 if job.control.waits_for_script else job.max_steps
        """The last step that may begin for all that the script has heard."""
        self._through = 0
        """The last step that may have begun."""
        self._told: tuple[int, int] = (0, 0)
        """(generation, last step) of the newest `StepsAllowed`."""
        self._over: tuple[int, int] | None = None
        """(generation, step) of the newest `StepsOver`."""
        self._is_stopped = False
        self._is_alone = False
        """Whether the script has ended, so that no step needs its consent."""
        self._was_waiting = False

    @property
    def is_on(self) -> bool:
        return self._job.needs_consent

    def can_finish(self, step: int) -> bool:
        """Whether some worker may have begun a step."""
        return not self.is_on or step <= self._through

    def answered(self, event: ScriptAnswered) -> None:
        # An answer for a later step was on its way when the run went back.
        if event.step <= self._progress.last_step:
            self._script_through = max(self._script_through, event.through)

    def end_asking(self) -> None:
        """Let all steps begin, as there is no script any more."""
        self._script_through = self._job.max_steps
        self._is_alone = True

    def stop(self) -> None:
        """Let no further step begin."""
        self._is_stopped = True

    def take_over(self) -> None:
        # What an earlier master had heard of its script is unknown. This one's hears of the next step.
        self._hear_from(self._progress.last_step + 1)

    def go_back(self, step: int) -> None:
        """Note that the steps after this one are run again: the script hears of the first of them before the next."""
        self._hear_from(min(self._through, step + 1))

    def _hear_from(self, step: int) -> None:
        self._through = step
        if self._job.control.waits_for_script and not self._is_alone:
            self._script_through = step

    def send_again(self, turn: Turn, worker_ids: Iterable[WorkerId]) -> None:
        """Repeat the newest message to workers, which may be lost."""
        generation, through = self._told
        if generation and (targets := tuple(worker_ids)):
            allowed = protocol.StepsAllowed(device=0, generation=generation, through=through)
            turn.do((SendAll(worker_ids=targets, message=allowed),))
        self._over = None

    def go_on(self, turn: Turn, generation: int, *, save: bool) -> None:
        """Tell workers which steps may begin, or that none follows. Call it after every event while training.

        `save`: the newest state is not saved, and has to be if no step follows it.
        """
        if not self.is_on:
            return
        allowed = self._through if self._is_stopped else self._allowed_now(generation)
        self._through = max(self._through, allowed)
        progress, targets = self._progress, tuple(self._worker_ids())
        if allowed and self._told != (generation, allowed):
            self._told = generation, allowed
            message = protocol.StepsAllowed(device=0, generation=generation, through=allowed)
            turn.do((SendAll(worker_ids=targets, message=message),))
        is_waiting = allowed <= progress.last_step < self._job.max_steps
        if is_waiting and self._is_stopped:
            self._end(turn, generation, targets, save=save)
        elif is_waiting and not progress.owes_evaluation(progress.last_step):
            progress.expect(math.inf, turn.now_s)  # the script may take long, and no step hangs meanwhile
            self._was_waiting = True
        elif self._was_waiting:
            self._was_waiting = False
            last = progress.last_record
            is_first = last is None or last.generation != generation  # of its plan, which has to be adopted
            progress.expect(self._job.control.start_timeout_s if is_first else HANG_FLOOR_S, turn.now_s)

    def _allowed_now(self, generation: int) -> int:
        """Return the last step that may begin; within a plan it never goes back."""
        now = int(min(self._script_through, self._let_begin()))
        told_generation, told = self._told
        return max(now, told) if told_generation == generation else now

    def _end(self, turn: Turn, generation: int, targets: tuple[WorkerId, ...], *, save: bool) -> None:
        step = self._progress.last_step
        # This is called after every event, and each plan's workers learn of the end once.
        if self._over == (generation, step):
            return
        self._over = generation, step
        # All workers have to report that they have finished.
        self._progress.expect(self._job.control.start_timeout_s, turn.now_s)
        over = protocol.StepsOver(device=0, step=step, generation=generation, save=save)
        turn.do((SendAll(worker_ids=targets, message=over),))
