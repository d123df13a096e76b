"""What a worker answers stays true until its next order: every race of a fence with the training thread."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from oobleck.control.plans import WrongBase, orders_of
from oobleck.control.protocol import (
    CommitRecord,
    Fence,
    OrderedPlan,
    PlanNeeded,
    PlanOrder,
    PlanUpdate,
    SectionRecord,
    Status,
)
from oobleck.control.steps.commit_state import CommitState, Interrupted
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind
from tests.control.journals import plan

PLACE = WorkerId(node="a", device=0)
PLAN = plan(("a", "b"), ("c", "d"))


def record(step: int) -> CommitRecord:
    return CommitRecord(
        step=step,
        generation=1,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        num_samples=1,
        samples_repeated=0,
        samples_missing=0,
        duration_s=1.0,
    )


def update(generation: int, layout: ExecutionPlan = PLAN, **fields) -> PlanUpdate:
    count = len(layout.pipelines)
    defaults = {
        "plan": layout,
        "pipeline_generations": (generation,) * count,
        "schedules": (ScheduleKind.ONE_F_ONE_B,) * count,
    }
    return PlanUpdate(generation=generation, **(defaults | {"boundary": 0} | fields))


class Worker:
    """A standing, with the two threads' calls in one."""

    def __init__(self) -> None:
        self.announced = 0
        self.commit_state = CommitState(PLACE, self._announce, lock=nullcontext())

    def _announce(self) -> None:
        self.announced += 1

    def fence(self, generation: int, lost: tuple[str, ...] = ()) -> Status:
        return self.commit_state.answer(Fence(device=0, generation=generation, lost=lost))

    def adopt(self, generation: int, *, boundary: int = 0, kept: tuple[int, ...] = ()) -> None:
        given = update(generation, boundary=boundary)
        self.commit_state.give_update(given)
        assert self.commit_state.take_update() is given
        self.commit_state.adopt(given, (0, 1), kept)

    def reduce_and_apply(self, step: int) -> None:
        self.commit_state.note_reduced(step)
        self.commit_state.begin_apply(record(step))


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.adopt(1)
    return worker


def test_a_new_worker_has_nothing():
    status = Worker().fence(1)
    assert (status.generation, status.applied, status.adopted, status.layers) == (1, 0, 0, ())
    assert status.last_record is None
    assert status.reduced is None


def test_a_step_is_applied_before_the_fence_or_not_at_all(worker: Worker):
    worker.reduce_and_apply(1)
    assert worker.fence(2).applied == 1
    late = Worker()
    late.adopt(1)
    late.commit_state.note_reduced(1)
    status = late.fence(2)
    assert (status.applied, status.reduced) == (0, 1)
    with pytest.raises(Interrupted):
        late.commit_state.begin_apply(record(1))
    assert late.commit_state.applied == 0


def test_a_commit_is_joined_before_the_fence_or_not_at_all(worker: Worker):
    assert worker.fence(2).reduced is None
    with pytest.raises(Interrupted):
        worker.commit_state.note_reduced(1)
    assert worker.fence(3).reduced is None


def test_a_plan_is_adopted_before_the_fence_or_not_at_all(worker: Worker):
    given = update(2)
    worker.commit_state.give_update(given)
    assert worker.commit_state.take_update() is given
    assert worker.fence(3).adopted == 1
    with pytest.raises(Interrupted):
        worker.commit_state.adopt(given, (5,))
    assert worker.fence(4).layers == (0, 1)


def test_an_order_not_taken_before_a_fence_is_not_taken_after_it(worker: Worker):
    worker.commit_state.give_update(update(2))
    worker.fence(3)
    assert not worker.commit_state.has_update
    assert worker.commit_state.take_update() is None


def test_an_order_that_a_fence_overtook_is_dropped(worker: Worker):
    worker.fence(3)
    worker.commit_state.give_update(update(2))
    assert not worker.commit_state.has_update
    worker.commit_state.give_update(update(3))
    assert worker.commit_state.has_update


def test_an_old_fence_does_not_lower_a_newer_one(worker: Worker):
    worker.fence(3)
    assert worker.fence(2).generation == 2
    worker.commit_state.give_update(update(2))
    assert not worker.commit_state.has_update


def test_gradients_are_reduced_before_the_fence_or_not_at_all(worker: Worker):
    """Else a commit would be joined by a worker of which the coordinator was told that it cannot apply the step."""
    assert worker.fence(2).reduced is None
    with pytest.raises(Interrupted):
        worker.commit_state.note_reduced(1)
    assert worker.fence(3).reduced is None


def test_sums_are_begun_before_the_fence_or_not_at_all(worker: Worker):
    assert not worker.fence(2).has_open_groups
    with pytest.raises(Interrupted):
        worker.commit_state.begin_sums()
    assert not worker.fence(3).has_open_groups


