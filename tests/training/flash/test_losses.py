"""Which losses are bad."""

from __future__ import annotations

import math

import pytest

from oobleck.training.flash.losses import Losses


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_bad_from_the_first_step_on(loss):
    assert Losses().is_bad(loss)


def test_a_loss_jumps_if_it_is_far_above_the_recent_ones_and_a_rank_that_continues_knows_them():
    losses = Losses()
    for number in range(8):
        assert not losses.is_bad(2.0 + number / 10), "with fewer, nothing is known of their range"
    assert not losses.is_bad(4.7), "it is less than three times their range, 0.7, above 2.7"
    restarted = Losses(losses.recent)
    for each in (losses, restarted):
        assert each.is_bad(13.0)
        assert each.is_bad(13.0), "a bad one is none of the recent ones"
        assert not each.is_bad(0.1)


def test_losses_that_are_all_alike_may_grow_a_little():
    losses = Losses([2.0] * 32)
    assert not losses.is_bad(2.5)
    assert losses.is_bad(9.0)


def test_losses_that_were_all_zero_say_nothing_of_how_far_the_next_may_be():
    losses = Losses([0.0] * 8)
    assert not losses.is_bad(0.01)
    assert losses.is_bad(math.nan)
