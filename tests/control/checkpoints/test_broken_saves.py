"""Which saves can never be whole: by the loss of a worker, or by a step that one of them missed."""

from __future__ import annotations

from oobleck.control.checkpoints.saves import BrokenSaves


def followed() -> BrokenSaves:
    """Two plans: n2 has no part in the second one, which begins with step 5."""
    broken = BrokenSaves()
    broken.plan_adopted(("n0", "n1", "n2"), generation=1, boundary=0)
    broken.plan_adopted(("n0", "n1"), generation=2, boundary=5)
    return broken


def test_nothing_is_broken_where_all_go_on() -> None:
    assert not followed().has(2, 6)


def test_the_loss_of_a_worker_breaks_the_saves_of_its_plan_and_none_of_the_next() -> None:
    broken = followed()
    broken.worker_gone("n1")
    assert broken.has(2, 6)
    broken.plan_adopted(("n0",), generation=3, boundary=6)
    assert broken.has(2, 6)
    assert not broken.has(3, 7)


def test_a_worker_that_rests_breaks_the_step_that_it_helped_to_finish_and_no_later_one() -> None:
    broken = followed()
    broken.worker_gone("n2")
    assert broken.has(1, 4)
    assert broken.has(2, 5), "the step in flight was finished under the new order, by all of the old plan"
    assert not broken.has(2, 6)


def test_a_worker_without_a_part_in_any_plan_breaks_nothing() -> None:
    broken = followed()
    broken.worker_gone("n3")
    assert not broken.has(1, 4)


def test_who_missed_a_step_has_not_saved_after_it() -> None:
    broken = followed()
    broken.missed(1)
    assert broken.has(1, 5)
    assert not broken.has(2, 6)
