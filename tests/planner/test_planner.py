from __future__ import annotations

import dataclasses
import subprocess
import sys
from functools import partial

import pytest

import oobleck.planner
from oobleck.errors import PlanningError
from oobleck.planner import DeviceProfile, Planner, PlannerSettings, Profile
from tests.planner.drawing import make_layer, make_network, make_profile, uniform_profile


def planner(profile: Profile | None = None, **options: int) -> Planner:
    options.setdefault("num_microbatches", 8)
    return Planner(profile or uniform_profile(12), PlannerSettings(**options))


def nodes(count: int) -> list[str]:
    return [f"node{index}" for index in range(count)]


def test_a_start_uses_all_nodes_and_says_so() -> None:
    decision = planner(num_pipelines=2).initial_plan(nodes(4))
    assert decision.action == "start"
    assert all(words in decision.reason for words in ("4 nodes", "2 pipelines", "(2, 2 nodes)"))
    assert decision.transfers == ()
    assert decision.redundant
    assert [pipeline.num_microbatches for pipeline in decision.plan.pipelines] == [4, 4]


def test_a_start_below_the_fault_threshold_says_so() -> None:
    decision = planner().initial_plan(nodes(1))
    assert "f = 1" in decision.reason
    assert not decision.redundant


def test_a_step_of_which_nothing_is_done_takes_as_long_as_its_bound() -> None:
    decision = planner().initial_plan(nodes(5), slow={"node0": 2.0})
    rests = {index: (each.num_microbatches, 0) for index, each in enumerate(decision.plan.pipelines)}
    uneven = planner()
    assert uneven.rest_s(decision.plan, rests, slow={"node0": 2.0}) == decision.bound_step_s


def test_the_rest_of_a_step_is_what_the_slowest_has_left() -> None:
    profile = make_profile([make_layer(3.0, param_bytes=0) for _ in range(4)], network=make_network(latency_s=0))
    plan = planner(profile, num_pipelines=2).initial_plan(nodes(4)).plan
    rest_s = partial(planner(profile).rest_s, plan)
    assert rest_s({0: (4, 0), 1: (4, 0)}) == 12 + 3 * 6
    assert rest_s({0: (1, 0), 1: (3, 0)}) == 3 * 6, "a pipeline that is filled takes one after the other"
    assert rest_s({0: (0, 0)}) == 0
    assert rest_s({0: (1, 4)}) == 6 + 12 + 3 * 6, "others come in a run of their own"


def test_spares_are_told() -> None:
    decision = planner(uniform_profile(2), num_pipelines=1, fault_threshold=0).initial_plan(nodes(4))
    assert "2 spares" in decision.reason
    assert decision.plan.spares == ("node2", "node3")


def test_every_node_has_as_many_stages_as_devices() -> None:
    plan = planner(devices_per_node=4, num_pipelines=1).initial_plan(nodes(2)).plan
    assert plan.pipelines[0].template.num_stages == 8
    assert len(plan.worker_ids) == 8


def test_several_pipelines_of_nodes_with_several_devices_reconfigure() -> None:
    several = planner(devices_per_node=2, num_pipelines=2)
    plan = several.initial_plan(nodes(4)).plan
    decision = several.reconfigure(plan, lost=["node0"])
    assert sorted(len(pipeline.nodes) for pipeline in decision.plan.pipelines) == [1, 2]
    for place, layers in decision.plan.layers_at.items():
        received = {transfer.layer for transfer in decision.transfers if transfer.target == place}
        assert received == layers - plan.layers_at[place]


def test_redundancy_may_cost_so_much_and_no_more() -> None:
    """On a slow network a second pipeline's reduction takes longer than it saves."""
    profile = make_profile([make_layer(3.0, param_bytes=8)] * 12, network=make_network(inter=1.0, latency_s=0.0))

    def asked(**options: float | None) -> Planner:
        return Planner(profile, PlannerSettings(num_microbatches=8, **options))  # type: ignore[arg-type]  # numbers

    cost = asked(fault_threshold=1).step_s(nodes(12)) / asked(fault_threshold=0).step_s(nodes(12)) - 1
    assert cost > 0.1
    for percent, expected in ((None, 2), (100 * cost + 1, 2), (100 * cost - 1, 1), (0.0, 1)):
        decision = asked(fault_threshold=1, max_redundancy_percent=percent).initial_plan(nodes(12))
        assert len(decision.plan.pipelines) == expected
        assert decision.redundant == (expected == 2)


def test_fewer_pipelines_than_asked_for_where_the_model_is_too_large() -> None:
    decision = planner(uniform_profile(8, memory_bytes=96), num_pipelines=3).initial_plan(nodes(5))
    assert len(decision.plan.pipelines) == 2


def test_fewer_pipelines_where_microbatches_are_few() -> None:
    decision = planner(num_microbatches=2).initial_plan(nodes(6))
    assert [pipeline.num_microbatches for pipeline in decision.plan.pipelines] in ([2], [1, 1])


def test_slow_nodes_come_together_and_the_slowest_wait() -> None:
    slow = {"node0": 2.0, "node2": 2.0}
    plan = planner(num_pipelines=2).initial_plan(nodes(4), slow=slow).plan
    normal, with_slow = plan.pipelines
    assert set(slow) == set(with_slow.nodes)
    assert (normal.num_microbatches, with_slow.num_microbatches) == (6, 2)
    plan = planner(num_pipelines=1, fault_threshold=0).initial_plan(nodes(3), slow={"node1": 100.0}).plan
    assert plan.spares == ("node1",)


