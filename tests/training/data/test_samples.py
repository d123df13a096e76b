"""What a sample may bring, what becomes of it in a batch, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.training.data.batches import Batch
from oobleck.training.data.data import Dataset
from oobleck.training.data.samples import ModelInputs
from oobleck.training.data.script_data import ScriptSamples

LENGTH = 6
ALL = frozenset({"attention_mask", "position_ids", "token_type_ids"})
GPT = ModelInputs(names=ALL, pad_id=9, separates_documents=lambda: True)
BERT = ModelInputs(task="masked_lm", names=ALL, pad_id=9)
TAGS = ModelInputs(task="token_classification", names=ALL, pad_id=9, num_labels=3)
LABEL = ModelInputs(task="sequence_classification", names=ALL, pad_id=9, num_labels=3)
PLAIN = ModelInputs()


def dataset(samples: Sequence[Any], inputs: ModelInputs) -> Dataset:
    return Dataset(ScriptSamples(lambda: samples, sequence_length=LENGTH, vocab_size=10)).with_inputs(inputs)


def batch(samples: Sequence[Any], inputs: ModelInputs) -> Batch:
    return dataset(samples, inputs).batch(range(len(samples)))


def others(made: Batch) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in made.others.items()}


def test_labels_are_those_that_a_sample_brings():
    made = batch([{"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100, -100, -100, 4, 5, -100]}], GPT)
    assert made.labels.tolist() == [[-100, -100, -100, 4, 5, -100]]
    assert made.num_items == 2
    assert others(made) == {}


def test_padding_is_hidden_and_predicts_nothing():
    made = batch([{"input_ids": [1, 2, 3]}, list(range(6))], GPT)
    assert made.input_ids.tolist() == [[1, 2, 3, 9, 9, 9], [0, 1, 2, 3, 4, 5]]
    assert made.labels.tolist() == [[1, 2, 3, -100, -100, -100], [0, 1, 2, 3, 4, 5]]
    assert others(made) == {"attention_mask": [[1, 1, 1, 0, 0, 0], [1] * 6]}
    assert made.num_items == 2 + 5


class Drawn:
    """Samples that are drawn when they are asked for, from all that there is to draw from."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[int]:
        if index >= 3:
            raise IndexError(index)
        return [random.randrange(10), int(np.random.randint(10)), *torch.randint(10, (4,)).tolist()]


def test_samples_that_are_drawn_follow_from_seed_step_and_number():
    def drawn(seed: int, step: int, number: int) -> list[list[int]]:
        torch.rand(number + 1)
        random.random()
        source = ScriptSamples(Drawn, sequence_length=LENGTH, vocab_size=10, seed=seed)
        made: list[list[int]] = Dataset(source).with_inputs(GPT).batch([2, number], step=step).input_ids.tolist()
        return made

    first = drawn(0, 1, 1)
    assert drawn(0, 1, 1) == first, "on each worker, whatever it has drawn before"
    assert drawn(0, 1, 0)[0] == first[0], "whatever is beside it"
    assert first not in (drawn(0, 2, 1), drawn(1, 1, 1))


def test_a_mask_says_itself_what_is_padding():
    made = batch([{"input_ids": [9, 9, 1, 2, 3, 4], "attention_mask": [0, 0, 1, 1, 1, 1]}], GPT)
    assert made.labels.tolist() == [[-100, -100, 1, 2, 3, 4]]
    assert others(made) == {"attention_mask": [[0, 0, 1, 1, 1, 1]]}


def test_a_mask_that_hides_nothing_is_left_out():
    assert others(batch([{"input_ids": [1] * 6, "attention_mask": [1] * 6}], GPT)) == {}


