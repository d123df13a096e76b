"""A limit on the stages of a pipeline holds for first plans, and for those that follow a loss or a join."""

from __future__ import annotations

import pytest

from oobleck.errors import PlanningError
from oobleck.planner import NodeKind, Planner, PlannerSettings

from .simple_profiles import make_profile

NODES = [f"n{number}" for number in range(6)]


def planners(num_stages: int, *, num_layers: int = 8) -> list[Planner]:
    """For nodes of one kind, and of two."""
    profile = make_profile([1.0] * num_layers)
    settings = PlannerSettings(num_microbatches=24, num_stages=num_stages)
    kinds = [NodeKind(name=name, profile=profile) for name in ("a", "b")]
    kind_of = {node: "ab"[number % 2] for number, node in enumerate([*NODES, "n9"])}
    return [Planner(profile, settings), Planner(kinds, settings, kind_of)]


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_no_pipeline_has_more_stages(index: int, num_stages: int) -> None:
    planner = planners(num_stages)[index]
    plan = planner.initial_plan(NODES).plan
    plans = [plan]
    for change in ({"lost": ["n0"]}, {"lost": ["n1", "n2"]}, {"joined": ["n9"]}):
        plans.append(planner.reconfigure(plans[-1], **change).plan)
    for each in plans:
        assert max(pipeline.template.num_stages for pipeline in each.pipelines) <= num_stages
    if num_stages == 1:
        assert [len(each.pipelines) for each in plans] == [6, 5, 3, 4]


@pytest.mark.parametrize("index", [0, 1])
def test_a_model_of_one_layer_is_on_one_stage(index: int) -> None:
    plan = planners(4, num_layers=1)[index].initial_plan(NODES).plan
    assert [pipeline.template.num_stages for pipeline in plan.pipelines] == [1] * 6


def test_a_node_with_more_devices_than_stages_is_refused_with_what_to_change() -> None:
    profile = make_profile([1.0] * 8)
    planner = Planner(profile, PlannerSettings(num_microbatches=24, num_stages=1, devices_per_node=2))
    with pytest.raises(PlanningError, match="name each device as a node of its own, by a line `HOST devices=NUMBER`"):
        planner.initial_plan(NODES)
    kinds = [NodeKind(name=name, profile=profile, devices_per_node=2) for name in ("a", "b")]
    kind_of = dict.fromkeys(NODES, "a")
    planner = Planner(kinds, PlannerSettings(num_microbatches=24, num_stages=1), kind_of)
    with pytest.raises(PlanningError, match="name each device as a node of its own, by a line `HOST devices=NUMBER`"):
        planner.initial_plan(NODES)
