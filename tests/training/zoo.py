"""Tiny models of many families, and what every test of a cut needs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from oobleck.job import ModelSpec, Scalar
from oobleck.training.data.batches import Batch
from oobleck.training.model.configuration import build_config
from oobleck.training.model.losses import label_loss
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.randomness import MicrobatchKey, derive_seed

VOCAB_SIZE = 96
SEQUENCE_LENGTH = 24
NUM_BLOCKS = 4

_COMMON: dict[str, Scalar] = {
    "hidden_size": 32,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_GROUPED: dict[str, Scalar] = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_GPT2: dict[str, Scalar] = {"n_embd": 32, "n_layer": NUM_BLOCKS, "n_head": 4, "n_positions": 64}
_NO_DROPOUT: dict[str, Scalar] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

SPECS: Mapping[str, ModelSpec] = {
    "gpt2": ModelSpec(type="gpt2", config={**_GPT2, **_NO_DROPOUT}),
    "gpt2-dropout": ModelSpec(type="gpt2", config=_GPT2),
    "llama": ModelSpec(type="llama", config=_GROUPED),
    "llama-tied": ModelSpec(type="llama", config={**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": ModelSpec(
        type="qwen2", config={**_COMMON, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8}
    ),
    "qwen3": ModelSpec(type="qwen3", config=_GROUPED),
    "mistral": ModelSpec(type="mistral", config={**_GROUPED, "sliding_window": 8}),
    "gemma2": ModelSpec(type="gemma2", config={**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ModelSpec(type="gemma3_text", config={**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "phi3": ModelSpec(type="phi3", config={**_COMMON, "num_key_value_heads": 2}),
    "olmo2": ModelSpec(type="olmo2", config={**_COMMON, "num_key_value_heads": 2}),
    # Its norms have no parameters.
    "olmo": ModelSpec(type="olmo", config={**_COMMON, "num_key_value_heads": 2}),
    "gpt_neox": ModelSpec(type="gpt_neox", config=_COMMON),
    "opt": ModelSpec(
        type="opt",
        config={
            "hidden_size": 32,
            "num_hidden_layers": NUM_BLOCKS,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": ModelSpec(type="bloom", config={"hidden_size": 32, "n_layer": NUM_BLOCKS, "n_head": 4}),
    "mixtral": ModelSpec(type="mixtral", config={**_GROUPED, "num_local_experts": 4}),
    "bert": ModelSpec(type="bert", config=_COMMON),
}


def _with_the_other_ties(spec: ModelSpec) -> ModelSpec:
    """The same model with its head tied to its embedding if it is not, and the other way round."""
    config = build_config(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    return replace(spec, config={**spec.config, "tie_word_embeddings": not config.tie_word_embeddings})


_TIED = ("gpt2", "gemma2", "gemma3", "opt", "bloom", "bert")
"""Families whose heads are tied unless they are told otherwise."""

OTHER_TIES: Mapping[str, ModelSpec] = {
    f"{name}-{'untied' if name in _TIED else 'tied'}": _with_the_other_ties(spec)
    for name, spec in SPECS.items()
    if name not in ("gpt2-dropout", "llama-tied", "llama")
}

_HEADS = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
}

KEY = MicrobatchKey(seed=7, step=3, microbatch=2)


def structure_of(name: str) -> ModelStructure:
    spec = {**SPECS, **OTHER_TIES}[name]
    return ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def random_batch(seed: int, *, batch_size: int = 2, is_causal: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (batch_size, SEQUENCE_LENGTH), generator=generator)
    if is_causal:
        return Batch(input_ids=ids, labels=ids)
    is_masked = torch.rand(ids.shape, generator=generator) < 0.3
    return Batch(input_ids=ids.masked_fill(is_masked, 1), labels=ids.masked_fill(~is_masked, -100), is_causal=False)


def whole_stage(structure: ModelStructure, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> StageModel:
    """All layers in one stage, with initial values."""
    stage = StageModel(structure, dtype=dtype, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    stage.initialize(range(structure.num_layers), seed=seed)
    return stage


def transformers_model(structure: ModelStructure, state: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The model as transformers makes it, with the parameters of `state`, in their dtype."""
    dtype = next(iter(state.values())).dtype
    model = _HEADS[structure.task].from_config(copy.deepcopy(structure.config), dtype=dtype).train()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == state.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    return model


def loss_of(model: PreTrainedModel, structure: ModelStructure, batch: Batch) -> torch.Tensor:
    """The loss of the whole model, as a mean over all predicted tokens."""
    if structure.task != "causal_lm":
        logits = model(input_ids=batch.input_ids, use_cache=False, **batch.others).logits
        return label_loss(logits, batch.labels, batch.num_items)
    return model(
        input_ids=batch.input_ids,
        labels=batch.labels,
        use_cache=False,
        num_items_in_batch=batch.num_items,
        **batch.others,
    ).loss


def seed_each_layer(model: PreTrainedModel, structure: ModelStructure, key: MicrobatchKey) -> None:
    """Draw as a stage does: from the layer's own seed, from the moment that the model's code reaches the layer."""
    for layer in range(structure.num_layers):
        root = model.get_submodule(structure.layer_roots(layer)[0])
        seed = derive_seed(key.seed, "forward", key.step, key.microbatch, layer)
        root.register_forward_pre_hook(lambda *_, seed=seed: torch.manual_seed(seed) and None)


def state_of(stage: StageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in stage.parameters.items()}


def stages_of(
    structure: ModelStructure, cuts: Sequence[int], state: Mapping[str, torch.Tensor], *, dtype: torch.dtype
) -> list[StageModel]:
    """A pipeline of stages that begin at layer 0 and at each of `cuts`, with copies of the parameters of `state`."""
    edges = [0, *cuts, structure.num_layers]
    stages = []
    for first, stop in pairwise(edges):
        stage = StageModel(structure, dtype=dtype, device="cpu")
        stage.adopt(first, stop, {name: tensor.clone() for name, tensor in state.items()})
        stages.append(stage)
    return stages


def run_pipeline(
    stages: Sequence[StageModel], batch: Batch, *, key: MicrobatchKey = KEY, num_items: int | None = None
) -> torch.Tensor:
    """Forward and backward of one microbatch through all stages; gradients add up in `.grad`. Returns the loss."""
    items = batch.num_items if num_items is None else num_items
    received: list[torch.Tensor | None] = []
    outputs: list[torch.Tensor] = []
    hidden: torch.Tensor | None = None
    for stage in stages:
        received.append(hidden)
        outputs.append(stage.forward(batch, hidden, num_items=items, key=key))
        hidden = outputs[-1].detach().requires_grad_()
    gradient: torch.Tensor | None = None
    for output, leaf in zip(reversed(outputs), reversed(received), strict=True):
        if output.requires_grad:
            output.backward(gradient)
        gradient = leaf.grad if leaf is not None else None
    return outputs[-1].detach()


def gradients_of(stages: Sequence[StageModel]) -> dict[str, torch.Tensor]:
    """Gradients by canonical name, summed over the stages that share a parameter, the last stage's first."""
    found: dict[str, torch.Tensor] = {}
    for stage in reversed(stages):
        for name, parameter in stage.parameters.items():
            if parameter.grad is None:
                continue  # a model may have parameters that it does not use
            found[name] = found[name] + parameter.grad if name in found else parameter.grad.clone()
    return found