def test_padding_of_documents_in_one_sample_is_a_document_of_its_own():
    made = batch([{"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 0, 1]}, {"input_ids": [5, 6]}], GPT)
    assert others(made) == {"position_ids": [[0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3]]}
    assert made.labels.tolist() == [[1, 2, -100, 4, -100, -100], [5, 6, -100, -100, -100, -100]]


def test_labels_of_documents_are_as_they_are_brought():
    labels = [-100, 2, 3, 4, -100, -100]
    made = batch([{"input_ids": [1] * 6, "position_ids": [0, 1, 2, 0, 1, 2], "labels": labels}], GPT)
    assert made.labels.tolist() == [labels]


def test_columns_that_some_samples_lack_say_nothing_there():
    made = batch([{"input_ids": [1] * 6, "token_type_ids": [0, 0, 0, 1, 1, 1]}, [2] * 6], GPT)
    assert others(made) == {"token_type_ids": [[0, 0, 0, 1, 1, 1], [0] * 6]}


def test_masks_of_two_dimensions_are_passed_on():
    """They say themselves what sees what, of documents too."""
    mask = np.tril(np.ones((1, LENGTH, LENGTH), dtype=bool))
    sample = {"input_ids": [1] * 6, "attention_mask": mask, "position_ids": [0, 1, 2, 0, 1, 2]}
    made = batch([sample] * 2, GPT)
    assert made.others["attention_mask"].shape == (2, 1, LENGTH, LENGTH)
    assert made.others["attention_mask"].numpy().dtype == bool


def test_labels_of_samples_and_of_tokens_are_classified():
    made = batch([{"input_ids": [1, 2], "label": 2}, {"input_ids": [1] * 6, "labels": -100}], LABEL)
    assert made.labels.tolist() == [2, -100]
    assert made.num_items == 1
    made = batch([{"input_ids": [1, 2], "labels": [2, -100]}], TAGS)
    assert made.labels.tolist() == [[2, -100, -100, -100, -100, -100]]
    assert made.num_items == 1


def test_masked_tokens_are_those_that_a_sample_says_or_some_that_are_no_padding():
    whole = dataset([{"input_ids": [1, 2, 3, 4]}], BERT).with_masking(probability=0.5, seed=0)
    for step in range(20):
        made = whole.batch([0], step=step)
        assert (made.labels[0, :4] != -100).sum() == made.num_items == 2
        assert made.input_ids[0, 4:].tolist() == [9, 9]
        assert others(made) == {"attention_mask": [[1, 1, 1, 1, 0, 0]]}
    hiding = dataset([{"input_ids": [1, 2, 3, 4], "attention_mask": [0, 0, 1, 1]}], BERT)
    assert hiding.with_masking(probability=1.0, seed=0).batch([0]).labels.tolist() == [[-100] * 2 + [3, 4] + [-100] * 2]
    labels = [-100, 5, -100, -100, -100, -100]
    said = dataset([{"input_ids": [1] * 6, "labels": labels}], BERT).with_masking(probability=0.5, seed=0)
    assert said.batch([0]).labels.tolist() == [labels]
    mixed = dataset([{"input_ids": [1] * 6, "labels": labels}, [1] * 6], BERT).with_masking(probability=0.5, seed=0)
    with pytest.raises(ConfigError, match=r"some samples have labels, and some have none"):
        mixed.batch([0, 1])


def test_columns_that_nothing_takes_and_that_say_nothing_are_no_concern():
    sample = {
        "input_ids": [1, 2],
        "attention_mask": [1, 1],
        "token_type_ids": [0, 0],
        "position_ids": [0, 1],
        "id": None,
    }
    assert others(batch([{**sample, "input_ids": [1] * 2}], ModelInputs(names=frozenset({"attention_mask"})))) == {
        "attention_mask": [[1, 1, 0, 0, 0, 0]]
    }


@pytest.mark.parametrize(
    ("sample", "inputs", "words"),
    [
        ({"labels": [1, 2]}, GPT, r"'labels' is int64 of the shape \(2,\); it must be a whole number for each token"),
        ({"labels": [1, 2, 3, 4, 5, 10]}, GPT, r"'labels' has the label 10, and data\.vocab_size is 10"),
        ({"labels": [1] * 6}, LABEL, r"'labels' is .*; it must be one whole number"),
        ({"label": 3}, LABEL, r"'label' has the label 3, and model\.config\.num_labels is 3"),
        ({"label": 0.5}, LABEL, r"'label' is float64 .*; it must be one whole number"),
        ({}, LABEL, r"it has no labels, which classification needs"),
        ({"label": 1}, GPT, r"its column 'label' is used by nothing"),
        (
            {"text": "one"},
            GPT,
            r"its column 'text' is used by nothing: .* takes attention_mask, position_ids",
        ),
        ({"attention_mask": [1, 1, 1, 1, 1, 0]}, PLAIN, r"its column 'attention_mask' is used by nothing: .* nothing"),
        ({"token_type_ids": [0, 0, 0, 1, 1, 1]}, PLAIN, r"its column 'token_type_ids'"),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, PLAIN, r"its column 'position_ids'"),
        ({"position_ids": [0, 1, 2, 0, 1, 2]}, BERT, r"this model would not keep them apart"),
        ({"position_ids": [0, 1, 2, 0, 1, 2], "attention_mask": [1] * 6}, GPT, r"the documents would see each other"),
        ({"labels": [1] * 6, "label_ids": [1] * 6}, GPT, r"its column 'label_ids' is not the only one with labels"),
        (
            {"input_ids": [1] * 5, "attention_mask": [[1] * 5] * 5},
            GPT,
            r"has the shape \(5, 5\); with it",
        ),
        ({"attention_mask": ["a"] * 6}, GPT, r"its column 'attention_mask' is <U1; the model takes numbers"),
        ({"input_ids": [1] * 7}, GPT, r"of the shape \(7,\); it must be whole numbers, .* = 6 of them at most"),
        ({"input_ids": []}, GPT, r"of the shape \(0,\)"),
        ({"input_ids": [1, 10]}, GPT, r"has the token 10, and data\.vocab_size is 10"),
        ({"input_ids": [1, -1]}, GPT, r"has the token -1"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(sample: dict[str, Any], inputs: ModelInputs, words: str):
    whole: list[Any] = [[1] * 6 if inputs.num_labels is None else {"input_ids": [1] * 6, "label": 0}] * 63
    with pytest.raises(ConfigError, match=rf"the script's data: sample 63: .*{words}"):
        dataset([*whole, {"input_ids": [1] * 6, **sample}], inputs)


@pytest.mark.parametrize(
    ("samples", "inputs", "words"),
    [
        ([[1, 2]], PLAIN, r"the model takes no attention_mask that could hide padding"),
        ([{"input_ids": [1], "label": 0}], replace(LABEL, pad_id=None), r"set model\.config\.pad_token_id"),
    ],
)
def test_padding_that_would_be_seen_is_refused(samples: list[Any], inputs: ModelInputs, words: str):
    with pytest.raises(ConfigError, match=words):
        batch(samples, inputs)


def test_documents_beside_padding_of_another_sample_are_refused():
    """Its mask would have transformers overlook where documents begin."""
    packed, masked = {"position_ids": [0, 1, 2, 0, 1, 2]}, {"attention_mask": [0, 1, 1, 1, 1, 1]}
    samples = [{"input_ids": [1] * 6, **columns} for columns in (packed, masked)]
    with pytest.raises(ConfigError, match=r"the documents would see each other"):
        batch(samples, GPT)


def test_the_digest_depends_on_every_column():
    def digest(**columns: Any) -> str:
        samples = [{"input_ids": [1] * 6, **columns}]
        return ScriptSamples(lambda: samples, sequence_length=LENGTH, vocab_size=10).digest

    assert len({digest(), digest(labels=[1] * 6), digest(labels=[2] * 6), digest(attention_mask=[1] * 6)}) == 4
