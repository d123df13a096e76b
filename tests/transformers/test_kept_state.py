"""What a trainer's state has counted, and what its callbacks know, is what transformers' own loop and its checkpoints
have: after a failure, after the run went back, and in a run that resumes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import EarlyStoppingCallback

from oobleck.control.journal import Evaluated, JournalEntry, PlanAdopted
from tests.control.journals import run_with_a_loss

from .test_follower import saved, step
from .trainers import rows, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:'pin_memory':UserWarning"
)
COUNTING: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 1,
}  # fmt: skip
STOPPING: dict[str, Any] = {
    "eval_dataset": rows(3), "eval_strategy": "steps", "eval_steps": 1, "save_steps": 2, "logging_steps": 1,
    "metric_for_best_model": "loss", "greater_is_better": True, "max_steps": 6, "per_device_train_batch_size": 4,
    "restore_callback_states_from_checkpoint": True, "load_best_model_at_end": True, "learning_rate": 0.5,
}  # fmt: skip


def begun(*, restored: int | None = None) -> PlanAdopted:
    plan = next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted))
    if restored is None:
        return plan
    return dataclasses.replace(plan, restored=f"step-{restored}", restored_step=restored, boundary=restored)


def followed(made: Any, checkpoints: Path, *entries: JournalEntry) -> Any:
    follower = made.follower = made.follow(made.job())
    follower.saves_in(checkpoints)
    for entry in entries:
        follower.take(entry)
    return made


def counts(made: Any) -> list[int]:
    return [entry["num_input_tokens_seen"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("what", ["all", "non_padding", True])
def test_tokens_are_counted_as_by_transformers(tmp_path: Path, what: str | bool) -> None:
    values = {**COUNTING, "include_num_input_tokens_seen": what, "save_strategy": "no"}
    real = trainer(tmp_path, kind=transformers.Trainer, **values)
    real.train()
    steps = [step(number, 5.0) for number in range(1, real.state.global_step + 1)]
    made = followed(trainer(tmp_path, **values), tmp_path / "checkpoints", begun(), *steps)
    assert counts(made) == counts(real)
    assert made.state.total_flos == real.state.total_flos > 0
    assert made.state.num_input_tokens_seen == real.state.num_input_tokens_seen > 0
    keys = [entry.keys() for entry in made.state.log_history]
    assert keys == [entry.keys() for entry in real.state.log_history][: len(keys)]


@pytest.mark.parametrize("is_kept", [True, False])
def test_tokens_before_a_checkpoint_count_in_the_run_that_resumes(tmp_path: Path, is_kept: bool) -> None:
    values, checkpoints = {**COUNTING, "include_num_input_tokens_seen": "non_padding"}, tmp_path / "checkpoints"
    (checkpoints / "step-4").mkdir(parents=True)
    steps = [step(number, 5.0) for number in range(1, 7)]
    whole = followed(trainer(tmp_path, **values), checkpoints, begun(), *steps, saved(4))
    if not is_kept:
        (checkpoints / "step-4" / "trainer.json").unlink()
    made = followed(trainer(tmp_path, **values), checkpoints, begun(restored=4), *steps[4:])
    assert made.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    assert counts(made) == counts(whole)[0 if is_kept else 4 :]


def test_tokens_of_steps_that_are_run_again_count_once(tmp_path: Path) -> None:
    values = {**COUNTING, "include_num_input_tokens_seen": "all"}
    steps = [step(number, 5.0) for number in range(1, 6)]
    once = followed(trainer(tmp_path, **values), tmp_path / "checkpoints", begun(), *steps)
    made = followed(trainer(tmp_path, **values), tmp_path / "checkpoints", begun(), *steps, *steps[2:])
    assert made.state.num_input_tokens_seen == once.state.num_input_tokens_seen


def test_callbacks_continue_as_after_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    values = {**STOPPING, "callbacks": [EarlyStoppingCallback(3)]}
    real = trainer(tmp_path, kind=transformers.Trainer, **values)
    real.train()
    losses = [entry["eval_loss"] for entry in real.state.log_history if "eval_loss" in entry]
    entries: list[JournalEntry] = [begun()]
    for number, loss in enumerate(losses[:3], 1):
        entries += [step(number, 5.0), Evaluated(t_s=1.0, step=number, loss=loss, num_samples=3, duration_s=0.1)]
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "step-2").mkdir(parents=True)
    # It is on the disk before its evaluation is known.
    followed(trainer(tmp_path, **values), checkpoints, *entries[:4], saved(2), *entries[4:])
    kept = json.loads((checkpoints / "step-2" / "trainer.json").read_text())
    theirs = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    counter = kept["stateful_callbacks"]["EarlyStoppingCallback"]
    assert counter == theirs["stateful_callbacks"]["EarlyStoppingCallback"]
    assert counter["attributes"]["early_stopping_patience_counter"] > 0, "or else it tells nothing"
    for each in ("global_step", "epoch", "best_metric", "best_global_step"):
        assert kept[each] == theirs[each], each
    assert [entry["step"] for entry in kept["log_history"]] == [entry["step"] for entry in theirs["log_history"]]

    again = trainer(tmp_path, kind=transformers.Trainer, **values)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    # Workers evaluate the step that they continue from, of which the checkpoint has the evaluation.
    known = Evaluated(t_s=1.0, step=2, loss=losses[1], num_samples=3, duration_s=0.1)
    made = followed(trainer(tmp_path, **values), checkpoints, begun(restored=2), known)
    assert made.state.log_history == kept["log_history"]
    for number in range(3, again.state.global_step + 1):
        assert not made.control.should_training_stop
        loss = next(e["eval_loss"] for e in again.state.log_history if e["step"] == number and "eval_loss" in e)
        follower = made.follower
        follower.take(step(number, 5.0))
        follower.take(Evaluated(t_s=1.0, step=number, loss=loss, num_samples=3, duration_s=0.1))
    assert made.control.should_training_stop
    assert again.state.global_step == 4, "a callback that starts afresh stops a step later"
