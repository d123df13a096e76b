"""Whole states as torch's distributed checkpoints: a torch script and a checkpoint of ours go on from each other."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import GPT2Config, GPT2LMHeadModel

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.job import ModelSpec
from oobleck.training.checkpoint.dcp_format import export_state, import_state
from oobleck.training.checkpoint.imported import write_checkpoint
from oobleck.training.checkpoint.weights import read_state
from oobleck.training.model import ModelStructure

SMALL = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
UNUSED = "transformer.wpe.weight"
"""It gets no gradient in the first step."""


class Script:
    """A torch script of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = GPT2LMHeadModel(GPT2Config(**SMALL, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number: int, *, without: str = "") -> None:
        tokens = torch.arange(12).add(number).remainder(40).view(1, 12)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in self.model.named_parameters():
            parameter.grad = None if name == without else parameter.grad
        self.optimizer.step()
        self.optimizer.zero_grad()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(self.optimizer.state[each]) for name, each in self.model.named_parameters()}

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": torch.tensor(0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        assert int(state["step"]) == 2
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


@pytest.fixture
def script() -> Script:
    """A script after two steps."""
    script = Script(0)
    script.step(1, without=UNUSED)
    script.step(2)
    return script


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory with the model's configuration, and other weights."""
    Script(1).model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_script_goes_on_from_what_it_had_saved_after_a_way_through_our_checkpoints(
    tmp_path: Path, script: Script, model: str
) -> None:
    script.save(tmp_path / "saved")
    checkpoint = import_state(tmp_path / "saved", tmp_path / "imported", model=model)
    export_state(checkpoint, tmp_path / "exported")
    other = Script(2)
    other.step(9)  # so that its optimizer has a state to load into
    other.load(tmp_path / "exported")
    script.step(3)
    other.step(3)
    for (name, ours), (_, theirs) in zip(other.model.named_parameters(), script.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_import_has_the_weights_the_optimizers_state_and_the_steps(
    tmp_path: Path, script: Script, model: str
) -> None:
    script.save(tmp_path / "saved")
    manifest, _, weights, states = read_state(import_state(tmp_path / "saved", tmp_path / "imported", model=model))
    assert manifest.step == 2
    parameters = dict(script.model.named_parameters())
    assert weights.keys() == parameters.keys()
    for name, kinds in script.states().items():
        assert torch.equal(weights[name], parameters[name])
        assert torch.equal(states[name]["exp_avg"], kinds["exp_avg"])
        assert torch.equal(states[name]["exp_avg_sq"], kinds["exp_avg_sq"])
    assert {name: int(kinds["missed"]) for name, kinds in states.items() if "missed" in kinds} == {UNUSED: 1}


def test_a_state_without_an_optimizer_begins_at_step_0(tmp_path: Path, script: Script, model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"model": script.model.state_dict()}, checkpoint_id=tmp_path / "saved")
    manifest, _, weights, states = read_state(import_state(tmp_path / "saved", tmp_path / "imported", model=model))
    assert (manifest.step, states) == (0, {})
    assert torch.equal(weights[UNUSED], script.model.state_dict()[UNUSED])


def test_tied_weights_are_there_by_both_names(tmp_path: Path, script: Script, model: str) -> None:
    structure = ModelStructure.from_spec(ModelSpec(path=model), vocab_size=1, sequence_length=16)
    state = dict(script.model.state_dict(keep_vars=True))
    checkpoint = write_checkpoint(tmp_path / "ours", structure, state, {}, step=0)
    export_state(checkpoint, tmp_path / "exported")
    entries = dcp.FileSystemReader(tmp_path / "exported").read_metadata().state_dict_metadata
    assert {"model.lm_head.weight", "model.transformer.wte.weight"} <= entries.keys()


def test_another_model_is_named(tmp_path: Path, script: Script) -> None:
    script.save(tmp_path / "saved")
    GPT2LMHeadModel(GPT2Config(**{**SMALL, "n_embd": 32})).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"model\.\S+ should have the shape \[.*, as in .*wide; there is \["):
        import_state(tmp_path / "saved", tmp_path / "imported", model=str(tmp_path / "wide"))
    GPT2LMHeadModel(GPT2Config(**{**SMALL, "n_layer": 1})).save_pretrained(tmp_path / "short")
    with pytest.raises(ConfigError, match=r"model\.transformer\.h\.1\.\S+ is no parameter of the model in .*short"):
        import_state(tmp_path / "saved", tmp_path / "imported", model=str(tmp_path / "short"))


def test_keys_of_another_kind_are_named(tmp_path: Path, model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"it has no model\.NAME, but weights\.a, …; save"):
        import_state(tmp_path / "saved", tmp_path / "imported", model=model)


class Harm:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("harmed"),)


def test_metadata_runs_no_code_and_damage_is_named(
    tmp_path: Path, script: Script, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script.save(tmp_path / "saved")
    whole = (tmp_path / "saved" / ".metadata").read_bytes()
    for text in (pickle.dumps(Harm()), whole[: len(whole) // 2], b"", pickle.dumps({"a": 1})):
        (tmp_path / "saved" / ".metadata").write_bytes(text)
        with pytest.raises(CorruptCheckpoint, match=r"\.metadata: "):
            import_state(tmp_path / "saved", tmp_path / "imported", model=model)
    assert not Path("harmed").exists()
    (tmp_path / "saved" / ".metadata").write_bytes(whole)
    (data,) = (tmp_path / "saved").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(CorruptCheckpoint, match="saved: "):
        import_state(tmp_path / "saved", tmp_path / "imported", model=model)
    shutil.rmtree(tmp_path / "saved")
