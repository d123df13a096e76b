"""Checkpoints in output_dir are those of transformers' own Trainer at the same step: it continues from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from oobleck.training.checkpoint import import_trainer_checkpoint
from oobleck.transformers.job import decayed_parameters, optimizer_options
from oobleck.transformers.plain_checkpoints import newest_of_transformers

from .test_follower import saved, step
from .test_kept_state import begun, followed
from .trainers import model, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:'pin_memory':UserWarning"
)
FILES = {"model.safetensors", "config.json", "generation_config.json", "training_args.bin", "trainer_state.json"}
STATES = {"optimizer.pt", "scheduler.pt"}
SAVING: dict[str, Any] = {
    "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "max_steps": 4, "save_steps": 2,
    "per_device_train_batch_size": 2, "logging_steps": 1,
}  # fmt: skip


def made_by(kind: type | None, directory: Path, **values: Any) -> Any:
    still = model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    own = {} if kind is None else {"kind": kind}
    return trainer(directory, model=still, **own, **{**SAVING, **values})


class Looking(TrainerCallback):
    """Notes what is in output_dir when a checkpoint is told."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        place = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.seen.append({each.name for each in place.iterdir()})


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training of transformers' own."""
    made = made_by(transformers.Trainer, tmp_path_factory.mktemp("theirs"))
    made.train()
    return made


def run_of(made: Any, theirs: Any, tmp_path: Path) -> Any:
    """Tell a trainer of two steps, and of a checkpoint of the run that has all that transformers saved."""
    original = Path(theirs.args.output_dir) / "checkpoint-2"
    reading = made_by(transformers.Trainer, tmp_path / "reading")
    load_model(reading.model, original / "model.safetensors")
    found = import_trainer_checkpoint(original, reading.model, decayed_parameters(reading), optimizer_options(reading))
    told = dataclasses.replace(saved(2), name=found.name)
    return followed(made, found.parent, begun(), step(1, 5.0), step(2, 5.0), told)


def test_it_has_all_that_transformers_saves_and_transformers_continues_from_it(theirs: Any, tmp_path: Path) -> None:
    looking = Looking()
    made = made_by(None, tmp_path, callbacks=[looking])
    stale = Path(made.args.output_dir) / "checkpoint-2" / "rng_state.pth"  # of another run
    stale.parent.mkdir(parents=True)
    stale.touch()
    run_of(made, theirs, tmp_path)
    found = Path(str(get_last_checkpoint(made.args.output_dir)))
    assert found.name == "checkpoint-2"
    assert looking.seen == [FILES | STATES]
    other = Path(theirs.args.output_dir) / "checkpoint-2"
    weights, expected = (load_file(each / "model.safetensors") for each in (found, other))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    ours, wanted = (torch.load(each / "optimizer.pt", weights_only=True) for each in (found, other))
    assert ours["state"].keys() == wanted["state"].keys()
    for number, state in wanted["state"].items():
        assert ours["state"][number].keys() == state.keys()
        assert all(torch.equal(ours["state"][number][name], value) for name, value in state.items())
    assert [group["lr"] for group in ours["param_groups"]] == [group["lr"] for group in wanted["param_groups"]]
    written, expected = (json.loads((each / "trainer_state.json").read_text()) for each in (found, other))
    assert written["global_step"] == 2
    assert written["stateful_callbacks"] == expected["stateful_callbacks"] == made.state.stateful_callbacks
    assert [newest_of_transformers(each.parent) for each in (found, other)] == [
        None,
        str(other.with_name("checkpoint-4")),
    ]
    again = made_by(None, tmp_path / "again")
    assert import_trainer_checkpoint(found, again.model, decayed_parameters(again), optimizer_options(again)).is_dir()
    resumed = made_by(transformers.Trainer, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(found))
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_the_oldest_are_removed_and_optimizers_left_out_where_asked(theirs: Any, tmp_path: Path) -> None:
    made = made_by(None, tmp_path, save_only_model=True, save_total_limit=1)
    before = Path(made.args.output_dir) / "checkpoint-1"
    before.mkdir(parents=True)
    run_of(made, theirs, tmp_path)
    assert not before.exists()
    assert {each.name for each in (before.with_name("checkpoint-2")).iterdir()} == FILES


def test_weights_that_are_not_on_this_machine_are_named_once(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_by(None, tmp_path)
    followed(made, tmp_path / "elsewhere", begun(), step(1, 5.0), step(2, 5.0), saved(2), step(3, 5.0), saved(3))
    assert capsys.readouterr().err.count("has not all checkpoints of transformers' kind: the weights of step 2") == 1
    assert not (Path(made.args.output_dir) / "checkpoint-2").exists()


def test_none_is_written_where_none_is_asked_for(theirs: Any, tmp_path: Path) -> None:
    made = made_by(None, tmp_path, save_strategy="no")
    run_of(made, theirs, tmp_path)
    assert not (Path(made.args.output_dir) / "checkpoint-2").exists()
