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

from oobleck.control.journal import Evaluated
from oobleck.host.handover import receiving
from oobleck.job import CheckpointSpec
from oobleck.training.checkpoint import gathered_in, import_trainer_checkpoint
from oobleck.transformers.best import BestCheckpoint
from oobleck.transformers.job import decayed_parameters, optimizer_options
from oobleck.transformers.plain_checkpoints import newest_of_transformers
from tests.control.journals import job_started

from .test_follower import checkpoint_of_live, saved, step
from .test_kept_state import begun, followed
from .trainers import gather, model, rows, trainer

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


def test_the_line_of_the_whole_training_is_in_no_checkpoint(theirs: Any, tmp_path: Path) -> None:
    made = run_of(made_by(None, tmp_path), theirs, tmp_path)
    checkpoints = Path(theirs.args.output_dir) / "checkpoint-2" / "oobleck"
    made.follower.finish(checkpoints)
    assert "train_loss" in made.state.log_history[-1]
    ours, expected = (
        json.loads((Path(each.args.output_dir) / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
        for each in (made, theirs)
    )
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in expected]
    name = next(each.name for each in checkpoints.iterdir())
    more = dataclasses.replace(begun(restored=2), restored=name)
    again = followed(made_by(None, tmp_path), checkpoints, more, step(3, 5.0))
    assert ["loss" in entry for entry in again.state.log_history] == [True] * 3


@pytest.mark.parametrize("is_stale", [True, False])
def test_the_best_weights_may_be_those_before_a_checkpoint_of_transformers(tmp_path: Path, is_stale: bool) -> None:
    values = {
        "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
        "eval_dataset": rows(3), "save_total_limit": 1, "learning_rate": 1.0,
    }  # fmt: skip
    theirs, checkpoints = made_by(transformers.Trainer, tmp_path, **values), tmp_path / "checkpoints"
    theirs.train()
    best = Path(theirs.state.best_model_checkpoint)
    made = made_by(None, tmp_path, **{**values, "max_steps": 6})
    newest = str(get_last_checkpoint(made.args.output_dir))
    with receiving(lambda reached: reached):
        made.train(resume_from_checkpoint=newest)
    resumed = Path(str(made.resume(made.job())))
    reached = int(Path(newest).name.removeprefix("checkpoint-"))
    if is_stale:  # of an earlier run by this tag
        gather(checkpoints, model(), 1)
        BestCheckpoint(checkpoints).keep(gathered_in(checkpoints, 1), 1, 0.0)
    follower = made.follow(made.job())
    follower.saves_in(checkpoints)
    follower.take(dataclasses.replace(begun(restored=reached), restored=resumed.name))
    for number in range(reached + 1, 7):
        follower.take(step(number, 5.0))
    follower.take(Evaluated(t_s=1.0, step=6, loss=99.0, num_samples=3, duration_s=0.1))
    last = Path(made.args.output_dir) / "checkpoint-6"
    last.mkdir()
    follower.finish(checkpoint_of_live(tmp_path, model()))
    assert Path(made.state.best_model_checkpoint) == best
    assert made.state.best_metric == theirs.state.best_metric
    for name, value in load_file(best / "model.safetensors").items():
        assert torch.equal(made.model.state_dict()[name], value), name
    assert sorted(last.parent.iterdir()) == [best], "as transformers leaves it with a limit of one"


def test_weights_that_are_not_on_this_machine_are_named_once(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_by(None, tmp_path)
    followed(made, tmp_path / "elsewhere", begun(), step(1, 5.0), step(2, 5.0), saved(2), step(3, 5.0), saved(3))
    assert capsys.readouterr().err.count("has not all checkpoints of transformers' kind: the weights of step 2") == 1
    assert not (Path(made.args.output_dir) / "checkpoint-2").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_file_that_cannot_be_written_over_an_earlier_runs_is_named(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    made = made_by(None, tmp_path)
    place = Path(made.args.output_dir) / "checkpoint-2"
    (place / file).mkdir(parents=True)  # which no file can replace
    run_of(made, theirs, tmp_path)
    assert (place / file).is_dir()
    assert "kind: that of step 2 cannot be written: " in capsys.readouterr().err


class Full:
    """A tokenizer whose files the disk does not take."""

    def save_pretrained(self, directory: str) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("was_there", [False, True])
def test_nothing_of_this_run_is_left_where_the_disk_is_full_and_nothing_else_is_lost(
    theirs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], was_there: bool
) -> None:
    made = made_by(None, tmp_path)
    made.processing_class = Full()
    place = Path(made.args.output_dir) / "checkpoint-2"
    if was_there:
        place.mkdir(parents=True)
        (place / "notes").touch()
    run_of(made, theirs, tmp_path)
    assert place.exists() == (place / "notes").exists() == was_there
    said = capsys.readouterr().err
    assert "that of step 2 cannot be written: [Errno 28] No space left on device" in said
    assert ("an earlier run has left one there" in said) == was_there


@pytest.mark.parametrize(
    ("saves", "is_said"),
    [({"save_steps": 2}, False), ({"save_steps": 1}, False), ({"save_steps": 5}, True), ({"enabled": False}, True)],
)
def test_steps_that_the_run_does_not_save_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], saves: dict[str, Any], is_said: bool
) -> None:
    made = made_by(None, tmp_path)
    followed(made, tmp_path, job_started(("node0",), checkpoint=CheckpointSpec(**saves)))
    assert ("save_strategy asks for one every 2 steps" in capsys.readouterr().err) == is_said


def test_none_is_written_where_none_is_asked_for(theirs: Any, tmp_path: Path) -> None:
    made = made_by(None, tmp_path, save_strategy="no")
    run_of(made, theirs, tmp_path)
    assert not (Path(made.args.output_dir) / "checkpoint-2").exists()
