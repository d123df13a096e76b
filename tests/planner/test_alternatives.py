from __future__ import annotations

from dataclasses import replace

from oobleck.planner import Planner, PlannerSettings, Profile
from oobleck.planner.what_if import explain_pipelines
from tests.planner.drawing import uniform_profile
from tests.planner.simple_profiles import make_profile, node_names


def explain(profile: Profile, num_nodes: int, **settings: int) -> str:
    planner = Planner(profile, PlannerSettings(**settings))
    nodes = node_names(num_nodes)
    return explain_pipelines(planner, nodes, planner.initial_plan(nodes))


def test_more_pipelines_than_the_model_allows_are_explained_by_the_nodes_it_needs():
    profile = make_profile([1.0] * 4, memory_bytes=9 * 10**8)
    text = explain(profile, 6, num_microbatches=30)
    assert text.startswith("3 pipelines: 2 would take ")
    assert text.endswith("longer a step; 4 are not possible (the model needs 2 nodes, so there is room for 3 in 6)")


def test_fewer_pipelines_than_f_asks_for_are_called_so():
    assert ", and f = 1 asks for at least 2" in explain(make_profile([1.0] * 4), 2, num_microbatches=8)


def test_no_more_pipelines_than_microbatches():
    text = explain(make_profile([1.0] * 4), 3, num_microbatches=2)
    assert text.endswith("3 are not possible (a step has 2 microbatches)")


def test_what_was_asked_for_is_said_first_and_a_faster_plan_is_named():
    slow_network = make_profile([1.0] * 4, bytes_per_s=1e7)
    text = explain(slow_network, 8, num_microbatches=64, num_pipelines=7)
    assert text.startswith("7 pipelines: 7 were asked for; 6 would take ")
    assert " % less a step; 8 would take " in text


def test_a_plan_that_is_as_fast_is_called_so():
    profile = make_profile([1.0, 1.0], bytes_per_s=1e15, param_bytes=0)
    text = explain(profile, 4, num_microbatches=8, num_pipelines=3)
    assert text == "3 pipelines: 3 were asked for; 2 would be as fast; 4 would take 20.0 % less a step"


def test_one_pipeline_has_only_more_beside_it():
    text = explain(make_profile([1.0]), 1, num_microbatches=4)
    assert text == "1 pipeline: 2 are not possible (the model needs 1 node, so there is room for 1 in 1)"


def test_others_are_planned_with_as_many_devices_in_a_group() -> None:
    asked = PlannerSettings(num_microbatches=8, devices_per_node=2, num_pipelines=2)
    grouped = Planner(uniform_profile(8, memory_bytes=60), asked, tensor_parallel=2)
    alike = Planner(uniform_profile(8, memory_bytes=120), replace(asked, devices_per_node=1))
    texts = [explain_pipelines(each, node_names(6), each.initial_plan(node_names(6))) for each in (grouped, alike)]
    assert texts[0] == texts[1]
