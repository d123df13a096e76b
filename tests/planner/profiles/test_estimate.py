from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Literal

import pytest

from oobleck.errors import ConfigError
from oobleck.planner import (
    KNOWN_DEVICES,
    KNOWN_MODELS,
    NetworkProfile,
    Planner,
    PlannerSettings,
    Profile,
    device_sheet,
    device_sheet_from_json,
    estimate_profile,
    model_shape,
    profile_from_json,
    profile_to_json,
    shape_from_config,
)
from oobleck.planner.profiles import in_one_layer, shape_of_size, training_flops

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "name_or_path": "llama-7b",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def estimate(
    model: str = "gpt2",
    device: str = "A40",
    precision: Literal["float32", "bfloat16"] = "bfloat16",
    *,
    checkpointing: bool = False,
    counts: tuple[int, ...] = (1,),
    network: NetworkProfile | None = None,
) -> Profile:
    return estimate_profile(
        model_shape(model),
        device_sheet(device),
        microbatch_size=2,
        sequence_length=512,
        precision=precision,
        recompute="all" if checkpointing else "none",
        device_counts=counts,
        network=network,
    )


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-xl", 1557.6), ("gpt3-2.7b", 2651.6), ("gpt3-6.7b", 6658.5)],
)
def test_parameters_are_counted_as_published(name: str, millions: float) -> None:
    assert model_shape(name).num_params / 1e6 == pytest.approx(millions, rel=1e-3)


def test_a_configuration_gives_the_known_shape() -> None:
    assert shape_from_config(GPT2).num_params == model_shape("GPT2").num_params == 124_439_808


def test_llamas_kin_are_gated_rotary_and_untied() -> None:
    shape = shape_from_config(LLAMA)
    assert shape.name == "llama-7b"
    assert shape.num_params == 6_738_415_616
    grouped = shape_from_config(LLAMA | {"num_key_value_heads": 8})
    assert grouped.block_params == shape.block_params - 2 * 4096 * (4096 - 1024)


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        # Jiang et al. 2024 ("Mixtral of Experts", section 2): 47 and 13 billion; Qwen3's report, table 2: 30.5 and 3.3.
        (MIXTRAL, 46.7, 12.9),
        (QWEN3, 30.5, 3.3),
    ],
)
def test_of_a_mixture_all_experts_are_held_and_some_compute(
    config: dict[str, Any], billions: float, active_billions: float
) -> None:
    shape = shape_from_config(config)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=5e-3)
    active = shape.num_params - shape.num_blocks * (shape.block_params - shape.active_params)
    assert active / 1e9 == pytest.approx(active_billions, rel=0.02)
    flops = training_flops(shape, num_samples=1, sequence_length=1)
    assert flops < 6.5 * active_billions * 1e9, "by what computes for a token"


def test_experts_that_stay_on_their_devices_are_known_to_an_estimate() -> None:
    shape, sheet = shape_from_config(MIXTRAL), device_sheet("H100")
    gathered, placed = (
        estimate_profile(shape, sheet, microbatch_size=1, sequence_length=4096, expert_parallel=each).layers[1]
        for each in (False, True)
    )
    assert (gathered.expert_bytes, gathered.expert_message_bytes) == (0, 0)
    assert placed.expert_bytes == 4 * 8 * 3 * 4096 * 14336
    assert placed.expert_message_bytes == 4096 * 2 * 4096 * 2
    assert replace(placed, expert_bytes=0, expert_message_bytes=0) == gathered


def test_devices_that_share_samples_take_a_part_of_all_but_weights() -> None:
    shape, sheet = shape_from_config(MIXTRAL), device_sheet("H100")
    whole, part = (
        estimate_profile(shape, sheet, microbatch_size=1, sequence_length=65536, context_parallel=each).layers[1]
        for each in (1, 4)
    )
    assert part.param_bytes == whole.param_bytes
    assert part.activation_bytes * 4 == whole.activation_bytes
    assert part.forward_s[1] * 4 == pytest.approx(whole.forward_s[1], rel=1e-6)
    # 32 heads of 128 of queries and of outputs, and 8 of keys and values, of 16384 tokens in bfloat16.
    assert part.context_bytes == 3 * 16384 * 2 * (32 + 8) * 128 * 2 // 4
    with pytest.raises(ConfigError, match="64 devices cannot share samples of 65536 tokens and 32 heads"):
        estimate_profile(shape, sheet, microbatch_size=1, sequence_length=65536, context_parallel=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": None}, "hidden_size is missing"),
        ({"n_layer": "12"}, "n_layer is '12'; it must be a whole number"),
        ({"n_head": 0}, "n_head: 0 is not possible; it must be from 1 to"),
    ],
)
def test_a_configuration_that_cannot_be_used_names_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_from_config(GPT2 | change)


def test_estimates_are_labelled_also_in_files() -> None:
    profile = estimate()
    assert profile.estimated
    assert profile_from_json(profile_to_json(profile)) == profile


def test_every_known_model_can_be_estimated_on_every_known_device() -> None:
    for model in KNOWN_MODELS:
        for device in KNOWN_DEVICES:
            profile = estimate(model, device, counts=(1, 2, 4, 8))
            assert profile.num_layers == KNOWN_MODELS[model].num_blocks + 2
            assert profile.layers[-1].output_bytes == 0


def test_a_blocks_time_is_its_operations_at_the_assumed_rate() -> None:
    block = estimate("gpt3-6.7b", "A40", "float32").layers[1]
    flops = 2 * 12 * 4096**2 * 1024 + 4 * 1024 * 512 * 4096
    assert block.forward_s[1] == pytest.approx(flops / (0.45 * 37.4e12), rel=2e-3)
    assert block.backward_s[1] == pytest.approx(2 * block.forward_s[1])


