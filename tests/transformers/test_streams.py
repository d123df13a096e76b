"""Datasets without numbers: each step has the samples that it has in transformers' own loop, wherever it is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.transformers import Trainer
from oobleck.transformers.streams import NumberedStream

from .test_epochs import Noting
from .trainers import rows, trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:'pin_memory' argument:UserWarning")


class Stream(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    """Rows in an order that follows from the epoch."""

    def __init__(self, count: int = 11) -> None:
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        found = [{name: [5, *row[1:4], 4][:4] for name, row in each.items()} for each in rows(self.count)]
        for number, row in enumerate(found):
            row["input_ids"] = [5 + number, 3, 3, 3]
        yield from random.Random(self.epoch).sample(found, self.count)


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


def job(tmp_path: Path, stream: Any, **values: Any) -> Any:
    return trainer(tmp_path, kind=Trainer, train_dataset=stream, **values).job()


@pytest.mark.parametrize(
    ("stream", "values"),
    [
        (Stream, {"max_steps": 9, "per_device_train_batch_size": 2}),
        (Sized, {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}),
    ],
)
def test_steps_have_the_samples_of_transformers_loop(tmp_path: Path, stream: Any, values: dict[str, Any]) -> None:
    theirs = trainer(tmp_path, kind=Noting, train_dataset=stream(), save_strategy="no", **values)
    theirs.train()
    made = job(tmp_path, stream(), **values)
    order, (samples, _, _) = made.made["order"](), made.made["data"]()

    def rows_of(step: int) -> list[int]:
        return [samples[number]["input_ids"][0] - 5 for number in order(step)]

    steps = range(1, len(theirs.taken) + 1)
    assert [rows_of(step) for step in steps] == theirs.taken
    assert [made.epochs.progress(step) for step in steps][:-1] == pytest.approx(theirs.progress[1:])
    assert made.epochs.num_epochs(made.max_steps) == theirs.state.num_train_epochs
    # A worker that comes later, or goes back, reads the same.
    late = job(tmp_path, stream(), **values)
    order, (samples, _, _) = late.made["order"](), late.made["data"]()
    assert rows_of(len(steps)) == theirs.taken[-1]
    assert rows_of(1) == theirs.taken[0]
    made.check()


def test_samples_that_were_dropped_are_read_again(tmp_path: Path) -> None:
    made = job(tmp_path, Stream(300), max_steps=400, per_device_train_batch_size=2)
    order, (samples, _, _) = made.made["order"](), made.made["data"]()
    first = [samples[number] for number in order(1)]
    samples.num_kept = 10
    order(160)
    assert [samples[number] for number in order(1)] == first
    assert order.epoch_of(151) == (1, 0)


def test_a_stream_that_yields_others_each_time_is_refused_by_name(tmp_path: Path) -> None:
    class Drawn(Stream):
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            for row in super().__iter__():
                yield {**row, "input_ids": [int(torch.randint(3, 200, ())), 3, 3, 3]}

    with pytest.raises(ConfigError, match="Drawn yields other samples each time"):
        job(tmp_path, Drawn(), max_steps=3).check()


def test_lengths_epochs_and_readers_that_cannot_be_known_are_refused_by_name(tmp_path: Path) -> None:
    class Ragged(Stream):
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            yield from rows(9)

    with pytest.raises(ConfigError, match="have 1 to 8 tokens, and a model that is cut needs to know the longest"):
        job(tmp_path, Ragged(), max_steps=3).check()
    with pytest.raises(ConfigError, match=r"save_strategy='epoch'\): the stream of train_dataset has no length"):
        job(tmp_path, Stream(), max_steps=3, save_strategy="epoch")
    with pytest.raises(ConfigError, match=r"dataloader_num_workers=2\): each would iterate"):
        job(tmp_path, Stream(), max_steps=3, dataloader_num_workers=2)


def test_a_stream_without_samples_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no samples"):
        NumberedStream(
            trainer(tmp_path, train_dataset=Stream(0), max_steps=3).get_train_dataloader(), samples_per_step=1
        )
