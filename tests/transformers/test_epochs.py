"""Steps are counted, and samples ordered, as transformers' own loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from oobleck.transformers.epochs import EpochOrder, Epochs

from .trainers import trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:'pin_memory' argument:UserWarning")


class Noting(transformers.Trainer):
    """transformers' own, noting which rows each step takes, and how far it has come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken: list[list[int]] = []
        self.progress: list[float] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if len(self.taken) == self.state.global_step:
            self.taken.append([])
            self.progress.append(float(self.state.epoch or 0))
        self.taken[-1] += [int(first) - 5 for first in inputs["input_ids"][:, 0]]
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(
    "values",
    [
        {"count": 11, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3},
        {"count": 12, "per_device_train_batch_size": 4, "num_train_epochs": 1.5, "data_seed": 9},
        {"count": 11, "per_device_train_batch_size": 3, "dataloader_drop_last": True, "max_steps": 7, "seed": 3},
        {"count": 9, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4,
         "train_sampling_strategy": "sequential"},
    ],
)  # fmt: skip
def test_each_step_takes_the_samples_that_transformers_takes(tmp_path: Path, values: dict[str, Any]):
    theirs = trainer(tmp_path, kind=Noting, **values, save_strategy="no")
    theirs.train()
    job = trainer(tmp_path, **values).job()
    order = job.made["order"]()
    assert job.max_steps == len(theirs.taken)
    taken = [list(order(step)) for step in range(1, job.max_steps + 1)]
    assert taken == theirs.taken
    assert [list(order(step)) for step in (job.max_steps, 1)] == [taken[-1], taken[0]], "whatever came before"
    progress = [0.0, *(job.epochs.progress(step) for step in range(1, job.max_steps))]
    assert progress == pytest.approx(theirs.progress)


def test_a_step_of_no_epoch_has_its_number_in_it():
    epochs = Epochs(num_batches=7, batches_per_step=3)
    assert epochs.num_steps == 3
    assert [epochs.epoch_of(step) for step in (1, 3, 4)] == [(0, 0), (0, 2), (1, 0)]
    assert epochs.progress(3) == 1.0
    assert epochs.max_steps(max_steps=-1, num_epochs=0.5) == 2


def test_batches_of_any_lengths_are_those_of_the_loader():
    class Loader:
        batch_sampler = ([4, 1], [0], [2, 3])

        def set_epoch(self, epoch: int) -> None:
            pass

    order = EpochOrder(Loader(), Epochs(num_batches=3, batches_per_step=2))
    assert [order(step) for step in (1, 2, 3)] == [(4, 1, 0), (2, 3), (4, 1, 0)]
