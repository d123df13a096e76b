"""When slow nodes that were left out get another chance."""

from __future__ import annotations

import math

from oobleck.control.speed.slow_node_retry import Probation

FOUND_OUT_S = 6.0
FIRST_S = 20 * FOUND_OUT_S


def leave_out(probation: Probation, now_s: float, *nodes: str) -> None:
    probation.leave_out(nodes, now_s, found_out_s=FOUND_OUT_S)


def test_a_node_is_tried_once_it_has_waited():
    probation = Probation()
    assert probation.due_s == math.inf
    leave_out(probation, 100.0, "n1")
    assert probation.due_s == 100.0 + FIRST_S
    assert probation.take_due(probation.due_s - 1) == []
    assert probation.take_due(probation.due_s) == ["n1"]
    assert probation.due_s == math.inf


def test_plans_that_leave_it_out_too_do_not_make_it_wait_longer():
    probation = Probation()
    leave_out(probation, 100.0, "n1")
    leave_out(probation, 150.0, "n1", "n2")
    assert probation.due_s == 100.0 + FIRST_S


def test_a_node_that_is_still_slow_waits_twice_as_long_up_to_a_limit():
    probation, now_s, waits_s = Probation(), 0.0, []
    for _ in range(6):
        leave_out(probation, now_s, "n1")
        waits_s.append(probation.due_s - now_s)
        now_s = probation.due_s
        assert probation.take_due(now_s) == ["n1"]
        now_s += FOUND_OUT_S
    assert waits_s == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, 8 * FIRST_S, 8 * FIRST_S]


def test_a_node_that_was_well_for_long_begins_anew():
    probation = Probation()
    leave_out(probation, 0.0, "n1")
    tried_s = probation.due_s
    probation.take_due(tried_s)
    leave_out(probation, tried_s + FIRST_S, "n1")
    assert probation.due_s == tried_s + 2 * FIRST_S


def test_a_node_that_is_lost_or_used_again_is_not_waited_for():
    probation = Probation()
    leave_out(probation, 0.0, "n1", "n2")
    probation.forget("n1")
    leave_out(probation, 1.0)
    assert probation.due_s == math.inf
    assert probation.take_due(1e9) == []
