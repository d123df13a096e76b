"""When lost nodes are tried again."""

from __future__ import annotations

import math

from oobleck.control.nodes.node_retry import NodeRetry
from oobleck.job import NodeSpec

SPEC = NodeSpec(name="n1", host="n1")


def test_each_try_comes_after_twice_the_time():
    node_retry = NodeRetry(first_wait_s=10.0)
    node_retry.note_lost(SPEC, 100.0)
    assert node_retry.due_s == 110.0
    assert node_retry.take_due(109.9) == ()
    assert node_retry.take_due(110.0) == (SPEC,)
    assert node_retry.due_s == math.inf, "a try is under way"
    node_retry.note_failed("n1", 111.0)
    assert node_retry.due_s == 131.0


def test_the_wait_does_not_grow_for_ever():
    node_retry = NodeRetry(first_wait_s=10.0)
    node_retry.note_lost(SPEC, 0.0)
    for _ in range(20):
        node_retry.note_failed("n1", 0.0)
    assert node_retry.due_s == 600.0


def test_who_is_forgotten_is_not_tried():
    node_retry = NodeRetry(first_wait_s=10.0)
    node_retry.note_lost(SPEC, 0.0)
    assert "n1" in node_retry
    assert node_retry.forget("n1") == SPEC
    assert node_retry.forget("n1") is None
    assert node_retry.due_s == math.inf


def test_the_third_loss_within_ten_minutes_is_the_last_until_it_is_forgiven():
    node_retry = NodeRetry(first_wait_s=10.0)
    assert node_retry.note_lost(SPEC, 0.0)
    assert node_retry.forget("n1") == SPEC
    assert node_retry.note_lost(SPEC, 300.0)
    assert node_retry.forget("n1") == SPEC
    assert not node_retry.note_lost(SPEC, 599.0)
    assert "n1" not in node_retry
    node_retry.forgive("n1")
    assert node_retry.note_lost(SPEC, 600.0)


def test_one_that_comes_back_by_itself_again_and_again_stays_out_until_its_losses_are_old():
    node_retry = NodeRetry(first_wait_s=10.0)
    for lost_s in (0.0, 5.0, 10.0):
        assert node_retry.note_back(SPEC, lost_s - 1.0)
        node_retry.note_lost(SPEC, lost_s)
    assert not node_retry.note_back(SPEC, 12.0)
    assert node_retry.due_s == 600.0
    assert node_retry.take_due(600.0) == (SPEC,)
    node_retry.note_lost(SPEC, 700.0)
    assert node_retry.note_back(SPEC, 701.0), "one loss in ten minutes is no quarantine"


def test_one_in_quarantine_that_is_here_is_not_tried_where_the_user_wants_that():
    node_retry = NodeRetry(first_wait_s=0.0)
    assert all(node_retry.note_lost(SPEC, 0.0) for _ in range(3))
    assert not node_retry.note_back(SPEC, 1.0)
    assert node_retry.due_s == math.inf


def test_losses_long_ago_do_not_count():
    node_retry = NodeRetry(first_wait_s=10.0)
    assert all(node_retry.note_lost(SPEC, 301.0 * number) for number in range(20))


def test_nobody_is_tried_where_the_user_wants_none():
    node_retry = NodeRetry(first_wait_s=0.0)
    node_retry.note_lost(SPEC, 0.0)
    assert "n1" not in node_retry
