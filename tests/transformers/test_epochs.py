"""Steps are counted, and samples ordered, as transformers' own loop does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import BatchSampler, DataLoader, Sampler, WeightedRandomSampler

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
    if name == "of its own":
        sampler = SAMPLERS[name](12)
        assert [first, second, third] == [tuple(sampler) for _ in range(3)], "its generator goes on as in the script"
        assert others == [first, second]
    else:
        assert others[1] != second


def loader_of(**values: Any) -> Any:
    """A trainer's class that makes a loader of the script's own."""

    class Loading:
        def get_train_dataloader(self: Any) -> Any:
            values.setdefault("collate_fn", self.data_collator)
            return DataLoader(self.train_dataset, **values)

    return Loading


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"batch_size": 3},
        lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(3)},
        lambda: {"batch_size": 3, "drop_last": True, "sampler": range(10, -1, -1)},
        lambda: {"batch_sampler": BatchSampler(range(1, 9), 3, drop_last=False)},
        lambda: {"batch_sampler": BatchSampler(SAMPLERS["of its own"](11), 4, drop_last=True)},
    ],
)
def test_a_loader_of_the_scripts_own_is_read_as_transformers_reads_it(tmp_path: Path, make: Any):
    values = {"count": 11, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    theirs = trainer(tmp_path, kind=type("Theirs", (loader_of(**make()), Noting), {}), **values, save_strategy="no")
    theirs.train()
    job = trainer(tmp_path, kind=type("Ours", (loader_of(**make()), Trainer), {}), **values).job()
    job.check()
    order = job.made["order"]()
    assert [list(order(step)) for step in range(1, job.max_steps + 1)] == theirs.taken
    assert list(order(2)) == theirs.taken[1], "a step that is run again"
    size = 4 if "batch_sampler" in make() and make()["batch_sampler"].drop_last else 3
    assert job.settings["global_batch_size"] == 2 * size


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda data: [[data[0]], [data[1]]], "list, which is no DataLoader"),
        (lambda data: DataLoader(data, batch_size=None), "which makes no batches"),
        (lambda data: DataLoader(data, batch_sampler=[[0, 1], [2]]), "whose list has no batch_size"),
        (
            lambda data: type("Twice", (DataLoader,), {"__iter__": lambda self: iter(())})(data),
            "an __iter__ of its own",
        ),
    ],
)
def test_a_loader_that_does_more_than_its_parts_is_refused_by_name(tmp_path: Path, loader: Any, words: str):
    kind = type("Own", (Trainer,), {"get_train_dataloader": lambda self: loader(self.train_dataset)})
    with pytest.raises(ConfigError, match=f"Trainer.get_train_dataloader returns .*{words}"):
        trainer(tmp_path, kind=kind).job()


def test_a_sampler_may_draw_smaller_batches_than_it_says_and_no_larger_ones(tmp_path: Path):
    class Uneven(torch.utils.data.Sampler):
        batch_size = 3

        def __init__(self, sizes: Sequence[int]) -> None:
            self.sizes = sizes

        def __len__(self) -> int:
            return len(self.sizes)

        def __iter__(self) -> Iterator[list[int]]:
            ends = list(itertools.accumulate(self.sizes))
            return iter([list(range(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)])

    def made(*sizes: int) -> Any:
        kind = type("Ours", (loader_of(batch_sampler=Uneven(sizes)), Trainer), {})
        return trainer(tmp_path, kind=kind, max_steps=4).job()

    order = made(3, 1, 2).made["order"]()
    assert [order(step) for step in range(1, 5)] == [(0, 1, 2), (3,), (4, 5), (0, 1, 2)]
    with pytest.raises(ConfigError, match="Uneven draws a batch of 4 samples, and its batch_size is 3; have its batch"):
        made(3, 4, 2).check()


def test_a_sampler_whose_order_depends_on_what_it_did_before_is_refused(tmp_path: Path):
    counter = itertools.count()

    class Counting(Drawing):
        def __iter__(self) -> Iterator[int]:
            turn = next(counter) % len(self)
            return iter([*range(turn, len(self)), *range(turn)])

    made = trainer(tmp_path, kind=sampled(Counting))
    with pytest.raises(ConfigError, match="the sampler Counting gives another order each time"):
        made.job().check()
