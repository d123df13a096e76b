"""When a worker says how fast it is, and of what."""

from __future__ import annotations

from oobleck.control.protocol import Pace
from oobleck.control.speed.speed_tracker import PaceMeter


def test_a_report_is_due_a_second_after_the_one_before():
    meter = PaceMeter(1, now_s=10.0)
    meter.add(0.4, 2)
    assert meter.take(10.9) is None
    meter.add(0.5, 3)
    assert meter.take(11.0) == Pace(device=1, compute_s=0.9, microbatches=5)
    meter.add(0.2, 1)
    assert meter.take(11.9) is None
    assert meter.take(12.0) == Pace(device=1, compute_s=0.2, microbatches=1)


def test_who_has_computed_nothing_reports_nothing():
    meter = PaceMeter(0, now_s=0.0)
    assert meter.take(100.0) is None
    meter.add(0.5, 1)
    assert meter.take(100.0) == Pace(device=0, compute_s=0.5, microbatches=1)


def test_all_workers_together_send_a_thousand_reports_a_second_at_most():
    meter = PaceMeter(0, now_s=0.0)
    said_s = []
    for num_workers in (4, 1000, 10_000, 4):
        meter.adopt(num_workers)
        due_s = (said_s[-1] if said_s else 0.0) + 1.0
        meter.add(0.5, 1)
        while meter.take(due_s) is None:
            due_s += 1.0
        said_s.append(due_s)
    assert said_s == [1.0, 2.0, 12.0, 13.0]
