"""Models that start from a directory of weights, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec
from oobleck.training.model.configuration import build_config
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import SEQUENCE_LENGTH, SPECS, VOCAB_SIZE, state_of, whole_stage


def _save(name: str, directory: Path, *, shard: str = "1MB") -> dict[str, torch.Tensor]:
    """Save a model with random weights; returns them."""
    config = build_config(SPECS[name], vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    torch.manual_seed(len(name))
    model = auto.from_config(config)
    model.save_pretrained(directory, max_shard_size=shard)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _structure(directory: Path, **config: int) -> ModelStructure:
    spec = ModelSpec(path=str(directory), config=config)
    return ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bert", "phi3", "mixtral"])
def test_training_starts_from_the_weights_of_the_directory(name: str, tmp_path: Path):
    saved = _save(name, tmp_path)
    structure = _structure(tmp_path)
    assert structure.config.model_type == SPECS[name].type
    loaded = state_of(whole_stage(structure))
    assert loaded.keys() == saved.keys()
    assert [n for n in saved if not torch.equal(loaded[n], saved[n])] == []


def test_a_stage_opens_only_the_files_of_its_own_layers(tmp_path: Path):
    saved = _save("llama", tmp_path, shard="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    structure = _structure(tmp_path)
    layer = 2
    own = {index[name] for name in structure.layer_parameters(layer)}
    for file in set(index.values()) - own:
        (tmp_path / file).unlink()
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(layer, layer + 1, {})
    stage.initialize([layer], seed=0)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in stage.parameters.items())


def test_a_trunk_without_its_head_says_what_is_missing(tmp_path: Path):
    config = build_config(SPECS["llama"], vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    trunk = AutoModel.from_config(config)
    trunk.save_pretrained(tmp_path)
    structure = _structure(tmp_path)
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, 4, {})
    stage.initialize(range(4), seed=0)
    assert torch.equal(stage.parameters["model.embed_tokens.weight"], trunk.embed_tokens.weight)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        whole_stage(structure)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_head_that_classifies_starts_from_the_seed_where_the_directory_has_none(name: str, tmp_path: Path):
    saved = _save(name, tmp_path)
    spec = ModelSpec(path=str(tmp_path), task="token_classification", config={"num_labels": 5})
    structure = ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    one, same, other = (state_of(whole_stage(structure, seed=seed)) for seed in (1, 1, 2))
    fresh = {name for name in one if name not in saved}
    assert {name.rpartition(".")[0] for name in fresh} == {"classifier" if name != "llama" else "score"}
    assert all(torch.equal(one[each], saved[each]) for each in one if each not in fresh)
    assert all(torch.equal(one[each], same[each]) for each in fresh)
    assert not all(torch.equal(one[each], other[each]) for each in fresh)


@pytest.mark.parametrize(
    ("auto", "task"),
    [
        (AutoModelForSequenceClassification, "sequence_classification"),
        (AutoModelForTokenClassification, "token_classification"),
    ],
)
def test_a_directory_of_a_model_that_classifies_goes_on_classifying(auto: Any, task: str, tmp_path: Path):
    config = build_config(SPECS["llama"], vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)
    config.pad_token_id, config.num_labels = 0, 3
    model = auto.from_config(config)
    model.save_pretrained(tmp_path)
    structure = _structure(tmp_path)
    assert structure.task == task
    loaded = state_of(whole_stage(structure))
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())


def test_other_weights_have_another_digest(tmp_path: Path):
    def digest(directory: Path) -> str:
        weights = _structure(directory).weights
        assert weights is not None
        return weights.digest()

    _save("llama", tmp_path / "one", shard="20KB")
    _save("llama", tmp_path / "same", shard="20KB")
    assert digest(tmp_path / "one") == digest(tmp_path / "same")
    path = next((tmp_path / "same").glob("*-00002-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert digest(tmp_path / "one") != digest(tmp_path / "same")


def test_mistakes_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        _structure(tmp_path)
    _save("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.config\.n_layers: .*'n_layer'"):
        _structure(tmp_path, n_layers=3)
    with pytest.raises(ConfigError, match=r"\(96, 32\).*\(128, 32\)"):
        whole_stage(_structure(tmp_path, vocab_size=128))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        whole_stage(_structure(tmp_path))
