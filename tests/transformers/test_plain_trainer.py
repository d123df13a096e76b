"""transformers' own Trainer in place of ours: what its steps are noted to be, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import WeightedRandomSampler

from oobleck.control.verification import PlainJob
from oobleck.errors import ConfigError
from oobleck.host.handover import TrainReached
from oobleck.job import JobSpec
from oobleck.training.randomness import seed_scripts
from oobleck.transformers.plain_trainer import Observation, plain_trainer
from tests.transformers.trainers import model, rows, trainer

STEPS = 3


def observed(directory: Path, *, kind: type | None = None, seed: int = 0, **values: Any) -> Observation:
    """Train the first steps by a class in place of ours, from the script's seed."""
    observation = Observation(PlainJob(job=JobSpec(), num_steps=STEPS, directory=str(directory / "safe")))
    base = plain_trainer(observation)
    made = type("Trainer", (kind, base), {}) if kind is not None else base
    seed_scripts()
    torch.manual_seed(seed)
    with pytest.raises(TrainReached):
        trainer(directory, kind=made, per_device_train_batch_size=2, **values).train()
    return observation


class OwnSampler:
    """Draws from the process's random numbers."""

    def _get_train_sampler(self, *_: object, **__: object) -> WeightedRandomSampler:
        return WeightedRandomSampler([1.0] * 11, num_samples=6)


def losses_of_transformers(directory: Path, **values: Any) -> list[float]:
    seed_scripts()
    plain = trainer(
        directory, kind=transformers.Trainer, per_device_train_batch_size=2, logging_steps=1, max_steps=STEPS, **values
    )
    plain.train()
    return [entry["loss"] for entry in plain.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_noted_is_what_transformers_logs(tmp_path: Path, accumulation: int) -> None:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    values: dict[str, Any] = {
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
        "train_dataset": [{**row, "labels": [-100, *row["labels"][1:]]} for row in rows(11)],
    }
    account = observed(tmp_path, model=model(**no_dropout), max_steps=20, **values).account()
    theirs = losses_of_transformers(tmp_path, model=model(**no_dropout), **values)
    assert [step.loss for step in account.steps] == pytest.approx(theirs, rel=1e-6)
    assert [step.step for step in account.steps] == [1, 2, 3]
    assert {step.learning_rate for step in account.steps} == {5e-5}
    assert all(step.grad_norm > 0.5 for step in account.steps), "before they are clipped"


def test_samples_are_those_of_the_run_where_the_sampler_follows_from_the_epoch(tmp_path: Path) -> None:
    account = observed(tmp_path).account()
    assert tuple(step.samples for step in account.steps) == account.samples_on_nodes
    assert len({number for step in account.steps for number in step.samples or ()}) == 2 * STEPS
    assert len(account.remarks) == 1, "of GPT-2's first labels alone"


def test_a_sampler_that_draws_gives_the_order_of_the_run_and_says_so(tmp_path: Path) -> None:
    accounts = [observed(tmp_path, kind=OwnSampler, seed=seed).account() for seed in (1, 2)]
    assert accounts[0].samples_on_nodes == accounts[1].samples_on_nodes
    for account in accounts:
        assert tuple(step.samples for step in account.steps) == account.samples_on_nodes
        assert any("the script by itself used the order of the run" in remark for remark in account.remarks)


def test_nothing_is_written_where_the_script_has_it_written(tmp_path: Path) -> None:
    account = observed(tmp_path, save_steps=1, eval_strategy="steps", eval_steps=1, eval_dataset=rows(3)).account()
    assert not (tmp_path / "out").exists()
    assert account.output_dir == str(tmp_path / "out")


def test_dropout_is_off_and_what_it_was_is_noted(tmp_path: Path) -> None:
    account = observed(tmp_path, model=model(resid_pdrop=0.25)).account()
    assert account.dropped["resid_pdrop"] == 0.25
    assert account.steps[0].loss == observed(tmp_path, seed=3).account().steps[0].loss


def test_samples_that_are_drawn_when_they_are_read_cannot_be_compared(tmp_path: Path) -> None:
    class Masked:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, number: int) -> dict[str, list[int]]:
            return {"input_ids": torch.randint(3, 9, (4,)).tolist(), "labels": [number] * 4}

    with pytest.raises(ConfigError, match="draws random numbers"):
        observed(tmp_path, train_dataset=Masked())
