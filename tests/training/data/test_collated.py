"""Microbatches by a collator: the same on every worker, padded to one length, filled up where samples are missing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, NO_SAMPLE, CollatedSamples, Dataset, ModelInputs

LENGTH = 6
INPUTS = ModelInputs(names=frozenset({"attention_mask", "position_ids"}))


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, IGNORED_LABEL), "attention_mask": mask}


def dataset(rows: Any, by: Any = collate, **values: Any) -> Dataset:
    given = {"sequence_length": LENGTH, "vocab_size": 300, "seed": 3, "place": "the data", **values}
    return Dataset(CollatedSamples(rows, by, **given), inputs=INPUTS)


ROWS = [[5], [6, 7, 8], [9, 10], [11, 12, 13, 14]]


def test_rows_are_padded_to_one_length_and_their_padding_is_hidden():
    batch = dataset(ROWS).batch([1, 2])
    assert batch.input_ids.tolist() == [[6, 7, 8, 0, 0, 0], [9, 10, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[6, 7, 8, *[IGNORED_LABEL] * 3], [9, 10, *[IGNORED_LABEL] * 4]]
    assert batch.others["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert batch.num_items == 3, "the first of a row is predicted from nothing"


@pytest.mark.parametrize("numbers", [[3, NO_SAMPLE], [NO_SAMPLE, NO_SAMPLE]])
def test_nothing_counts_of_samples_that_are_none(numbers: list[int]):
    batch = dataset(ROWS).batch(numbers)
    assert batch.input_ids.shape == (2, LENGTH)
    assert batch.num_items == (3 if numbers[0] == 3 else 0)
    assert (batch.labels[1] == IGNORED_LABEL).all()


class TwoSteps:
    """An epoch of two steps, of which the second has one sample."""

    def __call__(self, step: int) -> tuple[int, ...]:
        return (3, 1) if step % 2 else (0,)

    def epoch_of(self, step: int) -> tuple[int, int]:
        return divmod(step - 1, 2)

    def first_step(self, epoch: int) -> int:
        return 1 + 2 * epoch

    def digest(self, epoch: int) -> str:
        return "310"


def test_a_step_takes_what_its_order_says_and_is_filled_up():
    ordered = Dataset(dataset(ROWS).source, order=TwoSteps())
    assert ordered.samples_of_step(0, 1, 2) == (3, 1)
    assert ordered.samples_of_step(0, 2, 2) == (0, NO_SAMPLE)
    assert ordered.fills_up


def masking(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Draws from all that collators draw from."""
    batch = collate(rows)
    drawn = torch.rand(1).item() + random.random() + np.random.rand()
    return {**batch, "labels": torch.full_like(batch["labels"], int(drawn * 90))}


def test_a_collator_that_draws_draws_the_same_everywhere():
    one, other = dataset(ROWS, masking), dataset(ROWS, masking)
    before = torch.rand(1).item()
    one.batch([2], step=1)
    torch.manual_seed(9)
    random.seed(9)
    assert one.batch([1, 2], step=4).labels.equal(other.batch([1, 2], step=4).labels)
    assert not one.batch([1, 2], step=5).labels.equal(other.batch([1, 2], step=4).labels)
    torch.manual_seed(9)
    after = torch.rand(1).item()
    torch.manual_seed(9)
    one.batch([1])
    assert torch.rand(1).item() == after != before, "others draw what they would draw without it"


@pytest.mark.parametrize(
    ("by", "problem"),
    [
        (lambda rows: {name: value[:1] for name, value in collate(rows).items()}, "one row for each sample"),
        (lambda rows: {"input_ids": collate(rows)["input_ids"]}, "returns no labels"),
        (lambda rows: {**collate(rows), "pixels": torch.ones(len(rows), 3)}, "'pixels' is used by nothing"),
        (lambda rows: 1 / 0, "ZeroDivisionError"),
        (lambda rows: {name: value.repeat(1, 9) for name, value in collate(rows).items()}, "data.sequence_length"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_samples(by: Any, problem: str):
    with pytest.raises(ConfigError, match=f"the data: samples .*{problem}"):
        dataset(ROWS, by).batch([1, 2])


def test_samples_are_looked_at_before_training():
    bad = [[5], [999]]
    with pytest.raises(ConfigError, match="token 999"):
        dataset(bad).with_inputs(INPUTS)
    with pytest.raises(ConfigError, match="no samples"):
        dataset([])


def test_equal_data_has_equal_digests():
    assert dataset(ROWS).digest == dataset([list(row) for row in ROWS]).digest
    assert dataset(ROWS).digest != dataset([*ROWS[:3], [11, 12, 13, 15]]).digest


class ReadTogether(list[list[int]]):
    def __getitems__(self, numbers: list[int]) -> list[list[int]]:
        return [[*self[number], 20 + len(numbers)] for number in numbers]


def test_a_microbatch_is_read_as_torch_reads_a_batch():
    batch = dataset(ReadTogether(ROWS)).batch([0, 2, NO_SAMPLE])
    assert batch.input_ids.tolist()[:2] == [[5, 22, 0, 0, 0, 0], [9, 10, 22, 0, 0, 0]]
    assert dataset(ReadTogether(ROWS)).digest != dataset(ROWS).digest
