"""A checkpoint of transformers' Trainer continues with the options that it was saved with, or is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from oobleck.errors import ConfigError
from oobleck.host.handover import receiving
from oobleck.training.checkpoint import import_trainer_checkpoint
from oobleck.transformers.job import decayed_parameters, optimizer_options

from .trainers import collate, model, rows, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:'pin_memory':UserWarning"
)
SAVED = {"learning_rate": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.95, "lr_scheduler_type": "cosine"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One of transformers' own, in the middle of its schedule."""
    out = tmp_path_factory.mktemp("out")
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, **SAVED,
    )  # fmt: skip
    transformers.Trainer(model=model(), args=arguments, train_dataset=rows(16), data_collator=collate).train()
    return str(out / "checkpoint-2")


def resumed(tmp_path: Path, checkpoint: str, **changes: Any) -> Path:
    made = trainer(tmp_path, max_steps=8, **{**SAVED, **changes})
    return import_trainer_checkpoint(Path(checkpoint), made.model, decayed_parameters(made), optimizer_options(made))


def test_the_same_options_continue_also_for_more_steps(tmp_path: Path, checkpoint: str) -> None:
    assert resumed(tmp_path, checkpoint).is_dir()


def test_arguments_that_have_changed_are_named_as_by_transformers(tmp_path: Path, checkpoint: str) -> None:
    made = trainer(tmp_path, max_steps=8, **SAVED, save_steps=3)
    with receiving(lambda reached: reached):
        made.train(resume_from_checkpoint=checkpoint)
    with CaptureLogger(logging.get_logger("transformers.trainer_utils")) as log:
        assert Path(str(made.resume(made.job()))).name.startswith("step-")
    assert "save_steps: 3 (from args) != 2 (from trainer_state.json)" in log.out


def test_a_checkpoint_may_be_named_by_a_path(tmp_path: Path, checkpoint: str) -> None:
    made = trainer(tmp_path, max_steps=8, **SAVED)
    with receiving(lambda reached: reached):
        made.train(resume_from_checkpoint=Path(checkpoint))
    assert Path(str(made.resume(made.job()))).name.startswith("step-")


def test_true_is_the_newest_of_transformers_in_output_dir_or_else_of_the_run(tmp_path: Path, checkpoint: str) -> None:
    made = trainer(tmp_path, max_steps=8, **SAVED)
    with receiving(lambda reached: reached):
        made.train(resume_from_checkpoint=True)
    assert made.resume(made.job()) is True
    shutil.copytree(checkpoint, Path(made.args.output_dir) / "checkpoint-2")
    assert Path(str(made.resume(made.job()))).parent == Path(made.args.output_dir) / "checkpoint-2" / "oobleck"


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("learning_rate", 1e-3, "lr = 0.01, and this script has 0.001"),
        ("weight_decay", 0.0, "weight_decay = 0.1, and this script has 0.0"),
        ("adam_beta2", 0.999, r"betas = \(0.9, 0.95\), and this script has \(0.9, 0.999\)"),
    ],
)
def test_an_option_that_transformers_would_take_from_the_checkpoint_is_named(
    tmp_path: Path, checkpoint: str, option: str, value: float, name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.pt: it was saved with {name}"):
        resumed(tmp_path, checkpoint, **{option: value})
