"""Which nodes are slow, and when that is worth another look."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection

import pytest

from oobleck.control.protocol import Pace
from oobleck.control.speed.speed_tracker import SpeedTracker, found_out_s
from oobleck.planner import Planner, PlannerSettings, WorkerId
from tests.control.model import Shape

SHAPE = Shape(layers_per_device=2)
EXPECTED_S = 2 * 0.03
"""Two layers of 10 ms forward and 20 ms backward."""


@pytest.fixture
def plan():
    return plan_of(SHAPE)


def plan_of(shape: Shape, *, left_out: Collection[str] = ()):
    settings = PlannerSettings(
        num_microbatches=4,
        devices_per_node=shape.devices,
        max_devices_per_stage=1,
        fault_threshold=1,
        num_pipelines=shape.num_pipelines,
    )
    nodes = [spec.name for spec in shape.nodes if spec.name not in left_out]
    return Planner(shape.profile, settings).initial_plan(nodes).plan


def report(
    paces: SpeedTracker, plan, factors: dict[object, float], *, times: int = 5, noise: float = 0.0, shape: Shape = SHAPE
) -> list[bool]:
    """Have all workers report; returns after each round whether there is something new.

    `factors` are those of nodes or of places; with `noise`, reports are by turns so much above and below them.
    """
    changes = []
    for number in range(times):
        for worker_id in plan.worker_ids:
            factor = factors.get(worker_id, factors.get(worker_id.node, 1.0)) * (1 + noise * (-1) ** number)
            paces.note(
                worker_id, Pace(device=0, compute_s=3 * factor * EXPECTED_S, microbatches=3), plan, SHAPE.profile
            )
        changes.append(paces.take_change(plan))
    return changes


def test_a_node_is_slow_once_all_its_latest_reports_say_so(plan):
    paces = SpeedTracker()
    assert report(paces, plan, {"n1": 2.0}) == [False, False, False, False, True]
    assert paces.slow == {"n1": 2.0}
    assert report(paces, plan, {"n1": 2.0}) == [False] * 5


def test_one_slow_report_makes_nobody_slow(plan):
    paces = SpeedTracker()
    report(paces, plan, {"n1": 9.0}, times=1)
    assert True not in report(paces, plan, {}, times=9)


def test_what_slows_all_of_them_is_no_reason(plan):
    paces = SpeedTracker()
    assert True not in report(paces, plan, {f"n{index}": 3.0 for index in range(4)})


def test_a_node_between_slow_and_normal_stays_what_it_was(plan):
    paces = SpeedTracker()
    assert True not in report(paces, plan, {"n1": 1.4})
    report(paces, plan, {"n1": 2.0})
    assert True in report(paces, plan, {"n1": 1.4})
    assert paces.slow == {"n1": 1.4}
    assert True not in report(paces, plan, {"n1": 1.3})


def test_a_node_whose_pace_changes_is_what_it_was_until_its_reports_agree(plan):
    paces = SpeedTracker()
    report(paces, plan, {"n1": 4.0})
    assert report(paces, plan, {"n1": 2.0}) == [False, False, False, False, True]


@pytest.mark.parametrize(("layers_per_device", "num_pipelines"), [(2, 1), (4, 2)])
def test_of_two_nodes_the_slower_one_is_slow(layers_per_device: int, num_pipelines: int):
    """As stages of one pipeline, and as two pipelines."""
    plan = plan_of(Shape(num_nodes=2, layers_per_device=layers_per_device, num_pipelines=num_pipelines))
    assert len(plan.pipelines) == num_pipelines
    usual = layers_per_device / 2  # all nodes are full
    paces = SpeedTracker()
    report(paces, plan, {"n0": usual, "n1": 2 * usual})
    assert paces.slow == {"n1": 2.0}
    assert True not in report(SpeedTracker(), plan, {"n0": usual, "n1": 1.4 * usual})


def test_a_worker_alone_is_never_slow():
    plan = plan_of(Shape(num_nodes=1, layers_per_device=4, num_pipelines=1))
    assert True not in report(SpeedTracker(), plan, {"n0": 9.0})


PEERS = Shape(num_nodes=6, layers_per_device=2, num_pipelines=3)
"""Three pipelines of two stages: three workers do the same."""


@pytest.mark.parametrize(("noise", "is_found"), [(0.0, True), (0.02, True), (0.1, False)])
def test_among_peers_that_hardly_vary_a_little_slower_is_slow(noise: float, is_found: bool):
    plan = plan_of(PEERS)
    paces = SpeedTracker()
    report(paces, plan, {"n1": 1.35}, noise=noise)
    assert set(paces.slow) == ({"n1"} if is_found else set())


def test_what_slows_all_workers_of_the_same_layers_is_the_profiles_fault():
    plan = plan_of(PEERS)
    paces = SpeedTracker()
    assert True not in report(paces, plan, {pipeline.nodes[0]: 3.0 for pipeline in plan.pipelines})


@pytest.mark.parametrize("device", [0, 1])
def test_one_slow_device_makes_a_node_slow(device: int):
    shape = Shape(num_nodes=4, devices=2, layers_per_device=1)
    plan = plan_of(shape)
    paces = SpeedTracker()
    assert report(paces, plan, {WorkerId(node="n1", device=device): 2.0})[-1]
    assert paces.slow == {"n1": 2.0}
    assert report(paces, plan, {})[-1]
    assert paces.slow == {}


def test_workers_that_report_at_different_times_are_heard_too(plan):
    paces = SpeedTracker()
    changes = []
    for number in range(8):
        for worker_id in plan.worker_ids:
            if number % 2 == 0 or worker_id.node != "n0":
                factor = 2.0 if worker_id.node == "n1" else 1.0
                paces.note(
                    worker_id, Pace(device=0, compute_s=factor * EXPECTED_S, microbatches=1), plan, SHAPE.profile
                )
                changes.append(paces.take_change(plan))
    assert True not in changes  # n0 has said too little
    assert True in report(paces, plan, {"n1": 2.0}, times=2)


@pytest.mark.parametrize(
    ("step_s", "num_workers", "found_s"),
    [(2.5, 8, 15.0), (0.4, 8, 6 * 1.2), (1.0, 1000, 6.0), (0.0, 8, 6.0), (0.4, 10_000, 60.0), (3.0, 10_000, 72.0)],
)
def test_a_slow_node_is_found_out_by_its_sixth_report(step_s: float, num_workers: int, found_s: float):
    assert found_out_s(step_s, num_workers) == pytest.approx(found_s)


def test_a_round_of_reports_costs_one_look(plan):
    """Asked after every report, it looks no more often than once a round: a call that does not look calls nothing."""
    paces = SpeedTracker()
    report(paces, plan, {}, times=5)
    for _ in range(3):
        costs = []
        for worker_id in plan.worker_ids:
            pace = Pace(device=0, compute_s=EXPECTED_S, microbatches=1)
            paces.note(worker_id, pace, plan, SHAPE.profile)
            costs.append(calls_made(lambda: paces.take_change(plan)))
        *others, last = costs
        assert set(others) == {min(costs)}
        assert last > 5 * len(plan.worker_ids)


def calls_made(work: Callable[[], object]) -> int:
    """How many calls of functions something takes, those of C included."""
    count = 0

    def notice(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(notice)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_node_gets_well_again(plan):
    paces = SpeedTracker()
    report(paces, plan, {"n1": 2.0})
    assert report(paces, plan, {})[-1]
    assert paces.slow == {}


def test_a_slow_node_that_gets_slower_is_looked_at_again(plan):
    paces = SpeedTracker()
    report(paces, plan, {"n1": 2.0})
    assert True in report(paces, plan, {"n1": 4.0})
    assert paces.slow == {"n1": 4.0}
    assert True in report(paces, plan, {"n1": 2.0})
    assert paces.slow == {"n1": 2.0}


def test_a_node_that_was_lost_is_taken_for_normal(plan):
    paces = SpeedTracker()
    report(paces, plan, {"n1": 2.0})
    paces.forget("n1")
    assert paces.slow == {}


def test_reports_of_spares_of_no_work_and_of_no_time_are_left_out(plan):
    paces = SpeedTracker()
    paces.note(WorkerId(node="n9", device=0), Pace(device=0, compute_s=9.0, microbatches=1), plan, SHAPE.profile)
    for compute_s, microbatches in ((9.0, 0), (0.0, 1), (math.nan, 1), (math.inf, 1), (-1.0, 1)):
        said = Pace(device=0, compute_s=compute_s, microbatches=microbatches)
        paces.note(plan.worker_ids[0], said, plan, SHAPE.profile)
    assert report(paces, plan, {"n1": 2.0})[-1]


def test_a_node_looks_as_slow_once_another_slow_one_is_left_out():
    slow = {"n0": 2.0, "n1": 2.0}
    for left_out in ((), ("n0",)):
        speeds = SpeedTracker()
        report(speeds, plan_of(Shape(), left_out=left_out), slow)
        assert speeds.slow == {node: factor for node, factor in slow.items() if node not in left_out}


def test_each_return_of_a_node_to_what_it_was_makes_the_next_change_wait_twice_as_long(plan):
    """A node that goes back and forth by itself, or since each plan compares it with other nodes."""
    speeds = SpeedTracker()
    report(speeds, plan, {"n1": 2.0})
    changed = [number for number in range(60) if any(report(speeds, plan, {"n1": 2.0 if number % 2 else 1.0}, times=5))]
    assert changed[:2] == [0, 1]
    assert 5 <= len(changed) <= 9
    assert changed[-1] - changed[-2] > 10
    report(speeds, plan, {"n1": 2.0}, times=3000)
    assert speeds.slow == {"n1": 2.0}
    assert True in report(speeds, plan, {}), "one that has been quiet is believed at once"
