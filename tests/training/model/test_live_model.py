"""A model that a script has made is taken apart, and every stage starts from its very weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.training.data import Batch
from oobleck.training.model import LiveModel, MicrobatchKey, ModelStructure, StageModel

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTH = 8
KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
TOKENS: dict[str, Any] = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(dtype: torch.dtype = torch.float64) -> GPT2LMHeadModel:
    config = GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=LENGTH, **TOKENS)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config).to(dtype)


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=LENGTH, rope_parameters={"rope_theta": 77.0, "rope_type": "default"}, **TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64)


def adapted() -> Any:
    built = peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, fan_in_fan_out=True))
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)  # as if it had been trained before
    return built.to(torch.float64)


def batch() -> Batch:
    ids = torch.arange(3, 3 + 2 * LENGTH).reshape(2, LENGTH)
    return Batch(input_ids=ids, labels=ids)


def loss_of(model: PreTrainedModel) -> float:
    given = batch()
    with torch.no_grad():
        logits = model(input_ids=given.input_ids, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given.labels[:, 1:].flatten()))


def staged_loss(structure: ModelStructure, dtype: torch.dtype = torch.float64) -> float:
    """The loss of the model cut into two stages, each of which reads its own weights."""
    hidden = None
    for first, stop in ((0, 2), (2, structure.num_layers)):
        stage = StageModel(structure, dtype=dtype, device="cpu")
        stage.adopt(first, stop, {})
        stage.initialize(range(first, stop), seed=0)
        hidden = stage.forward(batch(), hidden, num_items=2 * (LENGTH - 1), key=KEY).detach()
    assert hidden is not None
    return float(hidden)


@pytest.mark.parametrize("make", [gpt2, llama, adapted])
def test_stages_start_from_the_very_weights(tmp_path: Path, make: Any):
    torch.manual_seed(1)
    model = make()
    expected = loss_of(model)
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, tmp_path), sequence_length=LENGTH)
    assert staged_loss(structure) == pytest.approx(expected, abs=1e-12)
    assert all(parameter.numel() == 0 for parameter in model.parameters()), "the model's memory is given back"


def test_all_stages_of_a_model_in_half_precision_compute_in_that_of_the_job(tmp_path: Path):
    """A stage without the embedding makes its rotary tables as the first one does."""
    torch.manual_seed(1)
    model = llama().to(torch.bfloat16)
    expected = loss_of(copy.deepcopy(model).to(torch.float32))
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, tmp_path), sequence_length=LENGTH)
    assert staged_loss(structure, torch.float32) == pytest.approx(expected, abs=1e-6)


def test_what_is_frozen_stays_frozen_and_what_is_tied_stays_tied(tmp_path: Path):
    model = gpt2()
    model.transformer.wpe.weight.requires_grad_(False)
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, tmp_path), sequence_length=LENGTH)
    assert structure.frozen == {"transformer.wpe.weight"}
    assert structure.layers_with("transformer.wte.weight") == (0, 4)


def test_a_skeleton_leaves_the_model_as_it_is():
    model = gpt2()
    expected = loss_of(model)
    live = LiveModel.skeleton_of(model)
    assert live.weights is None
    assert all(parameter.is_meta for parameter in live.make().parameters())
    assert loss_of(model) == expected


def test_weights_are_written_once_and_known_by_their_bytes(tmp_path: Path):
    torch.manual_seed(1)
    first = LiveModel.taken_apart(gpt2(torch.bfloat16), tmp_path)
    torch.manual_seed(1)
    again = LiveModel.taken_apart(gpt2(torch.bfloat16), tmp_path)
    torch.manual_seed(1)
    changed = gpt2(torch.bfloat16)
    with torch.no_grad():
        changed.transformer.h[1].mlp.c_fc.bias[3] += 1.0
    other = LiveModel.taken_apart(changed, tmp_path)
    assert first.weights is not None
    assert again.weights is not None
    assert other.weights is not None
    assert first.weights.digest() == again.weights.digest() != other.weights.digest()
    assert len(list(tmp_path.iterdir())) == 2


def test_activation_checkpointing_of_the_scripts_own_is_left_to_the_job(tmp_path: Path):
    model = gpt2()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = True
    made = LiveModel.skeleton_of(model).make()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in made.modules())


def test_other_models_are_refused():
    with pytest.raises(ConfigError, match="Linear is not a model of transformers"):
        LiveModel.skeleton_of(torch.nn.Linear(2, 2))


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def meant(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_a_loss_of_the_scripts_own_takes_the_place_of_the_models(tmp_path: Path):
    model = gpt2()
    expected = loss_of(model)
    live = LiveModel.taken_apart(model, tmp_path)
    assert staged_loss(ModelStructure.from_live(live, compute_loss=summed, sequence_length=LENGTH)) == pytest.approx(
        expected, abs=1e-12
    )
    with pytest.raises(ConfigError, match="a sum divided by num_items_in_batch"):
        staged_loss(ModelStructure.from_live(live, compute_loss=meant, sequence_length=LENGTH))
