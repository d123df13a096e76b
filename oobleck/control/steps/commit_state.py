"""Where a worker stands: the state that its two threads share, and the moments that decide a commit.

The control thread answers fences from it; the training thread moves it on. Three moments matter: `note_reduced`
(the worker joins the commit), `begin_apply` (the step counts) and `adopt` (the plan is in force); and two like the
first for sections of a step, `note_section_reduced` and `commit_section`. Each is passed before a fence, and then the
answer says so, or not at all. So what a worker answers stays true until its next
order, and the coordinator's view of all answers is never half of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from oobleck.control import protocol
from oobleck.control.plans import WrongBase, update_of
from oobleck.planner import ExecutionPlan, WorkerId


class Interrupted(Exception):
    """The control thread wants the training thread to stop what it does and look for its next plan update."""


class PeerLost(Exception):
    """A collective or a transfer failed: most likely a peer is gone, and a plan update will follow."""


class CommitState:
    """Every method is atomic under `lock`: real threads bring a real one, virtual ones need none.

    `announce` is called after each change that a wait may look for.
    """

    def __init__(
        self, worker_id: WorkerId, announce: Callable[[], None], *, lock: AbstractContextManager[object]
    ) -> None:
        self.worker_id = worker_id
        self._announce = announce
        self._lock = lock
        self._fence = 0
        self._generation = 0
        self._update: protocol.PlanUpdate | None = None
        self._known: protocol.OrderedPlan | None = None
        """The newest plan that was ordered: the next order may be a change of it."""
        self._pipeline_lost = False
        self._stop_wanted = False
        self._plan: ExecutionPlan | None = None
        self._adopted = 0
        self._layers: tuple[int, ...] = ()
        self._kept: tuple[int, ...] = ()
        self._applied = 0
        self._last_record: protocol.CommitRecord | None = None
        self._reduced: int | None = None
        self._partial: protocol.SectionRecord | None = None
        self._section_reduced: int | None = None
        self._microbatches_done = 0
        self._broken = False
        self._open_sums = False
        self._forming = False

    # --- control thread ------------------------------------------------------------------------------------

    def answer(self, fence: protocol.Fence) -> protocol.Status:
        """Raise the fence and say where this worker stands; from now on nothing older is applied.

        An older update that the training thread has not taken yet is dropped.
        """
        with self._lock:
            self._fence = max(self._fence, fence.generation)
            if self._update is not None and self._update.generation < self._fence:
                self._update = None
            self._note_lost(fence.lost)
            status = protocol.Status(
                device=self.worker_id.device,
                generation=fence.generation,
                applied=self._applied,
                last_record=self._last_record,
                reduced=self._reduced,
                adopted=self._adopted,
                layers=tuple(sorted({*self._layers, *self._kept})),
                microbatches_done=self._microbatches_done,
                broken=self._broken,
                partial=self._partial,
                section_reduced=self._section_reduced,
                has_open_groups=self._open_sums or self._forming,
                knows=None if self._known is None else self._known.id,
            )
        self._announce()
        return status

    def give_order(self, order: protocol.PlanOrder) -> protocol.PlanNeeded | None:
        """Leave the plan update of an order for the training thread, or ask for the whole plan.

        Only the control thread comes here, so what is known does not change meanwhile. O(nodes). Raises WrongBase for
        a whole plan that cannot be rebuilt.
        """
        try:
            update = update_of(self._known, order, self.worker_id)
        except WrongBase:
            if order.common.delta.base is None:
                raise
            return protocol.PlanNeeded(device=self.worker_id.device, generation=order.generation)
        self.give_update(update)
        return None

    def give_update(self, update: protocol.PlanUpdate) -> None:
        """Leave a plan update for the training thread; one it has not taken yet is replaced by a newer one."""
        ordered = update.ordered
        with self._lock:
            if self._known is None or ordered.generation > self._known.generation:
                self._known = ordered
            if update.generation >= max(self._fence, self._generation + 1):
                self._update = update
                if update.finish is not None:  # nodes may be lost that the fence did not name
                    self._note_lost(update.lost)
        self._announce()

    def want_stop(self) -> None:
        """Ask for an end after the next commit."""
        with self._lock:
            self._stop_wanted = True

    # --- either thread, without the lock: one read of one field ----------------------------------------------

    @property
    def has_update(self) -> bool:
        return self._update is not None

    @property
    def is_stop_wanted(self) -> bool:
        return self._stop_wanted

    @property
    def applied(self) -> int:
        return self._applied

    @property
    def generation(self) -> int:
        """Of the plan update that is followed."""
        return self._generation

    @property
    def adopted(self) -> int:
        return self._adopted

    @property
    def layers(self) -> tuple[int, ...]:
        """What is held under the plan in force."""
        return self._layers

    @property
    def kept(self) -> tuple[int, ...]:
        """What is kept for others besides."""
        return self._kept

    @property
    def microbatches_done(self) -> int:
        return self._microbatches_done

    @property
    def is_broken(self) -> bool:
        return self._broken

    @property
    def is_forming(self) -> bool:
        """Groups for sums are being formed beside what is computed."""
        return self._forming

    def is_fenced(self) -> bool:
        """Reductions, commits and transfers of an older generation are not waited for."""
        return self._fence > self._generation

    def is_pipeline_stopped(self) -> bool:
        """A whole pipeline finishes its microbatches through a fence; one that lost a node stops at once,
        and so does any when the update says to forget the step."""
        update = self._update
        return (self._pipeline_lost and self._fence > self._generation) or (
            update is not None and update.finish is None
        )

    # --- training thread -----------------------------------------------------------------------------------

    def take_update(self) -> protocol.PlanUpdate | None:
        """Take the newest plan update, if there is one: from now on its generation is ours."""
        with self._lock:
            update, self._update = self._update, None
            if update is not None:
                self._generation = update.generation
                self._open_sums = self._forming = False  # if there were any, no group of theirs is kept
            return update

    def begin_step(self) -> None:
        """Note that nothing is done of the step in flight but what is committed."""
        with self._lock:
            self._reduced = None
            self._section_reduced = None
            self._microbatches_done = 0
            self._broken = False

    def note_microbatch(self, count: int = 1) -> None:
        """Count microbatches that were taken backward."""
        with self._lock:
            self._microbatches_done += count

    def note_broken(self) -> None:
        """Note that a program failed half-way: this worker's part of the step in flight is discarded."""
        with self._lock:
            self._broken = True

    def begin_forming(self) -> None:
        """Note that groups for sums are being formed beside what follows."""
        with self._lock:
            self._forming = True

    def note_formed(self) -> None:
        """Note that these groups are formed: they can be kept. Where a fence was told otherwise, they are not."""
        with self._lock:
            self._forming = False

    def begin_sums(self) -> None:
        """Note that the caller posts its part in sums of gradients next: they are open until all are here.

        Raises Interrupted when a fence came first: the answer to it said that none are open, so their groups may be
        kept.
        """
        with self._lock:
            self._check_fence()
            assert not self._forming, "sums are posted in groups that are formed"
            self._open_sums = True

    def note_reduced(self, step: int) -> None:
        """Note that the fully reduced gradients of `step` are here: the caller joins the step's commit next.

        Raises Interrupted when a fence came first: the answer to it said that they are not here, so no peer may
        come to apply the step because of this worker.
        """
        with self._lock:
            self._check_fence()
            self._reduced = step
            self._open_sums = False

    def note_section_reduced(self, number: int) -> None:
        """Note that the fully reduced gradients of a section are here; like `note_reduced`.

        Raises Interrupted when a fence came first.
        """
        with self._lock:
            self._check_fence()
            self._section_reduced = number
            self._open_sums = False

    def give_back_section(self) -> None:
        """Note that the sums of the section on its way are dropped: no worker has committed it, and none can."""
        with self._lock:
            self._section_reduced = None

    def commit_section(self, record: protocol.SectionRecord) -> None:
        """Pass the point of no return of a section: no failure of others takes it any more.

        What was kept for others is behind from here on, and all have adopted the plan. Raises Interrupted when a fence
        came first.
        """
        with self._lock:
            self._check_fence()
            self._commit_section(record)

    def begin_apply(self, record: protocol.CommitRecord) -> None:
        """Pass the point of no return of a commit: the caller applies the step next, and nothing stops it.

        Raises Interrupted when a fence came first.
        """
        with self._lock:
            self._check_fence()
            self._move_to(record)

    def catch_up(self, record: protocol.CommitRecord) -> bool:
        """Like `begin_apply`, as the plan update says: some worker has applied the step, so it counts whatever happens.

        Returns False for one that took no part in the step, or has applied it: it has nothing to apply.
        """
        with self._lock:
            if self._reduced != record.step:
                return False
            assert record.step == self._applied + 1, (record.step, self._applied)
            self._move_to(record)
            return True

    def catch_up_section(self, record: protocol.SectionRecord) -> bool:
        """Like `commit_section`, as the update says: some worker has committed it. False if there is none."""
        with self._lock:
            if self._section_reduced != record.number or self._adopted != record.generation:
                return False
            assert record.step == self._applied + 1, (record.step, self._applied)
            self._commit_section(record)
            return True

    def adopt(self, update: protocol.PlanUpdate, layers: tuple[int, ...], kept: tuple[int, ...] = ()) -> None:
        """Put the new plan in force: from here on nothing stops the caller from taking the layers.

        They count as held, at the boundary's version. So do those `kept` for others, until the next step is
        applied: by then all have adopted the plan. Raises Interrupted when a fence came first.
        """
        with self._lock:
            self._check_fence()
            self._plan = update.plan
            self._adopted = update.generation
            self._applied = update.boundary
            if update.restore is not None or update.initial:
                self._last_record = None  # steps after what is gone back to are as if they had never been
            self._layers = layers
            self._kept = kept
            self._reduced = None
            self._partial = None
            self._section_reduced = None
            self._microbatches_done = 0
            self._pipeline_lost = False

    def _note_lost(self, lost: Collection[str]) -> None:
        located = self._plan.locate(self.worker_id) if self._plan else None
        if self._plan is not None and located is not None:
            nodes = self._plan.pipelines[located[0]].nodes
            self._pipeline_lost = self._pipeline_lost or any(node in lost for node in nodes)

    def _check_fence(self) -> None:
        if self._fence > self._generation:
            raise Interrupted

    def _move_to(self, record: protocol.CommitRecord) -> None:
        self._applied = record.step
        self._kept = ()
        self._last_record = record
        self._reduced = None
        self._partial = None
        self._section_reduced = None
        self._microbatches_done = 0

    def _commit_section(self, record: protocol.SectionRecord) -> None:
        self._partial = record
        self._section_reduced = None
        self._kept = ()
