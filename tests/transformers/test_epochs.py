"""Steps are counted, and samples ordered, as transformers' own loop does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import Sampler, WeightedRandomSampler

from oobleck.errors import ConfigError
from oobleck.transformers import Trainer
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

    order = EpochOrder(Loader(), Epochs(num_batches=3, batches_per_step=2), seed=0)
    assert [order(step) for step in (1, 2, 3)] == [(4, 1, 0), (2, 3), (4, 1, 0)]


class Drawing(Sampler[int]):
    """Draws from all that there is to draw from."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own = torch.Generator()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self._size, generator=self._own).tolist()
        random.shuffle(order)
        np.random.shuffle(order)
        return iter([order[number] for number in torch.randperm(self._size)])


SAMPLERS = {
    "weighted": lambda size: WeightedRandomSampler([1.0 + n % 5 for n in range(size)], num_samples=size),
    "of its own": lambda size: WeightedRandomSampler([1.0] * size, size, generator=torch.Generator().manual_seed(3)),
    "from all": Drawing,
}


def sampled(make: Any) -> type[Trainer]:
    class Sampled(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return make(len(self.train_dataset))

    return Sampled


def orders(directory: Path, kind: Any, epochs: tuple[int, ...], **values: Any) -> list[tuple[int, ...]]:
    """The order of some epochs, as a worker has it that has done who knows what before."""
    made = trainer(directory, kind=kind, count=12, per_device_train_batch_size=12, num_train_epochs=4, **values)
    order = made.job().made["order"]()
    found = []
    for epoch in epochs:
        torch.rand(epoch + len(found))
        random.random()
        found.append(order(1 + epoch))
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_draws_gives_all_workers_one_order_for_each_epoch(tmp_path: Path, name: str):
    kind = sampled(SAMPLERS[name])
    first, second, third = orders(tmp_path, kind, (0, 1, 2))
    torch.rand(5)
    np.random.rand(7)
    assert orders(tmp_path, kind, (2, 0, 2)) == [third, first, third], "a newcomer, and a step that is run again"
    assert len({first, second, third}) == 3
    others = orders(tmp_path, kind, (0, 1), seed=8)
    assert others[1] != second
    if name == "of its own":
        assert others[0] == first == tuple(SAMPLERS[name](12)), "the first epoch begins as the script has it"


def test_a_sampler_whose_order_depends_on_what_it_did_before_is_refused(tmp_path: Path):
    counter = itertools.count()

    class Counting(Drawing):
        def __iter__(self) -> Iterator[int]:
            turn = next(counter) % len(self)
            return iter([*range(turn, len(self)), *range(turn)])

    made = trainer(tmp_path, kind=sampled(Counting))
    with pytest.raises(ConfigError, match="the sampler Counting gives another order each time"):
        made.job().check()
