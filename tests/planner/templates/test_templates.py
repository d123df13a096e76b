from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import PlanningError
from oobleck.planner import PipelineTemplate, Profile
from oobleck.planner.costs import StageCosts, Timing
from oobleck.planner.templates.templates import find_templates
from tests.examples import examples
from tests.planner.drawing import make_layer, make_network, make_profile, profiles, uniform_profile


def splits_of_node(per_node: int, largest: int) -> list[tuple[int, ...]]:
    """All ways to give a node's devices, in order, to stages of 1, 2, 4, … devices."""
    if per_node == 0:
        return [()]
    counts = [1 << e for e in range(largest.bit_length()) if 1 << e <= min(largest, per_node)]
    return [(count, *rest) for count in counts for rest in splits_of_node(per_node - count, largest)]


def all_templates(costs: StageCosts, num_nodes: int) -> Iterator[PipelineTemplate]:
    """All cuts and device splits, whether they fit or not."""
    largest = costs.device_counts[-1]
    for nodes in itertools.product(splits_of_node(costs.devices_per_node, largest), repeat=num_nodes):
        devices = [count for node in nodes for count in node]
        for cuts in itertools.combinations(range(1, costs.num_layers), len(devices) - 1):
            bounds = (0, *cuts, costs.num_layers)
            stages, device = [], 0
            for first, stop, count in zip(bounds, bounds[1:], devices, strict=False):
                stages.append(costs.stage(first, stop, device, count))
                device += count
            yield PipelineTemplate(stages=tuple(stages))


def independent_stage_seconds(profile: Profile, template: PipelineTemplate) -> list[float]:
    """A stage's time from the profile itself: compute, and the messages it sends."""
    network = profile.network
    seconds = []
    for index, stage in enumerate(template.stages):
        total = sum(
            profile.layers[layer].forward_s[stage.num_devices] + profile.layers[layer].backward_s[stage.num_devices]
            for layer in stage.layers
        )
        for neighbour, cut in ((index - 1, stage.first_layer), (index + 1, stage.stop_layer)):
            if not 0 <= neighbour < template.num_stages:
                continue
            sent = profile.layers[cut - 1].output_bytes
            if template.stages[neighbour].node_index == stage.node_index:
                total += network.intra_node_latency_s + sent / network.intra_node_bytes_per_s
            else:
                total += network.inter_node_latency_s + sent / network.inter_node_bytes_per_s
        seconds.append(total)
    return seconds


def fits_independently(profile: Profile, template: PipelineTemplate, max_in_flight: int) -> bool:
    for index, stage in enumerate(template.stages):
        layers = [profile.layers[layer] for layer in stage.layers]
        in_flight = min(template.num_stages - index, max_in_flight)
        received = profile.layers[stage.first_layer - 1].message_bytes if index else 0
        sent = layers[-1].message_bytes if index + 1 < template.num_stages else 0
        used = max(layer.transient_bytes for layer in layers)
        for layer in layers:
            used += 2 * layer.param_bytes + layer.optimizer_bytes + layer.copy_bytes
            used += in_flight * layer.activation_bytes
        # Three messages at each neighbour, and the outputs that wait for their gradients; on each device.
        used += stage.num_devices * (3 * received + 3 * sent + in_flight * sent + profile.device.communication_bytes)
        if used > stage.num_devices * profile.device.memory_bytes:
            return False
    return True


def brute_force_s(profile: Profile, costs: StageCosts, num_nodes: int, num_microbatches: int) -> float | None:
    times = [
        sum(seconds) + (num_microbatches - 1) * max(seconds)
        for template in all_templates(costs, num_nodes)
        if fits_independently(profile, template, costs.max_in_flight)
        for seconds in [independent_stage_seconds(profile, template)]
    ]
    return min(times, default=None)


def check_against_brute_force(
    profile: Profile, per_node: int, per_stage: int, max_in_flight: int, per_device: int, most_nodes: int = 4
) -> None:
    costs = StageCosts(profile, devices_per_node=per_node, max_devices_per_stage=per_stage, max_in_flight=max_in_flight)
    found = find_templates(costs, range(1, most_nodes + 1), microbatches_per_device=per_device)
    for num_nodes in range(1, most_nodes + 1):
        num_microbatches = max(1, min(max_in_flight, per_device * num_nodes * per_node))
        best_s = brute_force_s(profile, costs, num_nodes, num_microbatches)
        if best_s is None:
            assert num_nodes not in found
            continue
        template = found[num_nodes]
        assert template.num_nodes == num_nodes
        assert template.num_layers == profile.num_layers
        assert fits_independently(profile, template, max_in_flight)
        seconds = independent_stage_seconds(profile, template)
        assert sum(seconds) + (num_microbatches - 1) * max(seconds) == pytest.approx(best_s, rel=1e-8)
        timing = costs.timing(template)
        assert timing == Timing(first_s=pytest.approx(sum(seconds)), next_s=pytest.approx(max(seconds)))