def test_recomputing_trades_memory_for_time() -> None:
    plain, frugal = estimate().layers[1], estimate(checkpointing=True).layers[1]
    # Autocast leaves the hidden states between blocks in float32.
    assert frugal.activation_bytes == frugal.message_bytes == 2 * frugal.output_bytes < plain.activation_bytes
    assert frugal.transient_bytes == plain.transient_bytes + plain.activation_bytes
    assert frugal.backward_s[1] == pytest.approx(plain.backward_s[1] + plain.forward_s[1])


def test_half_precision_halves_all_activations_but_norms_and_masks_and_keeps_the_state() -> None:
    half, full = estimate().layers[1], estimate(precision="float32").layers[1]
    norms_and_masks = 2 * 512 * 768 * (8 + 2)
    assert 2 * half.activation_bytes == full.activation_bytes + norms_and_masks
    assert half.state_bytes == full.state_bytes == 12 * model_shape("gpt2").block_params
    assert half.forward_s[1] < full.forward_s[1]


def test_llama3_8b_with_8192_tokens_fits_on_four_nodes_of_eight_h100s() -> None:
    """Its attention's scores alone would take 12 GB a block, more than a device has room for."""
    config = LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
    shape = shape_from_config(config | {"max_position_embeddings": 8192})
    profile = estimate_profile(shape, device_sheet("H100"), microbatch_size=1, sequence_length=8192)
    assert profile.layers[1].activation_bytes == 59 * 8192 * 4096
    planner = Planner(profile, PlannerSettings(num_microbatches=256, devices_per_node=8))
    decision = planner.initial_plan([f"node{number}" for number in range(4)])
    assert decision.plan.num_microbatches == 256


def test_what_a_gpu_holds_besides_is_not_counted_in_a_hosts_memory() -> None:
    on_gpu, on_host = estimate(), estimate(device="CPU")
    counted = ("copy_bytes", "transient_bytes", "message_bytes")
    assert {getattr(layer, name) for layer in on_host.layers for name in counted} == {0}
    assert {name for layer in on_gpu.layers[:-1] for name in counted if not getattr(layer, name)} == set()
    assert on_host.device.communication_bytes == 0 < on_gpu.device.communication_bytes


def test_more_devices_share_the_work_and_pay_for_reductions() -> None:
    slow = NetworkProfile(
        inter_node_bytes_per_s=1e9, inter_node_latency_s=0, intra_node_bytes_per_s=1e8, intra_node_latency_s=0
    )
    quick_block = estimate(counts=(1, 2)).layers[1]
    slow_block = estimate(counts=(1, 2), network=slow).layers[1]
    assert quick_block.forward_s[2] < quick_block.forward_s[1] == slow_block.forward_s[1] < slow_block.forward_s[2]


def test_what_does_not_exist_suggests_what_does() -> None:
    with pytest.raises(ConfigError, match=r"'gpt4' .*'gpt2'"):
        model_shape("gpt4")
    with pytest.raises(ConfigError, match=r"'A41' .*'A40'"):
        device_sheet("A41")


def test_impossible_estimates_are_named() -> None:
    shape, sheet = model_shape("gpt2"), device_sheet("cpu")
    with pytest.raises(ConfigError, match=r"1025 .*1024 .*gpt2"):
        estimate_profile(shape, sheet, microbatch_size=1, sequence_length=1025)
    with pytest.raises(ConfigError, match="precision 'int8'"):
        estimate_profile(shape, sheet, microbatch_size=1, sequence_length=8, precision="int8")  # type: ignore[arg-type]


SHEET: dict[str, Any] = {
    "name": "L40S",
    "memory_bytes": 48_000_000_000,
    "memory_bytes_per_s": 8.64e11,
    "float32_flops": 9.16e13,
    "bfloat16_flops": 3.62e14,
    "intra_node_bytes_per_s": 3.2e10,
}


def test_a_data_sheet_comes_from_a_file() -> None:
    sheet = device_sheet_from_json(json.dumps(SHEET | {"inter_node_latency_s": 2e-5}))
    assert sheet.name == "L40S"
    assert sheet.network.inter_node_latency_s == 2e-5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "l40s.json: not JSON"),
        ("[]", "must be an object, not list"),
        (json.dumps(SHEET | {"memory": 3}), "unknown key 'memory'; did you mean 'memory_bytes'"),
        (json.dumps(SHEET | {"name": 3}), "name is 3; it must be text"),
        (json.dumps(SHEET | {"name": None}), "name is None; it must be text"),
        (json.dumps(SHEET | {"float32_flops": "fast"}), "float32_flops is 'fast'; it must be a number"),
        (json.dumps(SHEET | {"float32_flops": -1}), "float32_flops is -1; it must be from 1 to"),
        (json.dumps({"name": "x"}), "memory_bytes is missing"),
    ],
)
def test_a_data_sheet_that_is_wrong_names_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        device_sheet_from_json(text, source="l40s.json")


def test_a_model_that_is_kept_whole_costs_what_its_layers_do_together():
    profile = estimate_profile(shape_of_size(12 * 64**2), device_sheet("CPU"), microbatch_size=2, sequence_length=16)
    whole = in_one_layer(profile, name="t5")
    (layer,) = whole.layers
    assert whole.model == "t5"
    assert layer.forward_s[1] == pytest.approx(sum(each.forward_s[1] for each in profile.layers))
    assert layer.state_bytes == sum(each.state_bytes for each in profile.layers)
    assert layer.output_bytes == 0
