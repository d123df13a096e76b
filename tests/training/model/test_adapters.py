"""LoRA on any cut is what PEFT computes in the whole model, and starts from the same weights as the model without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import JobSpec, LoraSpec, ModelSpec, ScriptSpec
from oobleck.training.assembly import structure_of_job
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import share_of
from tests.training.zoo import (
    KEY,
    NUM_BLOCKS,
    SEQUENCE_LENGTH,
    SPECS,
    VOCAB_SIZE,
    gradients_of,
    loss_of,
    random_batch,
    run_pipeline,
    seed_each_layer,
    stages_of,
    state_of,
    structure_of,
    whole_stage,
)

PROMPTS = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
CUTS = ([], [1], [2, 4], [1, 2, 3, 4, 5])


def adapted(name: str, lora: LoraSpec, **changes: Any) -> ModelStructure:
    spec = replace(SPECS[name], lora=lora, **changes)
    return ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


@contextmanager
def as_peft_comes() -> Iterator[None]:
    """Within the block, PEFT may warn of what transformers will drop, and of how GPT-2's weights lie."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def peft_model(structure: ModelStructure, state: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The whole model with PEFT's adapters, and the parameters of `state`."""
    assert structure.adapters is not None
    model = structure.make(torch.float64)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == state.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])
    assert isinstance(model, PreTrainedModel)
    return model


def trained_a_little(structure: ModelStructure) -> dict[str, torch.Tensor]:
    """A state in which adapters make a difference."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: value if name in structure.frozen else value + torch.randn(value.shape, generator=generator).double() / 20
        for name, value in state_of(whole_stage(structure, dtype=torch.float64)).items()
    }


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("gpt2-dropout", LoraSpec(r=4, lora_dropout=0.3)),
        ("llama", LoraSpec(r=4, target_modules=("all-linear",), use_rslora=True)),
        ("llama", LoraSpec(r=2, target_modules=("embed_tokens", "q_proj", "lm_head"), modules_to_save=("norm",))),
        ("llama-tied", LoraSpec(r=2, target_modules=("up_proj",))),
        ("gpt2", LoraSpec(r=2, bias="all")),
        ("bert", LoraSpec(r=4, bias="lora_only")),
    ],
)
def test_every_cut_computes_what_peft_does(name: str, lora: LoraSpec):
    structure = adapted(name, lora)
    state = trained_a_little(structure)
    batch = random_batch(1, is_causal=structure.task == "causal_lm")
    whole = peft_model(structure, state)
    seed_each_layer(whole, structure, KEY)
    loss = loss_of(whole, structure, batch)
    loss.backward()
    expected = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    assert expected.keys() == set(structure.shapes) - structure.frozen
    for cuts in CUTS:
        stages = stages_of(structure, cuts, state, dtype=torch.float64)
        # transformers' own loss of a causal model is one of float32.
        torch.testing.assert_close(run_pipeline(stages, batch), loss.detach().double(), rtol=1e-6, atol=0)
        torch.testing.assert_close(gradients_of(stages), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_adapters_leave_a_model_as_it_is_until_they_are_trained(name: str):
    structure, bare = adapted(name, LoraSpec(r=4)), structure_of(name)
    batch = random_batch(1, is_causal=structure.task == "causal_lm")
    one, other = whole_stage(structure, seed=3), whole_stage(bare, seed=3)
    assert torch.equal(run_pipeline([one], batch), run_pipeline([other], batch))
    matrices = [value for name, value in state_of(one).items() if ".lora_A." in name]
    assert len(matrices) >= NUM_BLOCKS
    assert all(float(one.abs().max()) > 0 for one in matrices)
    assert not torch.equal(matrices[0], matrices[1])


def test_adapters_are_the_same_whatever_the_cut():
    structure = adapted("llama", LoraSpec(r=4, target_modules=("all-linear",)))
    expected = state_of(whole_stage(structure, seed=5))
    for layer in range(structure.num_layers):
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        stage.adopt(layer, layer + 1, {})
        stage.initialize([layer], seed=5)
        for name, value in state_of(stage).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_a_saved_model_is_adapted_without_its_names_having_changed(tmp_path: Path, task: Any):
    bare = structure_of("gpt2")
    model = AutoModelForCausalLM.from_config(bare.config)
    model.save_pretrained(tmp_path)
    config = {"num_labels": 3, "pad_token_id": 0} if task == "sequence_classification" else {}
    spec = ModelSpec(path=str(tmp_path), task=task, config=config, lora=LoraSpec(r=4))
    structure = ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    found = state_of(whole_stage(structure))
    saved = dict(model.named_parameters())
    for name, value in found.items():
        if ".lora_" not in name and "score" not in name:
            assert torch.equal(value, saved[name.replace(".base_layer", "")]), name
    trained = {name for name in structure.shapes if name not in structure.frozen}
    heads = {name for name in trained if ".lora_" not in name}
    assert heads == ({"score.modules_to_save.default.weight"} if config else set()), "a new head is trained"


def script_structure(build: Callable[[PreTrainedModel], object]) -> ModelStructure:
    config = structure_of("llama").config

    def make() -> object:
        with as_peft_comes():
            return build(AutoModelForCausalLM.from_config(config, dtype=torch.get_default_dtype()))

    return ModelStructure.from_factory(make, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def test_a_script_may_wrap_its_model_itself():
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    structure = script_structure(lambda model: peft.get_peft_model(model, config))
    expected = adapted("llama", LoraSpec(r=4))
    assert structure.shapes == expected.shapes
    assert structure.frozen == expected.frozen
    batch = random_batch(2)
    assert torch.equal(run_pipeline([whole_stage(structure)], batch), run_pipeline([whole_stage(expected)], batch))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: peft.get_peft_model(m, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])), "IA3"),
        (lambda m: peft.get_peft_model(m, peft.LoraConfig(use_dora=True)), "use_dora is not supported"),
        (lambda m: peft.get_peft_model(m, peft.LoraConfig(init_lora_weights=False)), "init_lora_weights False"),
        (lambda m: peft.get_peft_model(m, peft.LoraConfig(), adapter_name="mine"), "called 'mine'"),
        (lambda m: peft.get_peft_model(m, PROMPTS), "PROMPT_TUNING"),
    ],
)
def test_adapters_that_it_cannot_train_are_refused_by_name(build: Callable[[PreTrainedModel], object], message: str):
    with pytest.raises(ConfigError, match=message):
        script_structure(build)


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("llama", LoraSpec(r=4, target_modules=("qproj",)), r"model\.lora: PEFT refuses it: .*qproj"),
        ("phi3", LoraSpec(r=4), r"model\.lora: PEFT refuses it: .*target_modules"),
        ("gpt2", LoraSpec(r=4, modules_to_save=("wte",)), r"transformer\.wte\.weight is tied"),
        ("llama-tied", LoraSpec(r=4, target_modules=("embed_tokens",)), r"embed_tokens\.weight is tied"),
    ],
)
def test_what_peft_refuses_is_said_in_its_words(name: str, lora: LoraSpec, message: str):
    with pytest.raises(ConfigError, match=message):
        adapted(name, lora)


def test_devices_do_not_share_adapters():
    with pytest.raises(ConfigError, match="its plan does not cover adapters"):
        share_of(adapted("llama", LoraSpec(r=4)), rank=0, degree=2)


def test_a_script_that_makes_its_model_puts_its_adapters_in_itself():
    source = "from oobleck import Job\ndef job():\n    return Job(model=lambda: None)\n"
    script = ScriptSpec(name="train.py", source=source, provides=("model",))
    job = JobSpec(model=ModelSpec(type="script", lora=LoraSpec(r=4)), script=script)
    with pytest.raises(ConfigError, match=r"model\.lora: the script makes the model itself"):
        structure_of_job(job)
