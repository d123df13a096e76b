"""Groups of devices act as one device: plans, transfers and what is held, seen device by device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError, Unrecoverable
from oobleck.planner import Decision, Planner, PlannerSettings, WorkerId
from tests.planner.drawing import uniform_profile
from tests.planner.simple_profiles import make_profile

NODES = tuple(f"n{index}" for index in range(6))


def planners(degree: int, groups_per_node: int) -> tuple[Planner, Planner]:
    """One for devices in groups, and one for as many devices as there are groups."""
    profile = make_profile([1.0] * 8)

    def settings(devices: int) -> PlannerSettings:
        return PlannerSettings(num_microbatches=12, devices_per_node=devices)

    return Planner(profile, settings(degree * groups_per_node), tensor_parallel=degree), Planner(
        profile, settings(groups_per_node)
    )


def by_groups(decision: Decision, degree: int) -> list[list[tuple[range, tuple[WorkerId, ...]]]]:
    return [
        [
            (stage.layers, tuple(WorkerId(node=p.node, device=p.device // degree) for p in stage.worker_ids[::degree]))
            for stage in pipeline.stages
        ]
        for pipeline in decision.plan.pipelines
    ]


@given(
    degree=st.sampled_from([1, 2, 3, 4, 7]),
    groups=st.sampled_from([1, 2]),
    lost=st.sets(st.sampled_from(NODES), max_size=2),
)
def test_a_plan_for_groups_is_the_plan_for_as_many_devices(degree: int, groups: int, lost: set[str]) -> None:
    grouped, single = planners(degree, groups)
    plans = grouped.initial_plan(NODES), single.initial_plan(NODES)
    assert by_groups(plans[0], degree) == by_groups(plans[1], 1)
    try:
        expected = single.reconfigure(plans[1].plan, lost=lost)
    except Unrecoverable:
        with pytest.raises(Unrecoverable):
            grouped.reconfigure(plans[0].plan, lost=lost)
        return
    found = grouped.reconfigure(plans[0].plan, lost=lost)
    assert by_groups(found, degree) == by_groups(expected, 1)
    assert grouped.reconfigure(plans[0].plan, lost=lost, held=plans[0].plan.layers_at) == found
    assert len(found.transfers) == degree * len(expected.transfers)
    for item in found.transfers:
        assert item.source.device % degree == item.target.device % degree, "shares of one rank alone are alike"
    for pipeline in found.plan.pipelines:
        assert all(len(stage.worker_ids) == degree for stage in pipeline.stages)


def test_a_layer_is_held_by_a_group_only_if_every_device_holds_its_share() -> None:
    grouped, _ = planners(2, 1)
    plan = grouped.initial_plan(NODES[:2]).plan
    held = {worker_id: frozenset(range(8)) for worker_id in plan.worker_ids}
    held[WorkerId(node="n0", device=1)] = frozenset({0})
    held[WorkerId(node="n1", device=1)] = frozenset({0})
    with pytest.raises(Unrecoverable, match="1"):
        grouped.reconfigure(plan, held=held)


def test_devices_that_make_no_whole_groups_are_refused() -> None:
    with pytest.raises(PlanningError, match=r"tensor_parallel is 2.*3 devices"):
        Planner(make_profile([1.0] * 8), PlannerSettings(num_microbatches=4, devices_per_node=3), tensor_parallel=2)


def test_the_room_of_a_plan_is_that_of_its_groups() -> None:
    """A device has its own memory, however many share its layers."""
    asked = PlannerSettings(num_microbatches=8, devices_per_node=2, num_pipelines=1)
    planner = Planner(uniform_profile(8, memory_bytes=60), asked, tensor_parallel=2)
    groups = Planner(uniform_profile(8, memory_bytes=120), replace(asked, devices_per_node=1))
    plan, alike = (each.initial_plan(NODES[:2]).plan for each in (planner, groups))
    rooms = [planner.has_room(plan, gradient_copies=copies) for copies in range(8)]
    assert rooms == [groups.has_room(alike, gradient_copies=copies) for copies in range(8)]
    assert set(rooms) == {True, False}