@examples(150)
@given(profile=profiles(max_layers=8), max_in_flight=st.sampled_from((1, 2, 64)), per_device=st.sampled_from((1, 4)))
def test_templates_of_one_device_a_stage_are_the_best_of_all_cuts(
    profile: Profile, max_in_flight: int, per_device: int
) -> None:
    check_against_brute_force(profile, 1, 1, max_in_flight, per_device, most_nodes=6)


@examples(150)
@given(
    profile=profiles(max_layers=6, device_counts=(1, 2, 4, 8)),
    shape=st.sampled_from(((2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 8))),
    max_in_flight=st.sampled_from((1, 2, 64)),
)
def test_templates_of_several_devices_are_the_best_of_all_cuts_and_splits(
    profile: Profile, shape: tuple[int, int], max_in_flight: int
) -> None:
    check_against_brute_force(profile, *shape, max_in_flight, 1, most_nodes=3 if shape[0] == 2 else 2)


def test_memory_is_searched_with_stages_counted_where_the_fewest_stages_would_mislead() -> None:
    # Four stages of one device are fastest, but the first would keep 4 microbatches of 20 bytes in flight.
    layers = [make_layer(4, param_bytes=0, activation_bytes=20, device_counts=(1, 2), sharing=0.95) for _ in range(4)]
    profile = make_profile(layers, memory_bytes=65)
    costs = StageCosts(profile, devices_per_node=2, max_devices_per_stage=2, max_in_flight=64)
    template = find_templates(costs, [2])[2]
    assert [stage.num_devices for stage in template.stages] == [2, 2]
    check_against_brute_force(profile, 2, 2, 64, 4, most_nodes=2)


def test_all_devices_of_a_node_are_used_and_no_stage_spans_nodes() -> None:
    layers = [make_layer(device_counts=(1, 2, 4)) for _ in range(12)]
    costs = StageCosts(make_profile(layers), devices_per_node=4, max_devices_per_stage=4, max_in_flight=16)
    for num_nodes, template in find_templates(costs, range(1, 9)).items():
        used = [
            (stage.node_index, stage.first_device + offset)
            for stage in template.stages
            for offset in range(stage.num_devices)
        ]
        assert used == [(node, device) for node in range(num_nodes) for device in range(4)]


def test_one_device_a_stage_gives_as_many_stages_as_devices() -> None:
    costs = StageCosts(uniform_profile(12), devices_per_node=4, max_devices_per_stage=1, max_in_flight=16)
    found = find_templates(costs, range(1, 9))
    assert {nodes: template.num_stages for nodes, template in found.items()} == {1: 4, 2: 8, 3: 12}


def test_ties_go_to_the_most_even_stages() -> None:
    costs = StageCosts(uniform_profile(10), max_in_flight=64)
    template = find_templates(costs, [4])[4]
    assert sorted(len(stage.layers) for stage in template.stages) == [2, 2, 3, 3]


def test_templates_do_not_depend_on_which_others_are_asked_for() -> None:
    costs = StageCosts(uniform_profile(9), max_in_flight=64)
    together = find_templates(costs, range(1, 10))
    assert all(find_templates(costs, [count])[count] == together[count] for count in together)


def test_no_template_is_asked_for_or_possible() -> None:
    costs = StageCosts(uniform_profile(3), max_in_flight=4)
    assert find_templates(costs, []) == {}
    assert find_templates(costs, [0, 4, 5]) == {}


def test_a_device_count_that_some_layer_lacks_is_not_used() -> None:
    layers = [make_layer(device_counts=(1, 2)), make_layer(device_counts=(1,))]
    assert StageCosts(
        make_profile(layers), devices_per_node=2, max_devices_per_stage=2, max_in_flight=4
    ).device_counts == (1,)


@pytest.mark.parametrize(("per_node", "per_stage"), [(0, 1), (1, 0)])
def test_no_devices_is_a_planning_error(per_node: int, per_stage: int) -> None:
    with pytest.raises(PlanningError, match="at least 1"):
        StageCosts(uniform_profile(3), devices_per_node=per_node, max_devices_per_stage=per_stage, max_in_flight=4)


def test_a_layer_without_any_cost_can_be_planned() -> None:
    costs = StageCosts(make_profile([make_layer(0.0), make_layer(0.0), make_layer()]), max_in_flight=1)
    assert find_templates(costs, [1, 2, 3])[3].num_stages == 3


def test_of_equally_even_cuts_the_longest_stages_come_first() -> None:
    profile = make_profile([make_layer() for _ in range(26)], network=make_network(latency_s=0.0))
    template = find_templates(StageCosts(profile, max_in_flight=64), [4])[4]
    assert [len(stage.layers) for stage in template.stages] == [7, 7, 6, 6]
