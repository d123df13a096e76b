"""What a dataset and a collator return is the same however often it is asked for, and beside whatever."""

from __future__ import annotations

import functools
import random
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, ModelInputs, ScriptSamples, try_collator

ROWS = [[5, 4], [6, 7, 8], [9, 10], [11, 12, 13, 14], [15, 16], [17]]


def padded(rows: list[list[int]], *, left: bool = False, label: int = IGNORED_LABEL) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))

    def filled(row: list[int], value: int) -> list[int]:
        missing = [value] * (longest - len(row))
        return [*missing, *row] if left else [*row, *missing]

    return {
        "input_ids": torch.tensor([filled(row, 0) for row in rows]),
        "labels": torch.tensor([filled(row, label) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row), 0) for row in rows]),
    }


def padded_on_the_left(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return padded(rows, left=True)


def to_multiples(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = padded([*rows, [0] * 8])
    return {name: value[:-1] for name, value in batch.items()}


def classified(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return {**padded(rows), "labels": torch.tensor([row[0] % 2 for row in rows])}


def masking(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    drawn = torch.rand(batch["labels"].shape) + random.random() + np.random.rand()
    return {**batch, "labels": batch["labels"].masked_fill(drawn < 1.5, IGNORED_LABEL)}


def each_cut_at_random(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return padded([row[: random.randint(1, 3)] for row in rows])


class Counting:
    calls = 0

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        self.calls += 1
        return padded(rows)


class MaskingMoreAndMore(Counting):
    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        return {**batch, "labels": batch["labels"].masked_fill(batch["input_ids"] < self.calls, IGNORED_LABEL)}


class Remembering:
    last = 0

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        batch = padded(rows)
        batch["labels"][0, 0], self.last = self.last, rows[-1][-1]
        return batch


class DrawingByItself:
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        return padded([[self.generator.randrange(99) for _ in row] for row in rows])


def ranked(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    batch["labels"][:, 0] = torch.tensor([sorted(map(len, rows)).index(len(row)) for row in rows])
    return batch


def of_the_neighbour(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return {**padded(rows), "input_ids": padded(rows)["input_ids"].roll(1, 0)}


def with_labels_of_padding(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return padded(rows, label=0)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")


@pytest.mark.parametrize(
    "collate", [padded, padded_on_the_left, to_multiples, classified, masking, each_cut_at_random, Counting()]
)
def test_collators_that_pad_or_draw_are_taken(collate: Any):
    try_collator(ROWS, collate, place="the data", batch_size=8)


@pytest.mark.parametrize("masks", [False, True])
def test_collators_of_transformers_are_taken(masks: bool):
    samples = [{"input_ids": row} for row in ROWS]
    try_collator(samples, DataCollatorForLanguageModeling(tokenizer(), mlm=masks), place="the data", batch_size=8)


def mixing_at_random(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    batch = padded(rows)
    ids = batch["input_ids"]
    return {**batch, "input_ids": torch.where(torch.rand(ids.shape) < 0.5, ids[torch.randperm(len(ids))], ids)}


def cut_to_the_shortest(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return padded([row[: min(map(len, rows))] for row in rows])


def all_cut_at_random(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    length = random.randint(1, 3)
    return padded([row[:length] for row in rows])


def dropping(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    return padded([row for row in rows if row[0] > 8] or rows[:1])


class MaskingLater(Counting):
    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(rows)
        return {**batch, "labels": batch["labels"].masked_fill(torch.tensor(self.calls > 500), IGNORED_LABEL)}


SEEN: list[int] = []


def flipping_later(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    SEEN.append(len(rows))
    return padded(rows, left=len(SEEN) > 500)


LATER = "data_collator returns other rows later, by "
AGAIN = "data_collator returns other rows when it is called again"
OTHERS = "data_collator makes another row of a sample when it has others next to it"


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (MaskingMoreAndMore(), AGAIN),
        (Remembering(), AGAIN),
        (DrawingByItself(), AGAIN),
        (MaskingLater(), rf"{LATER}data_collator\.calls, "),
        (flipping_later, f"{LATER}the global SEEN, "),
        (cut_to_the_shortest, OTHERS),
        (dropping, "data_collator makes 4 rows of 6 samples; it must keep one row for each sample"),
        (mixing_at_random, OTHERS),
        (all_cut_at_random, "data_collator draws random numbers for all rows of its batch at once"),
        (ranked, OTHERS),
        (of_the_neighbour, OTHERS),
        (with_labels_of_padding, OTHERS),
    ],
)
def test_a_collator_whose_rows_depend_on_more_than_their_samples_is_refused(collate: Any, words: str):
    with pytest.raises(ConfigError, match=f"^the data: {words}"):
        try_collator(ROWS, collate, place="the data", batch_size=8)


class ReadOnce(list[list[int]]):
    """Samples that are others from the second time on."""

    def __getitem__(self, number: Any) -> Any:
        sample = super().__getitem__(number)
        self[number] = [*sample, 3]
        return sample


class Shortened(list[list[int]]):
    """Draws as datasets may."""

    def __getitem__(self, number: Any) -> Any:
        return super().__getitem__(number)[: random.randint(1, 4)]


def test_a_dataset_that_depends_on_what_was_read_before_is_refused():
    with pytest.raises(ConfigError, match=r"^the data: sample 0 is another one when it is read again"):
        try_collator(ReadOnce(ROWS), padded, place="the data", batch_size=8)
    try_collator(Shortened(ROWS), padded, place="the data", batch_size=8)
    read = {"sequence_length": 9, "vocab_size": 300}
    with pytest.raises(ConfigError, match=r"^the script's data: some samples are others when they are read again"):
        ScriptSamples(lambda: ReadOnce(ROWS), **read).check(ModelInputs(names=frozenset({"attention_mask"})))
    ScriptSamples(lambda: Shortened(ROWS), **read).check(ModelInputs(names=frozenset({"attention_mask"})))


class ShortenedLater(list[list[int]]):
    calls = 0

    def __getitem__(self, number: Any) -> Any:
        self.calls += 1
        return super().__getitem__(number)[: 1 if self.calls > 500 else None]


def test_a_dataset_that_depends_on_how_often_it_was_read_is_refused():
    words = r"some samples are others later, by the dataset\.calls, which changes whenever they are read"
    with pytest.raises(ConfigError, match=rf"^the data: {words}"):
        try_collator(ShortenedLater(ROWS), padded, place="the data", batch_size=8)
    samples = ScriptSamples(lambda: ShortenedLater(ROWS), sequence_length=9, vocab_size=300)
    with pytest.raises(ConfigError, match=rf"^the script's data: {words}"):
        samples.check(ModelInputs(names=frozenset({"attention_mask"})))


def test_what_does_not_run_is_left_to_those_who_read_it():
    try_collator(ROWS, lambda rows: 1 / 0, place="the data", batch_size=8)


class ReadTogether(list[list[int]]):
    """Has torch's loader read the rows of a batch together, by a function of them."""

    def __init__(self, function: Any) -> None:
        super().__init__(ROWS)
        self.function = function

    def __getitems__(self, numbers: list[int]) -> Any:
        return self.function([self[number] for number in numbers])


def filled_up(rows: list[list[int]]) -> list[list[int]]:
    return [[*row, *[0] * (max(map(len, rows)) - len(row))] for row in rows]


def shifted_by_the_number_of_rows(rows: list[list[int]]) -> list[list[int]]:
    return [[token + len(rows) for token in row] for row in rows]


def all_shifted_at_random(rows: list[list[int]]) -> list[list[int]]:
    shift = random.randrange(50)
    return [[token + shift for token in row] for row in rows]


def each_shifted_at_random(rows: list[list[int]]) -> list[list[int]]:
    return [[token + random.randrange(50) for token in row] for row in rows]


def only_long(rows: list[list[int]]) -> list[list[int]]:
    return [row for row in rows if len(row) > 1] or rows


MIXED = "makes another row of a sample when it has others next to it"


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (ReadTogether(filled_up), rf"the dataset's ReadTogether.__getitems__ \(.*py:\d+\) {MIXED}"),
        (ReadTogether(shifted_by_the_number_of_rows), rf"the dataset's ReadTogether.__getitems__ .* {MIXED}"),
        (ReadTogether(all_shifted_at_random), r"the dataset's ReadTogether.__getitems__ .* draws random numbers"),
        (ReadTogether(only_long), r"the dataset's ReadTogether.__getitems__ .* makes 5 rows of 6 samples"),
    ],
)
def test_a_dataset_whose_samples_depend_on_what_is_read_with_them_is_refused(samples: Any, words: str):
    with pytest.raises(ConfigError, match=f"^the data: {words}"):
        try_collator(samples, padded, place="the data", batch_size=8)
    try_collator(samples, padded, place="the data", batch_size=1)


def test_the_collator_of_a_dataset_that_is_read_together_is_blamed_for_its_own_faults():
    with pytest.raises(ConfigError, match=f"^the data: data_collator {MIXED}"):
        try_collator(ReadTogether(list), ranked, place="the data", batch_size=8)


@pytest.mark.parametrize(
    ("samples", "collate"),
    [
        (ReadTogether(list), padded),
        (ReadTogether(each_shifted_at_random), padded),
        (ReadTogether(padded), dict),
        (torch.utils.data.Subset(ReadTogether(list), range(5)), padded),
    ],
)
def test_datasets_that_read_samples_together_are_taken(samples: Any, collate: Any):
    try_collator(samples, collate, place="the data", batch_size=8)


def test_a_transform_of_datasets_is_tried_on_batches():
    table = datasets.Dataset.from_list([{"ids": row} for row in ROWS])

    def padding(batch: dict[str, Any], *, label: int) -> dict[str, Any]:
        return {name: value.tolist() for name, value in padded(batch["ids"], label=label).items()}

    def collate(rows: list[Any]) -> Any:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    hidden = table.with_transform(functools.partial(padding, label=IGNORED_LABEL))
    try_collator(hidden, collate, place="the data", batch_size=8)
    trained = table.with_transform(functools.partial(padding, label=0))
    words = rf"the transform test_a_transform\S*padding \({__file__}:\d+\) {MIXED}"
    with pytest.raises(ConfigError, match=f"^the data: {words}"):
        try_collator(trained, collate, place="the data", batch_size=8)
    for form in (None, "torch", "numpy"):
        plain = table.with_format(form)
        try_collator(plain, lambda rows: padded([list(row["ids"]) for row in rows]), place="the data", batch_size=8)
