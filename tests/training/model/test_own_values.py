"""Values that a script gives its model are what training starts from; others are drawn by the rules of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from oobleck.training.model import ModelStructure, StageModel

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LENGTH, VOCAB_SIZE, SIZE = 12, 300, 16


def layers() -> list[nn.Module]:
    block = nn.TransformerEncoderLayer(SIZE, 2, 32, batch_first=True)
    return [nn.Embedding(VOCAB_SIZE, SIZE), block, nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, VOCAB_SIZE))]


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(n_embd=SIZE, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=VOCAB_SIZE, bos_token_id=1,
                   eos_token_id=2)
    )  # fmt: skip


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=SIZE, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    vocab_size=VOCAB_SIZE, max_position_embeddings=LENGTH)
    )  # fmt: skip


def _adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


class Scaled(nn.Module):
    """Has values by itself, and by its rule; whether these are alike nobody but itself knows."""

    def __init__(self, *, is_reset: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((SIZE,), 3.0))
        if is_reset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class Narrow(nn.Linear):
    """Has its rule draw less than it would for a node, which gives it no argument."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)
        self.reset_parameters(0.01)

    def reset_parameters(self, std: float = 1.0) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)


def _structure(factory: Callable[[], object], **values: Any) -> ModelStructure:
    return ModelStructure.from_factory(factory, vocab_size=VOCAB_SIZE, sequence_length=LENGTH, **values)


def _values(structure: ModelStructure, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Those that training starts from."""
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    stage.initialize(range(structure.num_layers), seed=seed)
    return {name: each.detach().clone() for name, each in stage.parameters.items()}


def _saved(tmp_path: Path, made: nn.Module) -> Path:
    for each in made.parameters():
        nn.init.normal_(each, std=0.3)
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


@pytest.mark.parametrize("assign", [False, True])
def test_layers_start_from_the_weights_that_they_load(tmp_path: Path, assign: bool):
    file = _saved(tmp_path, nn.ModuleList(layers()))

    def loaded() -> list[nn.Module]:
        made = layers()
        nn.ModuleList(made).load_state_dict(torch.load(file), assign=assign)
        return made

    values = _values(_structure(loaded, cache_dir=tmp_path))
    roots = {"embedding": "0", "blocks.0": "1", "head": "2"}
    expected = {
        name: value for root, number in roots.items() for key, value in torch.load(file).items()
        if (name := root + key.removeprefix(number)) and key.startswith(f"{number}.")
    }  # fmt: skip
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_transformers_model_starts_from_the_weights_that_it_loads(
    make: Callable[[], PreTrainedModel], tmp_path: Path
):
    file = _saved(tmp_path, make())

    def loaded() -> nn.Module:
        made = make()
        made.load_state_dict(torch.load(file))
        return made

    values, expected = _values(_structure(loaded, cache_dir=tmp_path)), torch.load(file)
    assert all(torch.equal(value, expected[name]) for name, value in values.items())


def test_a_transformers_model_may_be_read_from_a_directory(tmp_path: Path):
    made = gpt2()
    _saved(tmp_path, made)
    made.save_pretrained(tmp_path)
    values = _values(_structure(lambda: GPT2LMHeadModel.from_pretrained(tmp_path), cache_dir=tmp_path))
    assert all(torch.equal(value, made.get_parameter(name)) for name, value in values.items())


def _head_of_zeros() -> list[nn.Module]:
    made: Any = layers()
    nn.init.zeros_(made[2][1].weight)
    return made  # type: ignore[no-any-return]


def _head_of_torchs() -> nn.Module:
    made = llama()
    made.lm_head = nn.Linear(SIZE, VOCAB_SIZE, bias=False)
    nn.init.constant_(made.lm_head.weight, 0.25)
    return made


def _row_of_sevens() -> list[nn.Module]:
    made: Any = layers()
    made[0].weight.data[5] = 7.0
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("factory", "name", "row", "value"),
    [
        (_head_of_zeros, "head.1.weight", 0, 0.0),
        (_head_of_torchs, "lm_head.weight", 3, 0.25),
        (_row_of_sevens, "embedding.weight", 5, 7.0),
        (lambda: [layers()[0], Scaled(is_reset=False), layers()[2]], "blocks.0.scale", 0, 3.0),
        (lambda: [layers()[0], Scaled(is_reset=True), layers()[2]], "blocks.0.scale", 0, 1.0),
    ],
)
def test_values_that_a_script_fills_in_are_kept(
    factory: Callable[[], object], name: str, row: int, value: float, tmp_path: Path
):
    found = _values(_structure(factory, cache_dir=tmp_path))[name][row]
    assert torch.equal(found, torch.full_like(found, value))


def test_a_rule_that_a_script_gives_an_argument_is_not_run_without_it(tmp_path: Path):
    values = _values(_structure(lambda: [layers()[0], Narrow(), layers()[2]], cache_dir=tmp_path))
    assert values["blocks.0.weight"].abs().max() < 0.1


def test_buffers_keep_the_values_that_a_script_gives_them(tmp_path: Path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.arange(SIZE) % 2, persistent=False)
            self.register_buffer("kept", torch.arange(SIZE) / SIZE)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * self.mask + self.kept

    structure = _structure(lambda: [layers()[0], Masked(), layers()[2]], cache_dir=tmp_path)
    assert torch.equal(_values(structure)["blocks.0.kept"], torch.arange(SIZE) / SIZE)
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, structure.num_layers, {})
    assert torch.equal(stage.model.get_buffer("blocks.0.mask"), torch.arange(SIZE) % 2)


def test_what_such_a_model_draws_follows_from_the_seed(tmp_path: Path):
    one, again, other = (
        _values(_structure(_head_of_zeros, cache_dir=tmp_path, seed=seed))["embedding.weight"] for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("factory", [layers, gpt2, llama, _adapted])
def test_a_model_without_values_of_its_own_is_never_built_with_memory(factory: Callable[[], object]):
    built: list[torch.device] = []

    def noted() -> object:
        made = factory()
        first = made[0] if isinstance(made, list) else made
        built.append(next(first.parameters()).device)  # type: ignore[attr-defined]  # a module
        return made

    structure = _structure(noted)
    assert structure.weights is None
    assert not structure.keeps_buffers
    assert {device.type for device in built} == {"meta"}
