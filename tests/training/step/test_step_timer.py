from __future__ import annotations

import threading
import time

import pytest

from oobleck.control.steps import Interrupted, uncovered
from oobleck.training.comm.waiter import Waiter
from oobleck.training.step.step_timer import StepTimer


def test_a_long_wait_is_a_stall_although_it_lies_between_computations():
    """As where a neighbour computes late, because it heard of the step before only once a frozen node was given up."""
    timer = StepTimer(0)
    timer.add(10.0, 12.0, waited_s=1.5, longest_wait_s=(10.2, 11.6), num_microbatches=4)
    timer.add(12.0, 12.5, waited_s=0.0, longest_wait_s=(0.0, 0.0), num_microbatches=1)
    timer.end_step()
    assert timer.busy_s == ((10.0, 10.2), (11.6, 12.0), (12.0, 12.5))
    assert uncovered(10.0, 12.5, timer.busy_s) == pytest.approx(1.4)
    assert timer.spent() == pytest.approx((1.0, 1.5))


def test_what_is_computed_in_vain_is_not_told():
    timer = StepTimer(0)
    timer.add(10.0, 12.0, waited_s=1.5, longest_wait_s=(10.2, 11.6), num_microbatches=4)
    timer.forget_step()
    timer.end_step()
    assert timer.busy_s == ()
    assert timer.spent() == (0.0, 0.0)


def test_the_time_of_a_step_begins_where_that_of_the_one_before_ends(monkeypatch: pytest.MonkeyPatch):
    """Committing and applying a step takes time, too, and none is lost."""
    clock = iter([0.0, 0.0, 2.0, 7.0, 20.0, 23.0, 30.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    timer = StepTimer(0)
    assert timer.post_step() == 2.0
    timer.end_step()
    assert timer.post_step() == 5.0
    timer.begin_step()  # evaluated meanwhile
    timer.post_step()
    timer.end_step()
    assert timer.post_step() == 7.0


def test_the_longest_wait_since_it_was_last_asked_for():
    waiter = Waiter()
    assert waiter.take_longest_s() == (0.0, 0.0)
    done = threading.Event()
    began_s = time.monotonic()
    waiter.call(lambda: done.wait(0.05), lambda: False)
    with pytest.raises(Interrupted):
        waiter.wait(lambda: False, lambda: True)
    longest_s = waiter.take_longest_s()
    assert began_s <= longest_s[0] <= longest_s[1] <= time.monotonic()
    assert longest_s[1] - longest_s[0] > 0.04, "that of the call, not the shorter one after it"
    assert waiter.take_longest_s() == (0.0, 0.0)
