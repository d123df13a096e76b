"""Rows to fine-tune on: what of them is predicted, and how they share samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.data.data import Dataset, prepare_dataset
from oobleck.training.data.samples import ModelInputs

LENGTH = 64
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last or message.role == 'user' %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes only the last answer."""
TALK: Sequence[Mapping[str, str]] = (
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Three is three."},
)
GPT = ModelInputs(names=frozenset({"attention_mask", "position_ids"}), separates_documents=lambda: True)
LABELS = ModelInputs(
    task="sequence_classification", names=frozenset({"attention_mask", "token_type_ids"}), num_labels=2
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that begins texts with a token of its own, in a directory with a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([each["content"] for each in TALK] * 3, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    saved.save_pretrained(tmp_path_factory.mktemp("tokenizer"))
    return saved


@pytest.fixture
def open_rows(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Any:
    def open_(
        rows: Sequence[object], *, template: str | None = None, inputs: ModelInputs = GPT, **data: Any
    ) -> Dataset:
        directory = tmp_path / "tokenizer"
        tokenizer.save_pretrained(directory)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        spec = DataSpec(paths=(str(path),), tokenizer=str(directory), **{"sequence_length": LENGTH, **data})
        return prepare_dataset(spec, cache_dir=tmp_path / "cache").with_inputs(inputs)

    return open_


def predicted(dataset: Dataset, tokenizer: PreTrainedTokenizerFast, index: int = 0) -> str:
    labels = dataset.batch([index]).labels[0]
    return tokenizer.decode(labels[labels != -100])


def test_of_conversations_what_the_assistant_says_is_predicted(
    open_rows: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    """As transformers itself says, of a template that marks it."""
    dataset = open_rows([{"messages": TALK}], format="messages")
    told = tokenizer.apply_chat_template(list(TALK), tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    batch, count = dataset.batch([0]), len(told["input_ids"])
    assert batch.input_ids[0, :count].tolist() == told["input_ids"]
    assert (batch.labels[0, :count] != -100).long().tolist() == told["assistant_masks"]
    assert predicted(dataset, tokenizer) == "It is four.</s>Three is three.</s>"
    assert batch.others["attention_mask"][0].tolist() == [1] * count + [0] * (LENGTH - count)


def test_of_prompts_the_completion_and_its_end_are_predicted(
    open_rows: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = open_rows([{"prompt": "And three?", "completion": " Three is three."}], format="prompts")
    assert predicted(dataset, tokenizer) == " Three is three.</s>"
    whole = tokenizer("And three? Three is three.")["input_ids"]
    assert whole[0] == tokenizer.bos_token_id
    assert dataset.batch([0]).input_ids[0, : len(whole)].tolist() == whole
    assert dataset.vocab_size == len(tokenizer)


def test_rows_that_fit_share_a_sample_and_are_documents_in_it(
    open_rows: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": "a" * number, "completion": "b"} for number in (3, 30, 20, 25, 2)]
    alone = open_rows(rows, format="prompts")
    lengths = [int((alone.batch([index]).labels[0] != -100).nonzero()[-1]) + 1 for index in range(5)]
    packed = open_rows(rows, format="prompts", packing=True)
    assert packed.num_samples < 5
    found = [packed.batch([index]) for index in range(packed.num_samples)]
    positions = [int(place) for batch in found for place in batch.others["position_ids"][0]]
    assert positions[: sum(lengths[:2])] == [*range(lengths[0]), *range(lengths[1])]
    assert sum(batch.num_items for batch in found) == 5 * 2, "of each row the completion and the end"
    assert "attention_mask" not in found[0].others
    assert packed.digest != alone.digest


def test_a_text_has_a_label(open_rows: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"text": "It is four.", "label": 1}, {"text": "And three?", "label": 0}]
    dataset = open_rows(rows, format="labels", inputs=LABELS)
    batch = dataset.batch([0, 1])
    assert batch.labels.tolist() == [1, 0]
    ids = tokenizer("It is four.")["input_ids"]
    assert batch.input_ids[0, : len(ids)].tolist() == ids


def test_rows_may_be_samples_already(open_rows: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `test` installs it")
    datasets.disable_progress_bars()
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(str(saved))
    of_lines = open_rows(rows, format="samples", sequence_length=4, vocab_size=300)
    spec = DataSpec(dataset_path=str(saved), format="samples", sequence_length=4, vocab_size=300)
    for dataset in (of_lines, prepare_dataset(spec, cache_dir=tmp_path).with_inputs(GPT)):
        batch = dataset.batch([1, 0])
        assert batch.input_ids.tolist() == [[8, 0, 0, 0], [5, 6, 7, 0]]
        assert batch.labels.tolist() == [[8, -100, -100, -100], [-100, 6, 7, -100]]
    with pytest.raises(ConfigError, match=r"^data\.dataset_path: .* does not exist"):
        prepare_dataset(DataSpec(dataset_path="./none", format="samples"), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"data\.paths: sample 0: its column 'text' is used by nothing"):
        open_rows([{"input_ids": [5], "text": "a"}], format="samples", sequence_length=4, vocab_size=300)


def test_long_rows_are_cut(open_rows: Any) -> None:
    dataset = open_rows([{"messages": TALK}], format="messages", sequence_length=20)
    assert dataset.batch([0]).input_ids.shape == (1, 20)


@pytest.mark.parametrize(
    ("row", "data", "words"),
    [
        ({"prompt": "a"}, {"format": "prompts"}, r"rows\.jsonl:2: it has no 'completion'"),
        (
            {"messages": TALK, "tools": []},
            {"format": "messages"},
            r"rows\.jsonl:2: its column 'tools' is used by nothing",
        ),
        ({"messages": TALK[:1]}, {"format": "messages"}, r"rows\.jsonl:2: no message is the assistant's"),
        ({"messages": ["a"]}, {"format": "messages"}, r"rows\.jsonl:2: "),
        ({"text": "a", "label": 1}, {"format": "labels"}, r"labels is for sequence_classification, .* causal_lm"),
        ({"messages": TALK}, {"format": "messages", "template": FORGETFUL}, r"in another way once others follow"),
        ({"messages": TALK}, {"format": "messages", "inputs": LABELS}, r"messages is for causal_lm"),
    ],
)
def test_rows_that_do_not_fit_are_named(open_rows: Any, row: Any, data: dict[str, Any], words: str) -> None:
    good = {
        "prompts": {"prompt": "a", "completion": "b"},
        "messages": {"messages": TALK[:2]},
        "labels": {"text": "a", "label": 0},
    }[data["format"]]
    with pytest.raises(ConfigError, match=words):
        open_rows([good, row], **data)


def test_formats_need_a_tokenizer_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: name one"):
        prepare_dataset(DataSpec(paths=(str(tmp_path / "a.jsonl"),), format="messages"), cache_dir=tmp_path)
    for data, words in (
        ({"format": "messages"}, r"data\.format"),
        ({"packing": True}, r"data\.packing"),
        ({"packing": True, "format": "labels", "paths": ("a",)}, r"data\.packing"),
    ):
        with pytest.raises(ConfigError, match=words):
            DataSpec(**data)
