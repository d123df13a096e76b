"""One's own model: a list of layers that is cut anywhere, and what is said of lists that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from oobleck.errors import ConfigError
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import (
    KEY,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    gradients_of,
    random_batch,
    run_pipeline,
    stages_of,
    state_of,
    whole_stage,
)

SIZE = 16


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, SIZE)
        self.scale = nn.Parameter(torch.empty(SIZE))
        self.register_buffer("positions", torch.empty(SEQUENCE_LENGTH, SIZE), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1.0)
            self.positions.copy_(torch.linspace(0, 1, SEQUENCE_LENGTH)[:, None].expand(-1, SIZE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) * self.scale + self.positions


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mix = nn.Conv1d(SIZE, SIZE, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = functional.pad(self.norm(hidden).transpose(1, 2), (2, 0))
        return hidden + self.dropout(functional.gelu(self.mix(before)).transpose(1, 2))


def layers(*, tied: bool = True, dropout: float = 0.2) -> list[nn.Module]:
    embedding, head = Embedding(), nn.Linear(SIZE, VOCAB_SIZE, bias=False)
    if tied:
        head.weight = embedding.tokens.weight
    # Blocks need not be alike.
    return [embedding, Block(dropout), nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)), Block(dropout), head]


def _structure(factory: Callable[[], object], **options: object) -> ModelStructure:
    return ModelStructure.from_factory(factory, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_any_cut_equals_the_list_run_as_it_stands(tied: bool):
    structure = _structure(lambda: layers(tied=tied, dropout=0.0))
    whole = whole_stage(structure)
    batch = random_batch(1)
    own = nn.Sequential(*layers(tied=tied, dropout=0.0))
    names = {"embedding": "0", "blocks.0": "1", "blocks.1": "2", "blocks.2": "3", "head": "4"}
    state = state_of(whole)
    assert structure.layers_with("embedding.tokens.weight") == ((0, 4) if tied else (0,))
    with torch.no_grad():
        parameters = dict(own.named_parameters())
        for name, value in state.items():
            root = max((root for root in names if name.startswith(f"{root}.")), key=len)
            parameters[names[root] + name.removeprefix(root)].copy_(value)
    logits = own(batch.input_ids)
    expected = functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCAB_SIZE), batch.labels[:, 1:].reshape(-1), reduction="sum"
    )
    (expected / batch.num_items).backward()
    for cuts in ([1], [4], [1, 2, 3, 4], [2]):
        stages = stages_of(structure, cuts, state, dtype=torch.float32)
        assert torch.equal(run_pipeline(stages, batch), (expected / batch.num_items).detach())
        gradients = gradients_of(stages)
        for name, gradient in gradients.items():
            root = max((root for root in names if name.startswith(f"{root}.")), key=len)
            assert torch.equal(gradient, parameters[names[root] + name.removeprefix(root)].grad), name


def test_dropout_and_initial_values_are_the_same_for_any_cut():
    structure = _structure(layers)
    whole = whole_stage(structure, dtype=torch.float64)
    batch = random_batch(2)
    loss = run_pipeline([whole], batch)
    assert loss.dtype == torch.float64
    assert loss != run_pipeline([whole_stage(_structure(lambda: layers(dropout=0.0)), dtype=torch.float64)], batch)
    stages = stages_of(structure, [2, 3], {}, dtype=torch.float64)
    for stage in stages:
        stage.initialize(stage.layers, seed=0)
    assert torch.equal(run_pipeline(stages, batch), loss)


class _Masked(nn.Module):
    """A block that leaves hidden tokens as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mixed = hidden + self.mix(hidden.mean(dim=1, keepdim=True))
        return mixed if attention_mask is None else torch.where(attention_mask[..., None] == 1, mixed, hidden)


def test_layers_get_what_samples_bring_by_the_names_of_their_arguments():
    structure = _structure(lambda: [nn.Embedding(VOCAB_SIZE, SIZE), _Masked(), _Masked(), nn.Linear(SIZE, VOCAB_SIZE)])
    assert structure.takes == {"attention_mask"}
    assert _structure(layers).takes == set()
    whole = whole_stage(structure)
    mask = torch.ones(2, SEQUENCE_LENGTH, dtype=torch.int64)
    mask[:, 3] = 0
    batch = replace(random_batch(1), others={"attention_mask": mask})
    loss = run_pipeline([whole], batch)
    assert loss != run_pipeline([whole], random_batch(1))
    for cuts in ([1], [2], [1, 2, 3]):
        stages = stages_of(structure, cuts, state_of(whole), dtype=torch.float32)
        assert torch.equal(run_pipeline(stages, batch), loss)


def test_a_loss_of_ones_own():
    def squares(output: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        return output.square().sum() / num_items

    structure = _structure(lambda: layers(dropout=0.0), loss=squares)
    whole = whole_stage(structure)
    batch = random_batch(1)
    (trunk, _) = stages_of(structure, [4], state_of(whole), dtype=torch.float32)
    hidden = trunk.forward(batch, None, num_items=7, key=KEY)
    output = functional.linear(hidden, whole.parameters["embedding.tokens.weight"])
    loss = whole.forward(batch, None, num_items=7, key=KEY)
    torch.testing.assert_close(loss, output.square().sum() / 7)


def test_a_transformers_model_from_a_factory():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=64,
    )
    structure = _structure(lambda: LlamaForCausalLM(config))
    assert structure.layer_names == ("embedding", "model.layers.0", "model.layers.1", "model.layers.2", "head")
    whole = whole_stage(structure)
    batch = random_batch(1)
    stages = stages_of(structure, [2], state_of(whole), dtype=torch.float32)
    assert torch.equal(run_pipeline(stages, batch), run_pipeline([whole], batch))


class Unset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


def _broken() -> list[nn.Module]:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: [Embedding()], "a list of 1 layers cannot be split; it needs at least two"),
        (lambda: "gpt2", "neither a transformers model nor a list of torch modules"),
        (_broken, "the script's model cannot be built: RuntimeError: no such thing"),
        (lambda: [Embedding(), *[Block(0)] * 2, nn.Linear(SIZE, 9)], "a module is in its list twice"),
        (lambda: [Embedding(), nn.Linear(SIZE, 3), nn.Linear(3, 9)], r"layer 1 returns the shape .*keep their shape"),
        (lambda: [Embedding(), nn.Linear(3, 9)], "layer 1 does not run: "),
        (lambda: [nn.Embedding(VOCAB_SIZE, SIZE), nn.Flatten(), nn.Linear(3, 9)], r"must be \[batch, length, size\]"),
    ],
)
def test_lists_that_cannot_be_split_are_refused_with_the_reason(factory: Callable[[], object], message: str):
    with pytest.raises(ConfigError, match=message):
        _structure(factory)


def test_a_module_that_cannot_give_its_parameters_values_is_named():
    structure = _structure(lambda: [Embedding(), Unset(), nn.Linear(SIZE, VOCAB_SIZE)])
    with pytest.raises(ConfigError, match=r"Unset .*reset_parameters\(\)"):
        whole_stage(structure)
