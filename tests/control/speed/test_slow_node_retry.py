"""When slow nodes that were left out get another chance."""

from __future__ import annotations

import math

from oobleck.control.speed.slow_node_retry import SlowNodeRetry

FOUND_OUT_S = 6.0
FIRST_S = 20 * FOUND_OUT_S


def leave_out(slow_retry: SlowNodeRetry, now_s: float, *nodes: str) -> None:
    slow_retry.leave_out(nodes, now_s, found_out_s=FOUND_OUT_S)


def test_a_node_is_tried_once_it_has_waited():
    slow_retry = SlowNodeRetry()
    assert slow_retry.due_s == math.inf
    leave_out(slow_retry, 100.0, "n1")
    assert slow_retry.due_s == 100.0 + FIRST_S
    assert slow_retry.take_due(slow_retry.due_s - 1) == []
    assert slow_retry.take_due(slow_retry.due_s) == ["n1"]
    assert slow_retry.due_s == math.inf


def test_plans_that_leave_it_out_too_do_not_make_it_wait_longer():
    slow_retry = SlowNodeRetry()
    leave_out(slow_retry, 100.0, "n1")
    leave_out(slow_retry, 150.0, "n1", "n2")
    assert slow_retry.due_s == 100.0 + FIRST_S


def test_a_node_that_is_still_slow_waits_twice_as_long_up_to_a_limit():
    slow_retry, now_s, waits_s = SlowNodeRetry(), 0.0, []
    for _ in range(6):
        leave_out(slow_retry, now_s, "n1")
        waits_s.append(slow_retry.due_s - now_s)
        now_s = slow_retry.due_s
        assert slow_retry.take_due(now_s) == ["n1"]
        now_s += FOUND_OUT_S
    assert waits_s == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, 8 * FIRST_S, 8 * FIRST_S]


def test_a_node_that_was_well_for_long_begins_anew():
    slow_retry = SlowNodeRetry()
    leave_out(slow_retry, 0.0, "n1")
    tried_s = slow_retry.due_s
    slow_retry.take_due(tried_s)
    leave_out(slow_retry, tried_s + FIRST_S, "n1")
    assert slow_retry.due_s == tried_s + 2 * FIRST_S


def test_a_node_that_is_lost_or_used_again_is_not_waited_for():
    slow_retry = SlowNodeRetry()
    leave_out(slow_retry, 0.0, "n1", "n2")
    slow_retry.forget("n1")
    leave_out(slow_retry, 1.0)
    assert slow_retry.due_s == math.inf
    assert slow_retry.take_due(1e9) == []
