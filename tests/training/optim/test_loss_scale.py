from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from oobleck.training.optim.loss_scale import LossScale


@given(st.lists(st.booleans(), max_size=60))
def test_any_history_leaves_a_power_of_two_that_numbers_carry(skips: list[bool]):
    scale = LossScale()
    for is_skipped in skips:
        before = scale
        scale = before.after(is_skipped=is_skipped)
        assert scale.scale < before.scale if is_skipped else scale.scale >= before.scale
    assert math.frexp(scale.scale)[0] == 0.5
    assert scale.num_skipped == sum(skips)
    assert LossScale.from_numbers(*scale.as_numbers()) == scale


def test_it_grows_after_two_thousand_steps_without_an_overflow_and_stays_within_bounds():
    scale = LossScale()
    for _ in range(1999):
        scale = scale.after(is_skipped=False)
    assert scale.scale == 2.0**16
    assert scale.after(is_skipped=False) == LossScale(scale=2.0**17)
    assert scale.after(is_skipped=True) == LossScale(scale=2.0**15, num_skipped=1)
    for _ in range(60):
        scale = scale.after(is_skipped=True)
    assert scale.scale == 2.0**-10
