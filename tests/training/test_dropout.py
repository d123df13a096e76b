"""Dropout is turned off wherever a model has it, and what it was is told."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from oobleck.job import ModelSpec
from oobleck.training.data import Batch
from oobleck.training.dropout import turn_off_dropout
from oobleck.training.model import MicrobatchKey, ModelStructure, StageModel

TOKENS = torch.arange(8)[None]


def draws(model: PreTrainedModel) -> bool:
    return not torch.equal(model(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


def test_modules_and_functions_that_read_the_configuration_drop_nothing_any_more() -> None:
    tokens = {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
    modules = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, resid_pdrop=0.5, **tokens)).train()
    functions = FalconForCausalLM(
        FalconConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.5, **tokens)
    ).train()
    for model, name in ((modules, "resid_pdrop"), (functions, "hidden_dropout")):
        assert draws(model)
        assert turn_off_dropout(model)[name] == 0.5
        assert not draws(model)
        assert turn_off_dropout(model) == {}


def test_a_stage_without_dropout_seeds_its_generator_as_one_with_it_does() -> None:
    """What else draws from it, as a sampler may, draws what it would in a run with dropout."""
    spec = ModelSpec(type="gpt2", config={"n_layer": 2, "n_embd": 8, "n_head": 2})
    dropping = ModelStructure.from_spec(spec, vocab_size=300, sequence_length=8)
    seeds, losses = [], []
    for structure in (dropping, replace(dropping, drops=False)):
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        stage.adopt(0, structure.num_layers, {})
        stage.initialize(range(structure.num_layers), seed=0)
        for microbatch in (0, 1):
            torch.manual_seed(0)
            key = MicrobatchKey(seed=0, step=1, microbatch=microbatch)
            loss = stage.forward(Batch(input_ids=TOKENS, labels=TOKENS), None, num_items=7, key=key)
            losses.append(float(loss.detach()))
            seeds.append(torch.initial_seed())
    assert losses[0] != losses[1]
    assert losses[2] == losses[3]
    assert seeds[:2] == seeds[2:]
    assert 0 not in seeds
