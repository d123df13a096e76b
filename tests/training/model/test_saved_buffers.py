"""Buffers that are saved with a model are state of the layer that has them, as parameters are."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oobleck.training.model import LiveModel, ModelStructure, StageModel

SHAPE = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 8,
}  # fmt: skip


def test_buffers_that_are_saved_belong_to_their_layer_and_start_as_the_script_has_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.layers[1].mlp.register_buffer("bias", torch.arange(3.0))
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, tmp_path), sequence_length=8)
    name = "model.layers.1.mlp.bias"
    assert structure.layers_with(name) == (2,)
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(2, 3, {})
    stage.initialize([2], seed=0)
    assert stage.parameters[name].tolist() == [0.0, 1.0, 2.0]
    assert name not in stage.trained_parameters