def test_sums_are_open_until_all_are_here_or_their_groups_are_replaced(worker: Worker):
    worker.commit_state.begin_sums()
    worker.commit_state.note_reduced(1)
    assert not worker.fence(2).has_open_groups
    worker.adopt(2)
    worker.commit_state.begin_sums()
    worker.commit_state.begin_step()
    assert worker.fence(3).has_open_groups, "what is forgotten was posted all the same"
    worker.adopt(3)
    assert not worker.fence(4).has_open_groups
    worker.adopt(4)
    worker.commit_state.begin_sums()
    worker.commit_state.note_section_reduced(1)
    assert not worker.fence(5).has_open_groups


def test_catching_up_takes_the_reduced_gradients_of_that_very_step(worker: Worker):
    assert not worker.commit_state.catch_up(record(1)), "it took no part"
    worker.commit_state.note_reduced(1)
    worker.fence(2)
    assert worker.commit_state.catch_up(record(1)), "a fence does not keep a committed step from being applied"
    assert not worker.commit_state.catch_up(record(1)), "it is applied once"
    status = worker.fence(3)
    assert (status.applied, status.reduced, status.last_record) == (1, None, record(1))


def test_what_is_kept_for_others_is_held_until_the_next_step():
    worker = Worker()
    worker.adopt(1, boundary=4, kept=(7, 1))
    assert worker.fence(1).layers == (0, 1, 7)
    worker.commit_state.note_reduced(5)
    assert worker.fence(1).layers == (0, 1, 7), "peers may not have come so far"
    worker.commit_state.begin_apply(record(5))
    assert worker.fence(1).layers == (0, 1)


def test_a_pipeline_with_a_lost_node_stops_at_the_fence_and_a_whole_one_goes_on(worker: Worker):
    assert not worker.commit_state.is_pipeline_stopped()
    worker.fence(2, lost=("c",))
    assert not worker.commit_state.is_pipeline_stopped()
    assert worker.commit_state.is_fenced()
    worker.fence(3, lost=("b", "c"))
    assert worker.commit_state.is_pipeline_stopped()
    worker.fence(4, lost=("c",))
    assert worker.commit_state.is_pipeline_stopped(), "a node that came again is another one"


def test_a_new_plan_clears_what_the_old_one_lost(worker: Worker):
    worker.fence(2, lost=("b",))
    worker.adopt(2)
    assert not worker.commit_state.is_pipeline_stopped()
    assert not worker.commit_state.is_fenced()
    worker.fence(3)
    assert not worker.commit_state.is_pipeline_stopped()


def test_an_order_to_forget_the_step_stops_the_pipeline(worker: Worker):
    worker.fence(2)
    worker.commit_state.give_update(update(2, finish=1))
    assert not worker.commit_state.is_pipeline_stopped()
    worker.commit_state.give_update(update(3, finish=None))
    assert worker.commit_state.is_pipeline_stopped()


def test_an_order_stops_a_pipeline_that_lost_a_node_after_the_fence(worker: Worker):
    """Those who are fenced are not fenced again for another loss of the moment: their orders tell them."""
    worker.fence(2, lost=("c",))
    worker.commit_state.give_update(update(2, finish=1, lost=("c", "b")))
    assert worker.commit_state.is_pipeline_stopped()


def order(generation: int, *, base: OrderedPlan | None, layout: ExecutionPlan = PLAN) -> PlanOrder:
    known = {} if base is None else {base.generation: base}
    bases = {} if base is None else {PLACE: base.id}
    ((_, given),) = orders_of(update(generation, layout), [PLACE], bases=bases, known=known, in_force=None)
    return given


def test_an_order_changes_the_newest_plan_whether_or_not_it_is_adopted(worker: Worker):
    first = update(1).ordered
    assert worker.fence(2).knows == first.id
    assert worker.commit_state.give_order(order(2, base=first)) is None
    assert worker.fence(3).knows == update(2).ordered.id, "the order was dropped, and what it said is known"
    assert not worker.commit_state.has_update
    assert worker.commit_state.give_order(order(3, base=update(2).ordered)) is None
    given = worker.commit_state.take_update()
    assert given == update(3)


def test_an_order_that_changes_another_plan_asks_for_the_whole_plan(worker: Worker):
    worker.fence(4)
    needed = worker.commit_state.give_order(order(4, base=update(3).ordered))
    assert needed == PlanNeeded(device=PLACE.device, generation=4)
    assert not worker.commit_state.has_update
    assert worker.commit_state.give_order(order(4, base=None)) is None
    assert worker.commit_state.take_update() == update(4)


def test_a_whole_plan_that_is_not_what_it_says_is_no_question_of_the_base(worker: Worker):
    given = order(2, base=None)
    delta = replace(given.common.delta, digest="0" * 16)
    with pytest.raises(WrongBase, match="digest"):
        worker.commit_state.give_order(replace(given, common=replace(given.common, delta=delta)))


