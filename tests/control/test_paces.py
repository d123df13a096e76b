"""Which nodes are slow, and when that is worth another look."""

from __future__ import annotations

import pytest

from oobleck.control.messages import Pace
from oobleck.control.paces import Paces
from oobleck.planner import Place, Planner, PlannerSettings
from tests.control.model import Shape

SHAPE = Shape(layers_per_device=2)
EXPECTED_S = 2 * 0.03
"""Two layers of 10 ms forward and 20 ms backward."""


@pytest.fixture
def plan():
    settings = PlannerSettings(num_microbatches=4, devices_per_node=1, max_devices_per_stage=1, fault_threshold=1)
    return Planner(SHAPE.profile, settings).initial_plan([spec.name for spec in SHAPE.nodes]).plan


def report(paces: Paces, plan, factors: dict[str, float], *, times: int = 5) -> list[bool]:
    """Have all nodes report; returns after each round whether there is something new."""
    changes = []
    for _ in range(times):
        for place in plan.places:
            factor = factors.get(place.node, 1.0)
            paces.note(place, Pace(device=0, compute_s=3 * factor * EXPECTED_S, microbatches=3), plan)
        changes.append(paces.take_change(plan))
    return changes


def test_a_node_is_slow_once_all_its_latest_reports_say_so(plan):
    paces = Paces(SHAPE.profile)
    assert report(paces, plan, {"n1": 2.0}) == [False, False, False, False, True]
    assert paces.slow == {"n1": 2.0}
    assert report(paces, plan, {"n1": 2.0}) == [False] * 5


def test_one_slow_report_makes_nobody_slow(plan):
    paces = Paces(SHAPE.profile)
    report(paces, plan, {"n1": 9.0}, times=1)
    assert True not in report(paces, plan, {}, times=9)


def test_what_slows_all_of_them_is_no_reason(plan):
    paces = Paces(SHAPE.profile)
    assert True not in report(paces, plan, {f"n{index}": 3.0 for index in range(4)})


def test_a_node_between_slow_and_normal_stays_what_it_was(plan):
    paces = Paces(SHAPE.profile)
    assert True not in report(paces, plan, {"n1": 1.4})
    report(paces, plan, {"n1": 2.0})
    report(paces, plan, {"n1": 1.4})
    assert paces.slow == {"n1": 2.0}


def test_a_node_gets_well_again(plan):
    paces = Paces(SHAPE.profile)
    report(paces, plan, {"n1": 2.0})
    assert report(paces, plan, {})[-1]
    assert paces.slow == {}


def test_a_slow_node_that_gets_slower_is_looked_at_again(plan):
    paces = Paces(SHAPE.profile)
    report(paces, plan, {"n1": 2.0})
    assert True in report(paces, plan, {"n1": 4.0})
    assert paces.slow == {"n1": 4.0}
    assert True in report(paces, plan, {"n1": 2.0})
    assert paces.slow == {"n1": 2.0}


def test_a_node_that_was_lost_is_taken_for_normal(plan):
    paces = Paces(SHAPE.profile)
    report(paces, plan, {"n1": 2.0})
    paces.forget("n1")
    assert paces.slow == {}


def test_reports_of_spares_and_of_no_work_are_left_out(plan):
    paces = Paces(SHAPE.profile)
    paces.note(Place(node="n9", device=0), Pace(device=0, compute_s=9.0, microbatches=1), plan)
    paces.note(plan.places[0], Pace(device=0, compute_s=9.0, microbatches=0), plan)
    assert report(paces, plan, {"n1": 2.0})[-1]
