"""What a script has done to its model counts, whatever the configuration declares; what cannot be had is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from oobleck.errors import ConfigError
from oobleck.training.data import Batch
from oobleck.training.model import LiveModel, ModelStructure
from oobleck.training.model.brought import GradientHook
from oobleck.training.model.tensor_parallel import share_of
from tests.training.zoo import gradients_of, run_pipeline, stages_of, whole_stage

LENGTH, VOCAB_SIZE = 8, 40
NEW = slice(VOCAB_SIZE - 3, VOCAB_SIZE)
"""The tokens whose rows of the embedding are to be trained."""


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.float64).train()


def batch() -> Batch:
    ids = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    return Batch(input_ids=ids, labels=ids)


def structure_of(model: Any) -> ModelStructure:
    return ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=LENGTH)


def assert_trained_as_by_itself(model: Any, directory: Path, cuts: tuple[int, ...] = (2, 4)) -> ModelStructure:
    """Loss and gradients of a model that is cut are those of the whole, for every parameter that it has."""
    given = batch()
    # The model's own loss would throw away half of the digits.
    logits = model(input_ids=given.input_ids, use_cache=False).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), given.labels[:, 1:].flatten())
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, directory), sequence_length=LENGTH)
    state = {name: each.detach() for name, each in whole_stage(structure, dtype=torch.float64).parameters.items()}
    stages = stages_of(structure, cuts, state, dtype=torch.float64)
    torch.testing.assert_close(run_pipeline(stages, given), loss.detach(), rtol=1e-12, atol=0)
    gradients = gradients_of(stages)
    assert gradients.keys() == expected.keys()
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
    return structure


# --- identities ------------------------------------------------------------------------------------------------


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untie(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def untie_and_say_so(model: Any) -> None:
    model.config.tie_word_embeddings = False
    untie(model)


@pytest.mark.parametrize(
    ("declared", "change", "is_tied"),
    [(False, tie, True), (True, untie, False), (True, untie_and_say_so, False), (True, lambda _: None, True)],
)
def test_a_head_is_tied_if_it_is_the_same_tensor_whatever_the_configuration_says(
    declared: bool, change: Callable[[Any], None], is_tied: bool, tmp_path: Path
):
    model = llama(tied=declared)
    change(model)
    structure = assert_trained_as_by_itself(model, tmp_path)
    assert structure.layers_with("model.embed_tokens.weight") == ((0, 5) if is_tied else (0,))
    assert ("lm_head.weight" in structure.shapes) is not is_tied


@pytest.mark.parametrize("cuts", [(), (4,), (2, 4)])
def test_two_blocks_that_share_a_module_train_it_once(cuts: tuple[int, ...], tmp_path: Path):
    model = llama()
    model.model.layers[3].mlp = model.model.layers[0].mlp
    structure = assert_trained_as_by_itself(model, tmp_path, cuts)
    assert structure.layers_with("model.layers.0.mlp.up_proj.weight") == (1, 4)


def test_heads_that_the_script_has_replaced_are_trained(tmp_path: Path):
    model = llama()
    model.lm_head = nn.Sequential(nn.Linear(16, 12), nn.GELU(), nn.Linear(12, VOCAB_SIZE)).to(torch.float64)
    structure = assert_trained_as_by_itself(model, tmp_path)
    assert "lm_head.2.bias" in structure.layer_parameters(5)


def test_parametrizations_are_trained(tmp_path: Path):
    model = llama()
    nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    structure = assert_trained_as_by_itself(model, tmp_path)
    assert "model.layers.1.mlp.up_proj.parametrizations.weight.original0" in structure.layer_parameters(2)


def test_hooks_on_modules_use_what_the_module_has(tmp_path: Path):
    model = llama()
    mlp = model.model.layers[1].mlp
    mlp.gain = nn.Parameter(torch.full((16,), 2.0, dtype=torch.float64))
    mlp.register_forward_hook(lambda module, _inputs, output: output * module.gain)
    structure = assert_trained_as_by_itself(model, tmp_path)
    assert "model.layers.1.mlp.gain" in structure.layer_parameters(2)


def test_attributes_of_parameters_come_along(tmp_path: Path):
    model = llama()
    model.model.norm.weight.not_decayed = True
    structure = ModelStructure.from_live(LiveModel.taken_apart(model, tmp_path), sequence_length=LENGTH)
    assert whole_stage(structure).parameters["model.norm.weight"].not_decayed


# --- hooks on parameters ---------------------------------------------------------------------------------------


def new_rows_alone(gradient: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(VOCAB_SIZE, 1, dtype=gradient.dtype)
    mask[NEW] = 1
    return gradient * mask


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_go_through_the_hooks_of_their_parameters(tied: bool, tmp_path: Path):
    model = llama(tied=tied)
    model.model.embed_tokens.weight.register_hook(new_rows_alone)
    model.model.layers[2].mlp.up_proj.weight.register_hook(lambda gradient: 3 * gradient)
    structure = assert_trained_as_by_itself(model, tmp_path)
    assert structure.hooks.keys() == {"model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"}


def test_hooks_of_what_is_frozen_are_left_out():
    model = llama()
    model.model.norm.weight.register_hook(torch.sign)
    model.model.norm.weight.requires_grad_(False)
    assert structure_of(model).hooks == {}


def test_a_hook_that_was_not_tried_before_is_tried_with_the_first_gradient():
    hook = GradientHook("lm_head.weight", torch.sign)
    with pytest.raises(ConfigError, match=r"hook on lm_head\.weight is not linear"):
        hook(torch.ones(VOCAB_SIZE, 16))
    assert torch.equal(GradientHook("lm_head.weight", new_rows_alone)(torch.ones(VOCAB_SIZE, 1))[NEW], torch.ones(3, 1))


class Thawing:
    """Keeps a parameter as it is for its first gradients."""

    def __init__(self, left: int) -> None:
        self.left, self.norms = left, [0.0]

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.left > 0:
            self.left -= 1
            return gradient * 0
        return gradient

    def noting(self, gradient: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        self.norms.append(float(gradient.norm()))
        return gradient * 2


class Halving:
    """Halves gradients from the next-to-last of many calls on."""

    calls = 0

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return gradient / 2 if self.calls > 10_000 else gradient


@pytest.mark.parametrize(
    ("hook", "what"),
    [(Thawing(calls), "Thawing|the hook on lm_head.weight.left|the hook on lm_head.weight,") for calls in range(3, 9)]
    + [(Thawing(500), "the hook on lm_head.weight.left"), (Halving(), "Halving.calls")],
)
def test_a_hook_that_goes_by_its_calls_is_refused_by_name(hook: Any, what: str):
    model = llama()
    model.lm_head.weight.register_hook(hook)
    with pytest.raises(
        ConfigError, match=rf"the hook on lm_head\.weight returns something else later, as it goes by ({what})"
    ):
        structure_of(model)


def test_a_hook_that_only_notes_its_calls_is_taken():
    model = llama()
    model.lm_head.weight.register_hook(Thawing(5).noting)
    assert structure_of(model).hooks.keys() == {"lm_head.weight"}


def test_a_model_that_is_made_without_values_may_have_no_hooks():
    def make() -> LlamaForCausalLM:
        model = llama()
        model.lm_head.weight.register_hook(new_rows_alone)
        return model

    with pytest.raises(ConfigError, match=r"lm_head\.weight has a hook.*job\(\)"):
        ModelStructure.from_factory(make, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)


def test_devices_cannot_share_what_has_a_hook():
    model = llama()
    model.lm_head.weight.register_hook(new_rows_alone)
    with pytest.raises(ConfigError, match=r"tensor_parallel: .*hook on lm_head\.weight"):
        share_of(structure_of(model), rank=0, degree=2)


# --- what is refused -------------------------------------------------------------------------------------------


def hook_that_clips(model: Any) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def hook_that_adds(model: Any) -> None:
    model.lm_head.weight.register_hook(lambda gradient: gradient + 0.1)


def hook_that_notes(model: Any) -> None:
    seen: list[torch.Tensor] = []
    model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient))


def hook_after_accumulation(model: Any) -> None:
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def head_over_the_embeddings_memory(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())


def batch_norm(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm = nn.BatchNorm1d(LENGTH)


def hook_that_reaches_a_parameter(model: Any) -> None:
    gain = model.model.norm.weight
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * gain)


def hook_that_reaches_the_model(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, output: output * len(model.config.dtype))


def forward_that_reaches_a_module(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda hidden: before(hidden) + mlp.up_proj.weight.sum()


def parameter_kept_aside(model: Any) -> None:
    model.model.layers[0].kept = [model.lm_head.weight]


def old_weight_norm(model: Any) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.lm_head)


class Quantized(nn.Parameter):
    pass


def quantized(model: Any) -> None:
    model.lm_head.weight = Quantized(model.lm_head.weight.detach())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen += hidden.shape[0]
        return hidden


def buffer_that_changes(model: Any) -> None:
    model.model.layers[1].mlp = Counting()


def spectral_norm(model: Any) -> None:
    nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.up_proj)


def block_twice(model: Any) -> None:
    model.model.layers[3] = model.model.layers[0]


def block_taken_away(model: Any) -> None:
    model.model.layers = model.model.layers[:3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hook_that_clips, r"hook on lm_head\.weight is not linear.*leave it out"),
        (hook_that_adds, r"hook on lm_head\.weight is not linear"),
        (hook_that_notes, r"hook on lm_head\.weight returns no gradient"),
        (hook_after_accumulation, r"lm_head\.weight has a hook that runs once its gradient is accumulated"),
        (head_over_the_embeddings_memory, r"(embed_tokens|lm_head)\.weight and .* over the same memory"),
        (batch_norm, r"layers\.1\.post_attention_layernorm is a BatchNorm1d.*LayerNorm"),
        (hook_that_reaches_a_parameter, r"forward hook of model\.layers\.0\.mlp reaches model\.norm\.weight by itself"),
        (hook_that_reaches_the_model, r"forward hook of model\.layers\.0\.mlp reaches LlamaForCausalLM by itself"),
        (forward_that_reaches_a_module, r"function forward of model\.layers\.0\.mlp reaches model\.layers\.0\.mlp"),
        (parameter_kept_aside, r"model\.layers\.0\.kept keeps the parameter lm_head\.weight"),
        (old_weight_norm, r"cannot be copied.*lm_head\.weight is computed from parameters"),
        (quantized, r"lm_head\.weight is a Quantized"),
        (buffer_that_changes, r"in LlamaForCausalLM, a forward pass changes the buffer model\.layers\.1\.mlp\.seen"),
        (spectral_norm, r"changes the buffer model\.layers\.1\.mlp\.up_proj\.parametrizations\.weight\.0\._[uv]"),
        (block_twice, r"block 3 is the same module as block 0"),
        (block_taken_away, r"4 transformer blocks.*model\.layers \(3 "),
    ],
)
def test_what_stages_cannot_have_is_refused_by_name(change: Callable[[Any], None], words: str):
    model = llama()
    change(model)
    with pytest.raises(ConfigError, match=words):
        structure_of(model)


def test_masked_models_share_the_bias_of_their_head_with_its_decoder(tmp_path: Path):
    config = BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    tied = structure_of(BertForMaskedLM(config)).anatomy.tied
    assert tied == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


def test_a_float32_model_with_layers_of_another_type_is_refused_and_one_of_a_single_type_is_not() -> None:
    """A script's layer may cast its input and output; workers would give its parameters the model's type."""
    mixed = llama().float()
    mixed.model.layers[1].mlp.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight is of torch\.bfloat16, and other"):
        structure_of(mixed)
    for kind in (torch.float32, torch.bfloat16):
        structure_of(llama().to(kind))
    half = llama().to(torch.bfloat16)  # some classes keep their norms in float32
    half.model.norm.float()
    structure_of(half)
