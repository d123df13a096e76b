"""The next save: scheduled by time, or asked of all workers after a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from oobleck.control import protocol
from oobleck.control.events import Turn
from oobleck.control.nodes import Membership
from oobleck.job import JobSpec

from .saves import SavePolicy

RETRY_S = 30.0
"""The least time from a failed save to the next."""
# Without this limit a master that took over, and does not know of a lost share, would wait for it endlessly.
COPY_PATIENCE_S = 120.0
"""A save that is not whole in memory by then is given up."""


@dataclass(frozen=True, slots=True)
class _Idle:
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class _Wanted:
    """All workers were told to save after a step."""

    step: int


class SaveRequests:
    """What workers are asked to save next, and how far they may train meanwhile."""

    def __init__(self, job: JobSpec, members: Membership) -> None:
        self._job = job
        self._members = members
        self._policy = SavePolicy(spec=job.checkpoint)
        self.ordered: protocol.OrderedPlan | None = None
        """The plan whose workers are asked."""
        self.last_step = 0
        self._done_s = math.inf
        self._begun = 0
        """With `waits_for_disk`, the last step that workers of the newest plan may have begun."""
        self._next: _Idle | _Wanted = _Idle()

    @property
    def is_enabled(self) -> bool:
        """Whether the user wants checkpoints, and all workers have a place for them."""
        return self._job.checkpoint.enabled and self._members.all_save

    @property
    def due_s(self) -> float:
        """When a save is due, or one that was asked for is overdue, if none is under way; infinity for never."""
        if isinstance(self._next, _Wanted):
            return self._done_s + COPY_PATIENCE_S if self._is_overdue else math.inf
        return self._next.until_s

    @property
    def _is_overdue(self) -> bool:
        """Whether steps wait for a save whose step is done, and of which no worker has reported anything."""
        is_past = isinstance(self._next, _Wanted) and self._next.step <= self.last_step
        return is_past and self._job.checkpoint.waits_for_disk

    def let_begin(self, *, is_saving: bool) -> float:
        """Return the last step that may begin now, as the job waits for its saves."""
        every = self._job.checkpoint.save_steps
        if not self._job.checkpoint.waits_for_disk or every is None:
            return math.inf
        due = (self.last_step // every + 1) * every
        # Workers save after a step only if they were asked before its commit.
        is_asked = self._next.step >= due if isinstance(self._next, _Wanted) else not is_saving
        through = due + every - 1 if is_asked or not self.is_enabled else due - 1
        self._begun = max(self._begun, through)
        return through

    @property
    def _next_to_ask(self) -> int:
        """The next step to ask a save of."""
        every = self._job.checkpoint.save_steps
        if not self._job.checkpoint.waits_for_disk or every is None:
            return self.last_step + 1  # workers that are beyond it save the one after
        # No worker is beyond it. Otherwise the save would be of a step that waits for it.
        return (max(self.last_step, self._begun) // every + 1) * every

    @property
    def _least_wanted(self) -> int:
        """The first step after which workers of a new plan can be asked to save."""
        # Workers that have saved an older one already ignore its request. Without the wait, nothing depends on it.
        return self.last_step + 1 if self._job.checkpoint.waits_for_disk else 0

    # --- what happens ----------------------------------------------------------------------------------------

    def step_done(self, step: int, now_s: float) -> None:
        self.last_step, self._done_s = step, now_s

    def know_plan(self, ordered: protocol.OrderedPlan) -> None:
        """Ask the workers of this plan from now on; all of them are at its boundary."""
        self.ordered = ordered
        self.last_step = self._begun = ordered.boundary

    def ask_plan(self, turn: Turn, ordered: protocol.OrderedPlan, *, redundant: bool, is_saving: bool) -> None:
        """Ask the workers of a new plan for the next save: at once if the plan is not redundant."""
        if self.is_enabled and not redundant:
            self._next = _Wanted(ordered.boundary + 1)
        if isinstance(self._next, _Idle):
            # A plan never postpones a save that was scheduled: under frequent losses none would ever be due.
            self.schedule(turn, is_saving=is_saving, by_s=self._next.until_s)
        elif self.is_enabled:  # its workers may not be those that were asked, and the run may have gone back
            first = self._policy.next_step(self.last_step) or self._next.step
            self._next = _Wanted(max(self._least_wanted, min(self._next.step, first)))
            self._ask(turn, self._next.step)

    def answered(self, step: int) -> None:
        """Note that a share of a save is whole in memory."""
        # A late share of an earlier step does not answer the newest request.
        if isinstance(self._next, _Idle) or step >= self._next.step:
            self._next = _Idle()

    def completed(self, cost_s: float, disk_s: float) -> None:
        """Count the costs of a complete save, as `SavePolicy` has them."""
        self._policy = replace(self._policy, cost_s=cost_s, disk_s=disk_s)

    def restored(self) -> None:
        """Count a failure that needed a checkpoint."""
        self._policy = replace(self._policy, num_failures=self._policy.num_failures + 1)

    # --- what is asked ---------------------------------------------------------------------------------------

    def ask_now(self, turn: Turn) -> None:
        """Have the state saved after the next step."""
        if self.is_enabled and self.ordered is not None:
            self.ask_again(turn)

    def ask_due(self, turn: Turn) -> None:
        """Have the state saved after the next step, as the time for it has come."""
        self._next = _Idle()  # if nothing can be saved now, this deadline must not stay due
        self.ask_now(turn)

    def ask_again(self, turn: Turn) -> None:
        """Want a save after the next step, of the next plan's workers where there is none."""
        self._next = _Wanted(self._next_to_ask)
        # A plan that follows a loss asks its workers again. Where it is adopted already, none may follow.
        if self.is_enabled and self.ordered is not None:
            self._ask(turn, self._next.step)

    def schedule(self, turn: Turn, *, is_saving: bool, not_before_s: float = 0.0, by_s: float = math.inf) -> None:
        """Schedule the next save, unless one is wanted or under way, after which this is called again."""
        if not self.is_enabled or is_saving or self.ordered is None or isinstance(self._next, _Wanted):
            return
        step = self._policy.next_step(self.last_step)
        if step is None or not_before_s > turn.now_s:
            self._next = _Idle(max(not_before_s, min(by_s, turn.now_s + self._policy.interval_s(turn.now_s))))
        else:
            self._next = _Wanted(step)
            self._ask(turn, step)

    def _ask(self, turn: Turn, step: int) -> None:
        assert self.ordered is not None
        for worker_id in self.ordered.plan.worker_ids:
            # A worker that is being restarted gets another plan first, and is asked then.
            if self._members[worker_id.node].is_ready:
                turn.send(worker_id.node, protocol.SaveState(device=worker_id.device, step=step))
