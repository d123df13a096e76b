from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec
from oobleck.training.model.initialization import materialize_buffers
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import SPECS, state_of, structure_of, transformers_model, whole_stage


@pytest.mark.parametrize("name", SPECS)
def test_initial_values_do_not_depend_on_the_cut(name: str):
    structure = structure_of(name)
    expected = state_of(whole_stage(structure, seed=11))
    last = structure.num_layers
    for first, stop in [(0, 2), (1, 2), (last - 1, last), (2, last), (0, last)]:
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        stage.adopt(first, stop, {})
        for layer in reversed(range(first, stop)):
            stage.initialize([layer], seed=11)
        for parameter, value in state_of(stage).items():
            assert torch.equal(value, expected[parameter]), (parameter, first, stop)


def test_initial_values_depend_on_the_seed_and_the_layer():
    structure = structure_of("gpt2")
    one, two = state_of(whole_stage(structure, seed=1)), state_of(whole_stage(structure, seed=2))
    for name, value in one.items():
        if value.ndim > 1:
            assert not torch.equal(value, two[name]), name
    assert not torch.equal(one["transformer.h.0.attn.c_attn.weight"], one["transformer.h.1.attn.c_attn.weight"])


def test_initializing_leaves_the_generator_and_other_layers_alone():
    structure = structure_of("gpt2")
    stage = whole_stage(structure, seed=1)
    before, state = state_of(stage), torch.get_rng_state()
    stage.initialize([2], seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    changed = {name for name, value in state_of(stage).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in structure.layer_parameters(2) if before[name].ndim > 1}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt", "mixtral"])
def test_values_follow_the_models_own_distributions(name: str):
    """Mean and deviation of every parameter are those of transformers' own initialization, within their noise."""
    wide = {"n_embd": 256} if name == "gpt2" else {"hidden_size": 256, "intermediate_size": 256}
    wide = {"ffn_dim": 256, "hidden_size": 256, "word_embed_proj_dim": 256} if name == "opt" else wide
    spec = ModelSpec(type=SPECS[name].type, config={**SPECS[name].config, **wide})
    structure = ModelStructure.from_spec(spec, vocab_size=96, sequence_length=24)
    ours = state_of(whole_stage(structure))
    torch.manual_seed(0)
    model = type(transformers_model(structure, ours))(structure.config)
    for parameter, theirs in model.named_parameters():
        value, count = ours[parameter], theirs.numel()
        if count < 2 or float(theirs.detach().std()) == 0:
            assert torch.equal(value, theirs.detach()), parameter
            continue
        noise = 6 * float(theirs.detach().std()) / math.sqrt(count)
        assert float(value.mean()) == pytest.approx(float(theirs.detach().mean()), abs=2 * noise), parameter
        assert float(value.std()) == pytest.approx(float(theirs.detach().std()), abs=2 * noise), parameter


def test_gpt2_scales_what_it_adds_to_the_residual_stream():
    config = {"n_embd": 128, "n_layer": 8, "n_head": 4}
    structure = ModelStructure.from_spec(ModelSpec(config=config), vocab_size=96, sequence_length=24)
    state = state_of(whole_stage(structure))
    assert float(state["transformer.h.0.mlp.c_fc.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(state["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / math.sqrt(16), rel=0.02)


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "opt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_are_what_the_model_makes_on_a_real_device(name: str, dtype: torch.dtype):
    structure = structure_of(name)
    stage = whole_stage(structure, dtype=dtype)
    expected = dict(transformers_model(structure, state_of(stage)).named_buffers())
    buffers = dict(stage.model.named_buffers())
    assert buffers.keys() == expected.keys()
    for buffer, value in expected.items():
        assert buffers[buffer].dtype == value.dtype
        assert torch.equal(buffers[buffer], value), buffer


class _Forgetful(PreTrainedModel):
    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.inner = nn.Module()
        self.inner.register_buffer("table", torch.arange(4.0), persistent=False)
        self.post_init()


def test_a_buffer_that_nothing_sets_is_an_error_and_not_garbage():
    with torch.device("meta"):
        model = _Forgetful(PreTrainedConfig())
    with pytest.raises(ConfigError, match=r"inner\.table"):
        materialize_buffers(model, device=torch.device("cpu"))
