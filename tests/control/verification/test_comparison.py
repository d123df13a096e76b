"""What differs first is named first, and what differs by rounding alone is not named."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from oobleck.control.verification import (
    Comparison,
    PlainAccount,
    StepAccount,
    TensorDifference,
    compare,
    tolerance_of,
)

STEPS = tuple(
    StepAccount(step=step, loss=4.0 / step, grad_norm=1.5, learning_rate=0.01, samples=(3, 1, 2))
    for step in range(1, 4)
)
MOVED = TensorDifference(name="head.weight", step=1, size=10.0, moved=1.0)
NAN = float("nan")


def compared(
    *ours: StepAccount,
    tensors: tuple[TensorDifference, ...] = (),
    dtype: str = "float32",
    theirs: PlainAccount | None = None,
) -> Comparison:
    return compare(theirs or PlainAccount(steps=STEPS), ours or STEPS, tensors, tolerance_of(dtype))


def changed(step: int, **values: float) -> tuple[StepAccount, ...]:
    """All steps, one of them with other numbers."""
    return tuple(replace(each, **values) if each.step == step else each for each in STEPS)  # type: ignore[arg-type]


def test_equal_steps_are_equal() -> None:
    found = compared(tensors=(MOVED,))
    assert found.are_equal
    assert found.theirs == found.ours == STEPS


@pytest.mark.parametrize("what", ["loss", "grad_norm", "learning_rate"])
def test_a_number_that_differs_by_rounding_is_equal_and_by_more_is_named(what: str) -> None:
    bound, own = getattr(tolerance_of("float32"), what), getattr(STEPS[1], what)
    assert compared(*changed(2, **{what: own * (1 + bound / 2)})).are_equal
    (difference,) = compared(*changed(2, **{what: own * (1 + bound * 2)})).differences
    assert (difference.step, difference.what) == (2, what)


def test_a_loss_that_is_a_sum_in_place_of_a_mean_is_said_to_be_so_many_times_as_large() -> None:
    (difference,) = compared(*changed(1, loss=32.0)).differences
    assert difference.text == "step 1: the loss is 32 on the nodes, and 4 by itself (8 times as large)"


def test_causes_come_before_what_follows_from_them() -> None:
    theirs = PlainAccount(steps=STEPS, samples_on_nodes=((4, 5, 6), *[(3, 1, 2)] * 2))
    ours = tuple(replace(each, loss=9.0, grad_norm=9.0) for each in STEPS)
    wrong = replace(MOVED, difference=1.0)
    found = compared(*ours, tensors=(wrong,), theirs=theirs).differences
    assert [(each.step, each.what) for each in found[:5]] == [
        (1, "samples"),
        (1, "loss"),
        (1, "grad_norm"),
        (1, "head.weight"),
        (2, "loss"),
    ]
    assert found[0].text == "step 1 takes other samples, [4, 5, 6] in place of [3, 1, 2]"


def test_the_order_of_samples_within_a_step_is_compared_too() -> None:
    theirs = PlainAccount(steps=STEPS, samples_on_nodes=((1, 2, 3), *[(3, 1, 2)] * 2))
    (difference,) = compared(theirs=theirs).differences
    assert "the same samples in another order" in difference.text


def test_a_step_that_the_run_has_not_done_is_a_difference() -> None:
    found = compared(*STEPS[:2])
    assert [(each.step, each.what) for each in found.differences] == [(3, "step")]
    assert found.ours == STEPS[:2]


@pytest.mark.parametrize(
    ("tensor", "is_equal"),
    [
        (replace(MOVED, difference=1e-3), True),  # of a movement of 1
        (replace(MOVED, difference=0.5), False),
        (replace(MOVED, moved=0.0, difference=1e-6), True),  # rounding of values of 10
        (replace(MOVED, moved=0.0, difference=1e-3), False),  # frozen by itself, and trained on the nodes
        (replace(MOVED, difference=5.0, is_noise=True), True),
        (replace(MOVED, problem="is not in what the run has saved", is_noise=True), False),
        (replace(MOVED, difference=NAN), False),
    ],
)
def test_a_parameter_is_judged_by_how_far_training_has_moved_it(tensor: TensorDifference, is_equal: bool) -> None:
    assert compared(tensors=(tensor,)).are_equal == is_equal


def test_the_parameter_that_is_most_wrong_is_named_first() -> None:
    tensors = (
        replace(MOVED, name="a", difference=0.5),
        replace(MOVED, name="b", difference=2.0),
        replace(MOVED, name="c", problem="is not in what the run has saved"),
    )
    assert [each.what for each in compared(tensors=tensors).differences] == ["c", "b", "a"]


def test_numbers_that_are_none_in_both_are_equal() -> None:
    theirs = PlainAccount(steps=changed(2, loss=NAN))
    assert compared(*changed(2, loss=NAN), theirs=theirs).are_equal
    assert not compared(theirs=theirs).are_equal


def test_less_precise_types_may_differ_by_more() -> None:
    bounds = [tolerance_of(dtype) for dtype in ("float64", "float32", "float16", "bfloat16")]
    for finer, coarser in itertools.pairwise(bounds):
        assert finer.loss < coarser.loss
        assert finer.grad_norm < coarser.grad_norm
        assert finer.movement < coarser.movement
