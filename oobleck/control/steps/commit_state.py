"""Where a worker stands: the state that its two threads share, and the moments that decide a commit.

The control thread answers fences from it; the training thread advances it (`follower.py`). Three moments matter:
`note_reduced` (the worker joins the commit), `begin_apply` (the step counts) and `adopt` (the plan is in force).
Sections of a step have two more, `note_section_reduced` and `commit_section`. A worker passes each moment before a
fence, and then its answer says so, or not at all. So its answer stays true until its next order, and all answers
together never show half a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from oobleck.control import protocol
from oobleck.control.plans import WrongBase, update_of
from oobleck.planner import ExecutionPlan, WorkerId


class Interrupted(Exception):
    """The control thread wants the training thread to look for its next plan update."""


class PeerLost(Exception):
    """A collective or a transfer failed: most likely a peer is lost, and a plan update will follow."""


class CommitState:
    """Every method is atomic under `lock`. Those that raise Interrupted do so if a fence came first.

    `announce` is called after each change that a wait may look for.
    """

    def __init__(
        self, worker_id: WorkerId, announce: Callable[[], None], *, lock: AbstractContextManager[object]
    ) -> None:
        self.worker_id = worker_id
        self._announce = announce
        self._lock = lock
        self._fence = 0
        self._update: protocol.PlanUpdate | None = None
        self._known: protocol.OrderedPlan | None = None
        """The newest ordered plan, of which the next order may be a change."""
        self._pipeline_lost = False
        self._plan: ExecutionPlan | None = None
        self._last_record: protocol.CommitRecord | None = None
        self._reduced: int | None = None
        self._partial: protocol.SectionRecord | None = None
        self._section_reduced: int | None = None
        self._open_sums = False
        # Only the methods below write the following, but either thread reads each of them without the lock.
        self.generation = 0
        """The generation of the plan update that the worker follows."""
        self.adopted = 0
        self.applied = 0
        self.layers: tuple[int, ...] = ()
        """Held under the plan in force."""
        self.kept: tuple[int, ...] = ()
        """Kept for others in addition."""
        self.microbatches_done = 0
        self.is_broken = False
        self.is_forming = False
        """Groups for sums are forming in the background."""
        self.is_stop_wanted = False

    # --- control thread ------------------------------------------------------------------------------------

    def answer(self, fence: protocol.Fence) -> protocol.Status:
        """Raise the fence and say where this worker stands. From now on nothing older is applied."""
        with self._lock:
            self._fence = max(self._fence, fence.generation)
            # An older update that the training thread has not taken yet is dropped.
            if self._update is not None and self._update.generation < self._fence:
                self._update = None
            self._note_lost(fence.lost)
            status = protocol.Status(
                device=self.worker_id.device,
                generation=fence.generation,
                applied=self.applied,
                last_record=self._last_record,
                reduced=self._reduced,
                adopted=self.adopted,
                layers=tuple(sorted({*self.layers, *self.kept})),
                microbatches_done=self.microbatches_done,
                broken=self.is_broken,
                partial=self._partial,
                section_reduced=self._section_reduced,
                has_open_groups=self._open_sums or self.is_forming,
                knows=None if self._known is None else self._known.id,
            )
        self._announce()
        return status

    def give_order(self, order: protocol.PlanOrder) -> protocol.PlanNeeded | None:
        """Leave an order's update for the training thread, or ask for the whole plan. O(nodes). Raises WrongBase."""
        try:
            # Without the lock: only this thread changes what is known.
            update = update_of(self._known, order, self.worker_id)
        except WrongBase:
            if order.common.delta.base is None:
                raise  # It is the whole plan, and cannot be rebuilt.
            return protocol.PlanNeeded(device=self.worker_id.device, generation=order.generation)
        self.give_update(update)
        return None

    def give_update(self, update: protocol.PlanUpdate) -> None:
        """Leave a plan update for the training thread, in place of an older one that it has not taken yet."""
        ordered = update.ordered
        with self._lock:
            if self._known is None or ordered.generation > self._known.generation:
                self._known = ordered
            # A newer fence has overtaken an older order, and a repeated one is followed already.
            if update.generation >= max(self._fence, self.generation + 1):
                self._update = update
                if update.finish is not None:  # Nodes may be lost that the fence did not name.
                    self._note_lost(update.lost)
        self._announce()

    def want_stop(self) -> None:
        """Ask for an end after the next commit."""
        with self._lock:
            self.is_stop_wanted = True

    # --- either thread, without the lock: each reads a field once --------------------------------------------

    @property
    def has_update(self) -> bool:
        return self._update is not None

    def is_fenced(self) -> bool:
        """Whether to stop waiting for reductions, commits and transfers of an older generation."""
        return self._fence > self.generation

    def is_pipeline_stopped(self) -> bool:
        """Whether the pipeline stops computing."""
        # A whole pipeline finishes its microbatches in spite of a fence. One that lost a node stops at once, and so
        # does any if the update says to forget the step.
        update = self._update
        return (self._pipeline_lost and self._fence > self.generation) or (update is not None and update.finish is None)

    # --- training thread -----------------------------------------------------------------------------------

    def take_update(self) -> protocol.PlanUpdate | None:
        """Take the newest plan update, if there is one, and follow its generation from now on."""
        with self._lock:
            update, self._update = self._update, None
            if update is not None:
                self.generation = update.generation
                self._open_sums = self.is_forming = False  # If there were any, the update keeps none of their groups.
            return update

    def begin_step(self) -> None:
        """Note that nothing is done of the step in flight but what is committed."""
        with self._lock:
            self._forget_step()
            self.is_broken = False

    def note_microbatch(self, count: int = 1) -> None:
        """Count microbatches that were taken backward."""
        with self._lock:
            self.microbatches_done += count

    def note_broken(self) -> None:
        """Note that a program failed half-way: this worker's part of the step in flight is discarded."""
        with self._lock:
            self.is_broken = True

    def begin_forming(self) -> None:
        with self._lock:
            self.is_forming = True

    def note_formed(self) -> None:
        """Note that these groups are formed, and can be kept unless a fence was answered before."""
        with self._lock:
            self.is_forming = False

    def begin_sums(self) -> None:
        """Note that the caller posts sums next, which are open until all parts arrive. Raises Interrupted."""
        with self._lock:
            self._check_fence()  # Its answer said that no sums are open, so their groups may be kept.
            assert not self.is_forming, "sums are posted in groups that are formed"
            self._open_sums = True

    def note_reduced(self, step: int) -> None:
        """Note that the reduced gradients of `step` are here: the caller joins its commit. Raises Interrupted."""
        with self._lock:
            # The answer to a fence denied that they are here, so this worker may not help a peer to apply the step.
            self._check_fence()
            self._reduced = step
            self._open_sums = False

    def note_section_reduced(self, number: int) -> None:
        """Note that the reduced gradients of a section have arrived. Raises Interrupted."""
        with self._lock:
            self._check_fence()
            self._section_reduced = number
            self._open_sums = False

    def give_back_section(self) -> None:
        """Note that the sums of the section on its way are dropped: no worker has committed it, and none can."""
        with self._lock:
            self._section_reduced = None

    def commit_section(self, record: protocol.SectionRecord) -> None:
        """Pass the point of no return of a section: no failure of others can undo it. Raises Interrupted."""
        with self._lock:
            self._check_fence()
            self._commit_section(record)

    def begin_apply(self, record: protocol.CommitRecord) -> None:
        """Pass the point of no return of a commit: the caller applies the step next. Raises Interrupted."""
        with self._lock:
            self._check_fence()
            self._move_to(record)

    def catch_up(self, record: protocol.CommitRecord) -> bool:
        """Pass that point because some worker has applied the step; False if this worker has nothing to apply."""
        with self._lock:
            # It has applied the step already, or had no part in it.
            if self._reduced != record.step:
                return False
            assert record.step == self.applied + 1, (record.step, self.applied)
            self._move_to(record)
            return True

    def catch_up_section(self, record: protocol.SectionRecord) -> bool:
        """Commit a section because the update says that some worker has. Returns False if it is not pending here."""
        with self._lock:
            if self._section_reduced != record.number or self.adopted != record.generation:
                return False
            assert record.step == self.applied + 1, (record.step, self.applied)
            self._commit_section(record)
            return True

    def adopt(self, update: protocol.PlanUpdate, layers: tuple[int, ...], kept: tuple[int, ...] = ()) -> None:
        """Put the new plan in force: nothing stops the caller from taking the layers. Raises Interrupted."""
        with self._lock:
            self._check_fence()
            self._plan = update.plan
            self.adopted = update.generation
            self.applied = update.boundary
            if update.restore is not None or update.initial:
                self._last_record = None  # Steps after the restored one do not count any more.
            # All of these count as held, at the boundary's version. Those kept for others do until the next step is
            # applied: by then all have adopted the plan.
            self.layers = layers
            self.kept = kept
            self._partial = None
            self._forget_step()
            self._pipeline_lost = False

    def _note_lost(self, lost: Collection[str]) -> None:
        located = self._plan.locate(self.worker_id) if self._plan else None
        if self._plan is not None and located is not None:
            nodes = self._plan.pipelines[located[0]].nodes
            self._pipeline_lost = self._pipeline_lost or any(node in lost for node in nodes)

    def _check_fence(self) -> None:
        if self._fence > self.generation:
            raise Interrupted

    def _move_to(self, record: protocol.CommitRecord) -> None:
        self.applied = record.step
        self.kept = ()
        self._last_record = record
        self._partial = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._reduced = self._section_reduced = None
        self.microbatches_done = 0

    def _commit_section(self, record: protocol.SectionRecord) -> None:
        self._partial = record
        self._section_reduced = None
        # All have adopted the plan by now, and what was kept for others is a section behind.
        self.kept = ()
