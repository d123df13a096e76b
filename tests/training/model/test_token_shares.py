"""Hidden states that devices of a stage cut by tokens are those of one device, and take a share of the memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from oobleck.job import ModelSpec
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import Share, initialize_share, install, share_of
from tests.training.model.test_tensor_parallel import (
    DEGREE,
    Sums,
    assert_alike,
    assert_are_shares,
    counted_stage,
    gradients,
)
from tests.training.zoo import KEY, SPECS, VOCAB_SIZE, random_batch, structure_of, whole_stage

CUT = ("llama", "qwen3", "gemma2", "gpt_neox", "olmo")


@pytest.mark.parametrize("family", [*CUT, "olmo2"])
def test_tokens_are_cut_unless_a_block_has_attention_that_devices_do_not_share(family: str) -> None:
    share = share_of(structure_of(family), rank=0, degree=DEGREE)
    assert share.cuts_tokens == (family != "olmo2")
    assert bool(share.summed) == (family not in ("olmo2", "olmo")), "gradients of norms are of a share of the tokens"


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_messages_between_stages_are_shares_wherever_a_model_is_cut(family: str, cut: int) -> None:
    """Behind the embedding, between blocks, and before the head."""
    whole = structure_of(family)
    loss, expected = gradients(whole_stage(whole, dtype=torch.float64))
    sums, batch = Sums(DEGREE), random_batch(3)
    shares = [share_of(whole, rank=rank, degree=DEGREE) for rank in range(DEGREE)]

    def made(share: Share, layers: range) -> StageModel:
        stage = StageModel(share.structure, dtype=torch.float64, device="cpu")
        install(stage, share, sums.of(share.rank))
        stage.adopt(layers.start, layers.stop, {})
        initialize_share(stage, share, stage.parameters, layers, seed=0)
        return stage

    ranks = [(made(share, range(cut)), made(share, range(cut, whole.num_layers))) for share in shares]

    def computed(stages: tuple[StageModel, StageModel]) -> tuple[float, dict[str, torch.Tensor]]:
        sent = stages[0].forward(batch, None, num_items=batch.num_items, key=KEY)
        assert sent.shape == stages[1].hidden_shape(len(batch.labels))
        assert sent.numel() == batch.labels.numel() * whole.hidden_size // DEGREE
        received = sent.detach().requires_grad_()
        found = stages[1].forward(batch, received, num_items=batch.num_items, key=KEY)
        found.backward()
        sent.backward(received.grad)
        named = (item for stage in stages for item in stage.parameters.items())
        return float(found.detach()), {name: each.grad for name, each in named if each.grad is not None}

    with ThreadPoolExecutor(DEGREE) as pool:
        results = list(pool.map(computed, ranks))
    assert_are_shares(shares, results, loss, expected)


class _OfAll(LlamaDecoderLayer):
    """A block that knows the mean of all tokens."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states + hidden_states.mean(1, keepdim=True), *args, **kwargs)


class _Before(LlamaDecoderLayer):
    """A block that adds what goes into attention to what comes out of it, in the shared module."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        own = self.self_attn.forward

        def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            output, weights = own(hidden_states=hidden_states, **kwargs)
            return output + hidden_states, weights

        self.self_attn.forward = forward


class _Gated(LlamaDecoderLayer):
    """A block with a layer of its own, which takes each token by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate = nn.Linear(32, 32)


@pytest.mark.parametrize("block", [_OfAll, _Before, _Gated])
def test_blocks_that_do_more_than_the_plan_says_have_all_tokens_on_each_device(block: type[LlamaDecoderLayer]) -> None:
    whole = structure_of("llama")

    def make(dtype: torch.dtype) -> Any:
        model: Any = whole.make(dtype)
        model.model.layers[2] = block(model.config, 2)
        return model

    assert share_of(whole, rank=0, degree=DEGREE).cuts_tokens
    assert not share_of(replace(whole, make=make), rank=0, degree=DEGREE).cuts_tokens


def test_tokens_that_devices_cannot_divide_stay_together() -> None:
    structure = ModelStructure.from_spec(SPECS["llama"], vocab_size=VOCAB_SIZE, sequence_length=23)
    assert not share_of(structure, rank=0, degree=DEGREE).cuts_tokens


def test_tokens_stay_together_where_devices_would_drop_the_same_of_different_ones() -> None:
    config = {**SPECS["gpt_neox"].config, "hidden_dropout": 0.1}
    spec = ModelSpec(type="gpt_neox", config=config)
    structure = ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=24)
    assert not share_of(structure, rank=0, degree=DEGREE).cuts_tokens
    assert share_of(replace(structure, drops=False), rank=0, degree=DEGREE).cuts_tokens


def test_frozen_norms_and_a_trained_head_are_as_on_one_device() -> None:
    whole = structure_of("llama")
    norms = {name for name in whole.shapes if "input_layernorm" in name}
    whole = replace(whole, frozen=whole.frozen | norms)
    assert_alike(whole, random_batch(5), *gradients(whole_stage(whole, dtype=torch.float64), random_batch(5)))


def _kept_bytes(*, cuts_tokens: bool) -> int:
    """What the blocks of a stage keep for the backward pass, of what is no weight."""
    share = replace(share_of(structure_of("llama"), rank=0, degree=DEGREE), cuts_tokens=cuts_tokens)
    _, stage = counted_stage(share)
    stage.adopt(1, 1 + share.whole.num_blocks, {})
    weights = {each.untyped_storage().data_ptr() for each in stage.parameters.values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = random_batch(3)
    received = torch.randn(stage.hidden_shape(len(batch.labels))).to(stage.hidden_dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.forward(batch, received, num_items=batch.num_items, key=KEY)
    assert output.shape == received.shape
    return sum(kept.values())


def test_a_device_keeps_its_share_of_what_is_between_shared_modules() -> None:
    """For each token and hidden unit of a block: two residual sums, and two norms' outputs, in float32."""
    whole, batch = structure_of("llama"), random_batch(3)
    per_value = batch.labels.numel() * whole.hidden_size * whole.num_blocks
    saved = _kept_bytes(cuts_tokens=False) - _kept_bytes(cuts_tokens=True)
    assert saved >= (1 - 1 / DEGREE) * 16 * per_value
