"""The seconds in which devices that share a stage out exchange its weights and its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.job import Sharding
from oobleck.planner import Planner, PlannerSettings, Profile, StageTemplate
from oobleck.planner.costs import closing_s
from oobleck.planner.sharding import with_exchanges
from oobleck.schedule.forecast import forecast

from .drawing import make_layer, make_network, make_profile

D = 4
PER_BYTE = (D - 1) / D / 1000
"""Seconds of an all-gather of a byte; a sum takes twice as long."""
LATENCY = 0.001


def profile(param_bytes: int = 1000, seconds: float = 3.0):
    layers = [replace(make_layer(seconds, param_bytes=param_bytes), frozen_bytes=200) for _ in range(2)]
    return make_profile(layers, network=make_network(intra=1000.0))


def test_a_step_gathers_weights_and_sums_gradients_once_where_the_optimizers_state_is_shared_out() -> None:
    found = with_exchanges(profile(), D, "optimizer")
    assert found.layers == profile().layers
    assert found.exchange_s_per_byte == pytest.approx(3 * PER_BYTE)


def test_gradients_are_summed_under_backward_passes_that_are_long_enough() -> None:
    found = with_exchanges(profile(), D, "gradients")
    sum_s = LATENCY + 2 * 800 * PER_BYTE
    assert (found.layers[0].forward_s[1], found.layers[0].backward_s[1]) == (1.0, 2.0), f"longer than {sum_s} s"
    assert found.exchange_s_per_byte == pytest.approx(PER_BYTE)
    short = with_exchanges(profile(seconds=0.3), D, "gradients").layers[0]
    assert short.forward_s[1] == pytest.approx(0.1)
    assert short.backward_s[1] == pytest.approx(sum_s)


def test_weights_come_in_both_passes_where_they_are_shared_out() -> None:
    short = with_exchanges(profile(seconds=0.3), D, "all")
    gather_s = LATENCY + 1000 * PER_BYTE
    assert short.layers[0].forward_s[1] == pytest.approx(gather_s)
    assert short.layers[0].backward_s[1] == pytest.approx(gather_s + LATENCY + 2 * 800 * PER_BYTE)
    assert short.exchange_s_per_byte == 0


def test_nothing_is_exchanged_without_sharding() -> None:
    assert with_exchanges(profile(), D, "none") == with_exchanges(profile(), 1, "all") == profile()


def test_plans_and_timelines_know_the_exchanges() -> None:
    settings = PlannerSettings(num_microbatches=4, devices_per_node=D, fault_threshold=0)

    def step_s(sharding: Sharding) -> tuple[float, float]:
        planner = Planner(profile(), settings, tensor_parallel=D, sharding=sharding)
        decision = planner.initial_plan(["node0"])
        return decision.predicted_step_s, forecast(planner.profile, decision.plan).step_s

    for sharded_s, alone_s in zip(step_s("optimizer"), step_s("none"), strict=True):
        assert sharded_s - alone_s == pytest.approx(2 * 800 * 3 * PER_BYTE)


def test_tokens_travel_to_experts_in_each_pass_and_their_weights_stay() -> None:
    mixture = profile()
    layer = replace(mixture.layers[0], expert_bytes=600, expert_message_bytes=40)
    mixture = replace(mixture, layers=(layer,) * 2)
    both_ways_s = 2 * (LATENCY + 40 * PER_BYTE)
    found = with_exchanges(mixture, D, "optimizer")
    assert found.layers[0].forward_s[1] == pytest.approx(1.0 + both_ways_s)
    assert found.layers[0].backward_s[1] == pytest.approx(2.0 + both_ways_s)
    stage = StageTemplate(first_layer=0, stop_layer=2, node_index=0)
    assert closing_s(found, [stage]) == pytest.approx(3 * PER_BYTE * 2 * 200)  # of 800 trained bytes, 600 are experts'
    short = replace(layer, forward_s={1: 1e-6}, backward_s={1: 2e-6}, expert_message_bytes=0)
    short = with_exchanges(replace(mixture, layers=(short,) * 2), D, "all").layers[0]
    gather_s = LATENCY + 400 * PER_BYTE
    assert short.forward_s[1] == pytest.approx(gather_s)
    assert short.backward_s[1] == pytest.approx(gather_s + LATENCY + 2 * 200 * PER_BYTE)


def test_frozen_experts_have_no_gradients_to_sum() -> None:
    layer = replace(profile().layers[0], frozen_bytes=600, expert_bytes=600)
    assert (layer.exchanged_bytes, layer.gathered_bytes) == (400, 400)
    assert replace(layer, frozen_bytes=100).exchanged_bytes == 300


@pytest.mark.parametrize(("num_devices", "degree", "more_s"), [(1, 1, 1.0), (2, 1, 0.5), (D, D, 0.25)])
def test_plans_and_timelines_know_the_updates_of_the_stage_with_most(
    num_devices: int, degree: int, more_s: float
) -> None:
    """After all passes; devices that share a stage share its update, too."""
    settings = PlannerSettings(num_microbatches=4, devices_per_node=num_devices, fault_threshold=0, num_pipelines=1)
    plain = profile()
    updating = replace(plain, layers=tuple(replace(layer, update_s=0.5) for layer in plain.layers))

    def steps_s(of: Profile) -> tuple[float, float, float]:
        planner = Planner(of, settings, tensor_parallel=degree)
        decision = planner.initial_plan(["node0"])
        costs = planner.template_step_s(1, 4)
        return decision.predicted_step_s, forecast(planner.profile, decision.plan).step_s, costs

    for with_s, without_s in zip(steps_s(updating), steps_s(plain), strict=True):
        assert with_s - without_s == pytest.approx(more_s)