def test_progress_of_a_step_is_told_and_forgotten_with_it(worker: Worker):
    worker.commit_state.note_microbatch()
    worker.commit_state.note_microbatch()
    worker.commit_state.note_broken()
    assert worker.commit_state.is_broken
    status = worker.fence(2)
    assert (status.microbatches_done, status.broken) == (2, True)
    worker.commit_state.begin_step()
    status = worker.fence(3)
    assert (status.microbatches_done, status.broken) == (0, False)


def test_a_committed_step_leaves_no_progress_behind(worker: Worker):
    worker.commit_state.begin_step()
    worker.commit_state.note_microbatch(3)
    worker.commit_state.note_reduced(1)
    worker.commit_state.begin_apply(record(1))
    status = worker.fence(2)
    assert (status.applied, status.microbatches_done) == (1, 0)


def test_a_spare_has_no_pipeline_to_lose():
    worker = Worker()
    given = update(1, plan(("c", "d")))
    worker.commit_state.give_update(given)
    worker.commit_state.take_update()
    worker.commit_state.adopt(given, ())
    worker.fence(2, lost=("c",))
    assert not worker.commit_state.is_pipeline_stopped()
    assert worker.commit_state.adopted == 1


def test_waits_hear_of_fences_and_orders_and_a_stop_is_remembered(worker: Worker):
    before = worker.announced
    worker.fence(2)
    worker.commit_state.give_update(update(2))
    assert worker.announced == before + 2
    assert not worker.commit_state.is_stop_wanted
    worker.commit_state.want_stop()
    assert worker.commit_state.is_stop_wanted


def section_record(number: int, *, step: int = 1, generation: int = 1) -> SectionRecord:
    return SectionRecord(step=step, generation=generation, number=number, loss=0.5)


def test_a_section_is_committed_before_the_fence_or_not_at_all(worker: Worker):
    worker.commit_state.note_section_reduced(1)
    worker.commit_state.commit_section(section_record(1))
    assert worker.fence(2).partial == section_record(1)
    late = Worker()
    late.adopt(1)
    late.commit_state.note_section_reduced(1)
    status = late.fence(2)
    assert (status.partial, status.section_reduced) == (None, 1)
    with pytest.raises(Interrupted):
        late.commit_state.commit_section(section_record(1))


def test_sums_of_a_section_that_come_after_the_fence_are_not_here(worker: Worker):
    assert worker.fence(2).section_reduced is None
    with pytest.raises(Interrupted):
        worker.commit_state.note_section_reduced(1)


def test_a_section_that_a_peer_has_committed_is_committed_by_order_once(worker: Worker):
    worker.commit_state.note_section_reduced(1)
    worker.fence(2)
    assert worker.commit_state.catch_up_section(section_record(1))
    assert not worker.commit_state.catch_up_section(section_record(1))
    assert worker.fence(3).partial == section_record(1)


def test_the_sums_of_a_section_that_is_given_back_are_not_here(worker: Worker):
    worker.commit_state.note_section_reduced(1)
    worker.fence(2)
    worker.commit_state.give_back_section()
    assert worker.fence(3).section_reduced is None
    assert not worker.commit_state.catch_up_section(section_record(1))


def test_a_section_of_another_plan_is_not_the_one_that_is_reduced_here(worker: Worker):
    worker.commit_state.note_section_reduced(1)
    worker.fence(2)
    assert not worker.commit_state.catch_up_section(section_record(1, generation=3))
    assert not worker.commit_state.catch_up_section(section_record(2))


def test_layers_kept_for_others_are_behind_once_a_section_is_committed():
    worker = Worker()
    worker.adopt(1, kept=(5,))
    worker.commit_state.note_section_reduced(1)
    assert worker.fence(1).layers == (0, 1, 5)
    worker.commit_state.commit_section(section_record(1))
    assert worker.fence(1).layers == (0, 1)


@pytest.mark.parametrize("ends", ["apply", "adopt"])
def test_a_step_or_a_plan_begins_with_nothing_committed_under_it(worker: Worker, ends: str):
    worker.commit_state.note_section_reduced(1)
    worker.commit_state.commit_section(section_record(1))
    worker.commit_state.note_section_reduced(2)
    if ends == "apply":
        worker.reduce_and_apply(1)
    else:
        worker.adopt(2)
    status = worker.fence(3)
    assert (status.partial, status.section_reduced) == (None, None)


def test_what_is_forgotten_of_a_step_is_not_what_is_committed_of_it(worker: Worker):
    worker.commit_state.note_section_reduced(1)
    worker.commit_state.commit_section(section_record(1))
    worker.commit_state.note_section_reduced(2)
    worker.commit_state.begin_step()
    status = worker.fence(2)
    assert (status.partial, status.section_reduced) == (section_record(1), None)
