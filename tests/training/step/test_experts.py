"""Experts that stay on their devices: tokens that are sent to them give what one device computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from oobleck.errors import ConfigError
from oobleck.job import LoraSpec, ModelSpec, Recompute, Scalar, Sharding
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import sharded
from tests.training.model.test_adapters import adapted
from tests.training.model.test_frozen import frozen_structure
from tests.training.step.test_node_sums import KEY, LEVELS, SHORT, Device, devices_of, on_all
from tests.training.zoo import SEQUENCE_LENGTH, VOCAB_SIZE, random_batch, structure_of, whole_stage

DEGREE = 2
_SIZES: dict[str, Scalar] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_SMALL: dict[str, Scalar] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Scalar] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Scalar]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**_SMALL, "num_experts": 4},
    "deepseek_v3": {**_SMALL, **_DEEPSEEK},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}


def mixture(family: str, **config: Scalar) -> ModelStructure:
    spec = ModelSpec(type=family, config={**_SIZES, **CONFIGS[family], **config})
    return ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def experts_in(device: Device) -> frozenset[str]:
    return frozenset().union(*device.state.share.experts.values())


def step(devices: list[Device], seeds: range) -> float:
    """Each device computes every second microbatch; returns the sum of their losses."""
    losses = [0.0] * DEGREE

    def run(device: Device) -> None:
        rank = device.state.share.rank
        device.node_sums.begin()
        with device.node_sums.casting():
            for seed in seeds[rank::DEGREE]:
                losses[rank] += device.compute(random_batch(seed))
        device.node_sums.conclude()

    on_all(devices, run)
    return sum(losses)


def alone(structure: ModelStructure, seeds: range) -> tuple[float, dict[str, nn.Parameter]]:
    stage = whole_stage(structure, dtype=torch.float64)
    total = 0.0
    for seed in seeds:
        batch = random_batch(seed)
        loss = stage.forward(batch, None, num_items=DEGREE * batch.num_items, key=KEY)
        loss.backward()
        total += float(loss.detach())
    return total, stage.parameters


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize("family", [*sorted(CONFIGS), "frozen"])
def test_tokens_that_are_sent_to_experts_give_what_one_device_computes(family: str, sharding: Sharding) -> None:
    structure = frozen_structure("mixtral", lambda name: "experts" in name) if family == "frozen" else mixture(family)
    devices = devices_of(structure, degree=DEGREE, sharding=sharding, expert_parallel=True)
    expected, parameters = alone(structure, range(4))
    assert step(devices, range(4)) == pytest.approx(expected, rel=1e-12)
    for device in devices:
        placed = experts_in(device)
        assert placed
        assert not placed & device.state.wholes.keys()
        for name, share in device.state.parameters.items():
            whole = parameters[name]
            if name in placed:
                assert len(share) * DEGREE == len(whole), name
                assert device.state.model.parameters[name] is share
            assert (share.grad is None) == (whole.grad is None), name
            if whole.grad is not None:
                rows = device.state.share.part_of(name, whole.grad)
                torch.testing.assert_close(share.grad, rows, rtol=1e-9, atol=1e-12)
    assert len({tuple(device.collectives.posted) for device in devices}) == 1


@pytest.mark.parametrize("recompute", ["selective", "all"])
def test_blocks_that_are_computed_again_exchange_their_tokens_again(recompute: Recompute) -> None:
    structure = mixture("mixtral")
    devices = devices_of(structure, degree=DEGREE, sharding="all", expert_parallel=True, recompute=recompute)
    expected, parameters = alone(structure, range(4))
    assert step(devices, range(4)) == pytest.approx(expected, rel=1e-12)
    for device in devices:
        for name in experts_in(device):
            rows = device.state.share.part_of(name, parameters[name].grad)
            torch.testing.assert_close(device.state.parameters[name].grad, rows, rtol=1e-9, atol=1e-12)


def test_a_device_to_whose_experts_no_token_goes_takes_part_all_the_same() -> None:
    structure = mixture("mixtral", num_experts_per_tok=1)
    devices = devices_of(structure, degree=DEGREE, expert_parallel=True)
    routers = [name for name in structure.shapes if name.endswith("mlp.gate.weight")]

    def all_to_one(parameters: Any) -> None:
        with torch.no_grad():
            for name in routers:
                parameters[name].zero_()  # equal scores for all tokens

    for device in devices:
        all_to_one(device.state.parameters)
    losses = step(devices, range(2))
    stage = whole_stage(structure, dtype=torch.float64)
    all_to_one(stage.parameters)
    batches = [random_batch(seed) for seed in range(2)]
    found = [stage.forward(batch, None, num_items=DEGREE * batch.num_items, key=KEY) for batch in batches]
    assert losses == pytest.approx(float(sum(found).detach()), rel=1e-12)
    idle = [all(not device.state.parameters[name].grad.any() for name in experts_in(device)) for device in devices]
    assert sorted(idle) == [False, True]


def test_in_short_types_experts_compute_what_one_device_computes() -> None:
    structure = mixture("mixtral")
    devices = devices_of(structure, degree=DEGREE, sharding="gradients", precision=SHORT, expert_parallel=True)
    gathered = devices_of(structure, degree=DEGREE, sharding="gradients", precision=SHORT)
    assert step(devices, range(4)) == pytest.approx(step(gathered, range(4)), rel=1e-3)
    for device, other in zip(devices, gathered, strict=True):
        for name in experts_in(device):
            own, expected = device.state.parameters[name], other.state.parameters[name]
            assert own.dtype == own.grad.dtype == torch.float32
            torch.testing.assert_close(own.grad, expected.grad, rtol=0.05, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "degree", "words"),
    [
        (lambda: structure_of("llama"), 2, "its plan names no experts"),
        (lambda: mixture("mixtral"), 3, "has 4 experts, which 3 devices cannot share"),
        (lambda: adapted("llama", LoraSpec(r=4)), 2, "adapters and hooks on gradients take whole parameters"),
    ],
)
def test_what_has_no_such_experts_is_refused_by_name(make: Any, degree: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"expert_parallel: .*{words}"):
        sharded(make(), rank=0, degree=degree, sharding="all", expert_parallel=True)


class Bounded(MixtralExperts):
    """Experts whose outputs are no weighted sum."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs).tanh()


def test_experts_that_are_no_weighted_sum_are_refused() -> None:
    structure = mixture("mixtral")

    def make(dtype: torch.dtype) -> Any:
        model: Any = structure.make(dtype)
        for block in model.model.layers:
            block.mlp.experts.__class__ = Bounded
        return model

    with pytest.raises(ConfigError, match="something else than a weighted sum"):
        sharded(replace(structure, make=make), rank=0, degree=2, sharding="all", expert_parallel=True)
