"""Checkpoints to and from model directories of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.storage import CheckpointDirectory
from oobleck.training.checkpoint.conversion import export_model, import_model
from oobleck.training.checkpoint.imported import write_layers
from oobleck.training.checkpoint.parts import read_part
from oobleck.training.checkpoint.trainer_checkpoint import import_trainer_checkpoint, write_checkpoint
from oobleck.training.model import LiveModel, ModelStructure
from tests.disks import fill, small_disk

SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "bos_token_id": 0, "eos_token_id": 0},
    "llama": {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.fixture(name="saved", params=sorted(SIZES))
def _saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model directory; one with tied embeddings, one without."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(request.param, **SIZES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_that_was_imported_and_exported_is_the_same_model(saved: Path, tmp_path: Path) -> None:
    checkpoint = import_model(saved, tmp_path / "imported")
    directory = CheckpointDirectory(tmp_path / "imported")
    (found,) = directory.find()
    assert found.manifest is not None
    assert (found.manifest.step, len(found.manifest.shards)) == (0, 4)
    assert list(directory.faults(found.manifest)) == []

    export_model(checkpoint, tmp_path / "exported")
    before = AutoModelForCausalLM.from_pretrained(saved)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert before.state_dict().keys() == after.state_dict().keys()
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    ids = torch.arange(8)[None]
    assert torch.equal(before.eval()(ids).logits, after.eval()(ids).logits)


@pytest.mark.parametrize("model_type", sorted(SIZES))
def test_a_model_that_classifies_is_exported_as_one(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **SIZES[model_type], num_labels=3, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    export_model(import_model(tmp_path / "model", tmp_path / "imported"), tmp_path / "exported")
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name).eval() for name in ("model", "exported")
    )
    ids = torch.arange(1, 9)[None]
    assert before(ids).logits.shape == (1, 3)
    assert torch.equal(before(ids).logits, after(ids).logits)


def test_adapters_alone_need_adapters(saved: Path, tmp_path: Path) -> None:
    checkpoint = import_model(saved, tmp_path / "imported")
    with pytest.raises(ConfigError, match="there are no adapters in it; export it as hf"):
        export_model(checkpoint, tmp_path / "exported", adapters_alone=True)


def test_layers_of_a_script_are_refused_with_the_form_that_exports_them(tmp_path: Path) -> None:
    layers = [nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)]
    structure = ModelStructure.from_factory(lambda: layers, vocab_size=8, sequence_length=4)
    checkpoint = write_layers(tmp_path / "saved", structure, [layer.state_dict() for layer in layers])
    with pytest.raises(ConfigError, match=r"its layers are of a script.*--format dcp") as error:
        export_model(checkpoint, tmp_path / "exported")
    assert len(str(error.value)) < 400  # not a list of all that transformers knows


def test_a_harmed_checkpoint_is_not_exported(saved: Path, tmp_path: Path) -> None:
    checkpoint = import_model(saved, tmp_path / "imported")
    path = checkpoint / "layer-0002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptCheckpoint, match=r"layer-0002.safetensors: "):
        export_model(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_export_that_a_full_disk_cuts_off_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    checkpoint = import_model(saved, tmp_path / "imported")
    with small_disk(tmp_path / "disk", "64k") as disk:
        filler = fill(disk)
        filler.write_bytes(bytes(filler.stat().st_size - 16384))
        with pytest.raises(OSError, match="exported"):
            export_model(checkpoint, disk / "exported")
        assert list(disk.iterdir()) == [filler]


def test_what_is_no_model_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError):
        import_model(tmp_path / "empty", tmp_path / "imported")


def hand_tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def hand_untied(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1.0)


def with_a_buffer_of_its_own(model: Any) -> None:
    model.model.layers[1].mlp.register_buffer("seen", torch.tensor([5, 7]))


@pytest.mark.parametrize(
    ("declared", "change"),
    [(False, hand_tied), (True, hand_untied), (False, with_a_buffer_of_its_own), (True, with_a_buffer_of_its_own)],
)
def test_what_a_script_has_made_of_its_model_is_exported(
    declared: bool, change: Callable[[Any], None], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    sizes = {**SIZES["llama"], "tie_word_embeddings": declared}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).eval()
    change(model)
    structure = ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=8)
    checkpoint = write_checkpoint(tmp_path / "saved", structure, model.state_dict(), {}, step=1)
    export_model(checkpoint, tmp_path / "exported")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).logits, after(ids).logits)
    with safe_open(tmp_path / "exported" / "model.safetensors", framework="pt") as file:
        if change is with_a_buffer_of_its_own:
            assert file.get_tensor("model.layers.1.mlp.seen").tolist() == [5, 7]
    assert (after.lm_head.weight is after.model.embed_tokens.weight) == (
        model.lm_head.weight is model.model.embed_tokens.weight
    )


def test_a_trainers_checkpoint_tells_which_steps_a_parameter_has_missed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES["llama"]))
    decayed = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    groups = [
        {"params": [each for name, each in model.named_parameters() if (name in decayed) == is_decayed]}
        for is_decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    never, once = model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        never.grad = None
        once.grad = once.grad if step == 1 else None
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    checkpoint = import_trainer_checkpoint(tmp_path, model, decayed, options)
    tensors = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors |= read_part(path)[1]
    missed = {name: int(value) for name, value in tensors.items() if ".missed." in name}
    assert missed == {
        "optimizer.missed.model.layers.0.mlp.up_proj.weight": 3,
        "optimizer.missed.model.layers.1.mlp.up_proj.weight": 2,
    }
    assert "optimizer.exp_avg.model.layers.1.mlp.up_proj.weight" in tensors
