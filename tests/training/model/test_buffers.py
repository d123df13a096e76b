"""Buffers that are saved with a model are state of their layers: read, moved, saved, exported and given back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.job import ModelSpec
from oobleck.training.checkpoint.conversion import export_model, import_model
from oobleck.training.checkpoint.weights import newest_weights
from oobleck.training.data import Batch
from oobleck.training.model import LiveModel, MicrobatchKey, ModelStructure, StageModel
from tests.training.model.test_frozen import B, Holder
from tests.training.table import acquaint
from tests.training.zoo import run_pipeline, stages_of, state_of, whole_stage

LENGTH, VOCAB_SIZE = 8, 40
KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
IDS = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def glm() -> Glm4MoeForCausalLM:
    torch.manual_seed(1)
    config = Glm4MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, n_routed_experts=4, num_experts_per_tok=1, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=16, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    return Glm4MoeForCausalLM(config)


@pytest.fixture(name="saved")
def _saved(tmp_path: Path) -> Path:
    """The directory of a model whose router prefers one of its experts."""
    model = glm()
    model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias[2] = 5.0
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def structure_of(path: Path) -> ModelStructure:
    return ModelStructure.from_spec(ModelSpec(path=str(path)), vocab_size=VOCAB_SIZE, sequence_length=LENGTH)


def staged_loss(structure: ModelStructure, *cuts: int, dtype: torch.dtype = torch.float32) -> float:
    state = state_of(whole_stage(structure, dtype=dtype))
    return float(run_pipeline(stages_of(structure, cuts, state, dtype=dtype), Batch(input_ids=IDS, labels=IDS)))


def test_they_are_read_from_the_directory_that_a_model_starts_from(saved: Path):
    structure = structure_of(saved)
    assert BIAS in structure.layer_parameters(2)
    assert BIAS in structure.frozen
    assert whole_stage(structure).parameters[BIAS].tolist() == [0.0, 0.0, 5.0, 0.0]
    model = Glm4MoeForCausalLM.from_pretrained(saved).train()
    expected = float(model(input_ids=IDS, labels=IDS).loss.detach())
    assert staged_loss(structure, 1, 2) == pytest.approx(expected, abs=1e-6)
    model.get_submodule("model.layers.1.mlp.gate").e_score_correction_bias.zero_()
    assert abs(float(model(input_ids=IDS, labels=IDS).loss.detach()) - expected) > 1e-3, "it makes a difference"


def test_what_a_directory_lacks_has_the_value_that_the_models_rules_give(tmp_path: Path):
    model = glm()
    state = {name: value for name, value in model.state_dict().items() if name != BIAS}
    model.save_pretrained(tmp_path, state_dict=state)
    assert whole_stage(structure_of(tmp_path)).parameters[BIAS].tolist() == [0.0] * 4


def test_they_are_counted_as_no_parameters(saved: Path):
    assert structure_of(saved).num_parameters == glm().num_parameters()


def test_they_move_with_their_layer_and_are_part_of_its_digest(saved: Path):
    structure = structure_of(saved)
    source, target = Holder(structure), Holder(structure, B)
    source.begin()
    digests = source.store.digests()
    with torch.no_grad():
        source.model.parameters[BIAS].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert [one == other for one, other in zip(digests, source.store.digests(), strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    acquaint([source.table, target.table])
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(source.exchange, None)
        pool.submit(target.exchange, None).result(60)
        sending.result(60)
    target.store.take((target.layers,), keep=(), is_initial=False, sums=None)
    router = target.model.model.get_submodule("model.layers.1.mlp.gate")
    assert router.e_score_correction_bias.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert target.store.digests() == source.store.digests()


def test_they_are_exported_with_the_weights(saved: Path, tmp_path: Path):
    checkpoint = import_model(saved, tmp_path / "imported")
    assert newest_weights(tmp_path / "imported")[BIAS].tolist() == [0.0, 0.0, 5.0, 0.0]
    export_model(checkpoint, tmp_path / "exported")
    before, after = (Glm4MoeForCausalLM.from_pretrained(path).state_dict() for path in (saved, tmp_path / "exported"))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# --- of the script's own ---------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Chosen(nn.Module):
    """Multiplies hidden states by what a table of whole numbers chooses."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.table.dtype == torch.int64
        return hidden * self.table[3]


def with_a_table(*numbers: int) -> LlamaForCausalLM:
    model = llama()
    model.model.layers[1].mlp = Chosen(torch.tensor(numbers))
    return model


def live(model: Any, directory: Path) -> ModelStructure:
    return ModelStructure.from_live(LiveModel.taken_apart(model, directory), sequence_length=LENGTH)


def test_modules_read_them_in_the_type_that_they_were_registered_in(tmp_path: Path):
    model = with_a_table(1, 2, 3, 4)
    expected = float(model(input_ids=IDS, labels=IDS).loss.detach())
    structure = live(model, tmp_path)
    assert structure.buffers == {"model.layers.1.mlp.table": torch.int64}
    assert staged_loss(structure, 2, 3) == pytest.approx(expected, abs=1e-6)
    other = {**state_of(whole_stage(structure)), "model.layers.1.mlp.table": torch.tensor([0.0, 0.0, 0.0, 9.0])}
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(2, 3, other)
    assert stage.model.get_submodule("model.layers.1.mlp").table.tolist() == [0, 0, 0, 9]


def test_numbers_that_no_layer_can_carry_are_refused_by_name(tmp_path: Path):
    structure = live(with_a_table(1, 2, 3, (1 << 24) + 1), tmp_path)
    with pytest.raises(ConfigError, match=r"buffer model\.layers\.1\.mlp\.table is of torch\.int64"):
        whole_stage(structure)
    assert float(whole_stage(structure, dtype=torch.float64).parameters["model.layers.1.mlp.table"][3]) == (1 << 24) + 1


def with_a_buffer_everywhere(value: float) -> LlamaForCausalLM:
    model = llama()
    model.model.register_buffer("scale", torch.tensor([value]))
    return model


def test_those_that_every_stage_computes_with_are_saved_with_the_embedding(tmp_path: Path):
    structure = live(with_a_buffer_everywhere(2.0), tmp_path)
    assert structure.buffers_everywhere == {"model.scale"}
    assert "model.scale" in structure.layer_parameters(0)
    state = state_of(whole_stage(structure))
    last = StageModel(structure, dtype=torch.float32, device="cpu")
    last.adopt(3, 5, state)
    assert last.model.get_submodule("model").scale.tolist() == [2.0]
    with pytest.raises(CorruptCheckpoint, match=r"the buffer model\.scale, which every stage computes with"):
        last.adopt(3, 5, {**state, "model.scale": torch.tensor([3.0])})


class Counting(nn.Module):
    """Counts what it has seen, and looks at values, so that it does not run on tensors without them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if float(hidden.sum()) < 1e9:
            self.seen = self.seen + 1
        return hidden


def test_one_that_changes_where_no_trial_runs_is_refused_in_the_first_forward_pass(tmp_path: Path):
    model = llama()
    model.model.layers[1].mlp = Counting()
    structure = live(model, tmp_path)
    with pytest.raises(ConfigError, match=r"in Llama\w+, .* changes the buffer model\.layers\.1\.mlp\.seen"):
        staged_loss(structure)