def test_nodes_that_are_all_slow_are_used_all_the_same() -> None:
    plan = planner(uniform_profile(8, memory_bytes=96)).initial_plan(nodes(4), slow=dict.fromkeys(nodes(4), 2.0)).plan
    assert plan.nodes == tuple(nodes(4))


def test_templates_and_their_times_can_be_asked_for() -> None:
    asked = planner(uniform_profile(4))
    assert sorted(asked.templates(9)) == [1, 2, 3, 4]
    assert sorted(asked.templates(2)) == [1, 2]
    assert asked.template_step_s(1, 5) == pytest.approx(60.0)


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, "no nodes were given"),
        (["a", "b", "a"], {}, "node a is named twice"),
        (["a"], {"num_pipelines": 3}, "3 pipelines need at least 3 nodes; there are 1"),
    ],
)
def test_impossible_starts_are_named(names: list[str], options: dict[str, int], message: str) -> None:
    with pytest.raises(PlanningError, match=message):
        planner(**options).initial_plan(names)


def test_a_layer_that_fits_nowhere_is_named_with_the_bytes_that_it_needs() -> None:
    layers = [make_layer(name="small"), make_layer(name="huge", param_bytes=100)]
    profile = make_profile(layers, memory_bytes=150)
    with pytest.raises(
        PlanningError, match=r"layer 1 \(huge\) .* needs 401 bytes, and a stage has 150 bytes .*; give each node"
    ):
        planner(profile).initial_plan(nodes(3))


def test_too_few_nodes_are_told_how_many_it_takes() -> None:
    profile = uniform_profile(8, memory_bytes=60)
    with pytest.raises(PlanningError, match=r"3 nodes .* 2\b"):
        planner(profile).initial_plan(nodes(2))
    with pytest.raises(PlanningError, match="there is 1"):
        planner(profile).initial_plan(nodes(1))


def test_more_devices_than_layers_are_named() -> None:
    with pytest.raises(PlanningError, match=r"3 layers .*4 devices"):
        planner(uniform_profile(3), devices_per_node=4).initial_plan(nodes(3))


def test_a_model_whose_activations_never_fit_is_named() -> None:
    # One layer fits by itself, but the first of two stages keeps two microbatches in flight, and both layers
    # together are too large for one.
    profile = make_profile([make_layer(param_bytes=0, activation_bytes=60) for _ in range(2)], memory_bytes=100)
    with pytest.raises(PlanningError, match=r"\b120\b"):
        planner(profile, num_stages=1).initial_plan(nodes(2))
    with pytest.raises(PlanningError, match="2 nodes has memory for 1 of a step's 8 microbatches, and 14 nodes"):
        planner(profile).initial_plan(nodes(14))
    assert len(planner(profile).initial_plan(nodes(16)).plan.pipelines) == 8


def test_room_for_more_copies_of_gradients_is_what_the_fullest_device_has() -> None:
    # Each layer keeps 10 bytes of parameters, as many of gradients, and its optimizer's and activations' share.
    profile = make_profile([make_layer(param_bytes=10, activation_bytes=0) for _ in range(4)], memory_bytes=100)
    chooser = planner(profile)
    plan = chooser.initial_plan(nodes(4)).plan
    held = max(len(stage.layers) for pipeline in plan.pipelines for stage in pipeline.stages)
    free = 100 - held * (20 + profile.layers[0].optimizer_bytes)
    copies = free // (10 * held)
    assert chooser.has_room(plan, gradient_copies=copies)
    assert not chooser.has_room(plan, gradient_copies=copies + 1)


def test_reserved_memory_is_not_the_models() -> None:
    profile = dataclasses.replace(uniform_profile(8), device=DeviceProfile(name="test device", memory_bytes=200))
    assert min(planner(profile).templates(8)) == 1
    assert min(planner(profile, reserved_memory_bytes=100).templates(8)) == 2


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_of_slow_nodes_are_positive(factor: float) -> None:
    with pytest.raises(PlanningError, match=r"node0 "):
        planner().initial_plan(nodes(2), slow={"node0": factor})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_microbatches", 0),
        ("devices_per_node", 0),
        ("max_sources", 0),
        ("fault_threshold", -1),
        ("reserved_memory_bytes", -1),
        ("num_pipelines", 0),
        ("max_redundancy_percent", -1.0),
        ("max_redundancy_percent", float("inf")),
        ("mean_time_to_failure_s", 0.0),
        ("mean_time_to_failure_s", float("nan")),
    ],
)
def test_settings_that_are_impossible_are_named(option: str, value: float) -> None:
    with pytest.raises(PlanningError, match=option):
        PlannerSettings(**{"num_microbatches": 4, option: value})


def test_the_package_works_without_torch_trio_and_transformers() -> None:
    code = """
import sys
for name in ("torch", "trio", "transformers"):
    sys.modules[name] = None
import oobleck.planner as planner
assert "numpy" not in sys.modules, "values need the standard library alone"
profile = planner.estimate_profile(
    planner.model_shape("gpt2"), planner.device_sheet("A40"), microbatch_size=1, sequence_length=64
)
made = planner.Planner(profile, planner.PlannerSettings(num_microbatches=8))
plan = made.initial_plan(["a", "b", "c"]).plan
made.reconfigure(plan, lost=["b"])
assert "scipy" not in sys.modules, "nobody waits for scipy"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Plannr"):
        oobleck.planner.Plannr  # noqa: B018
