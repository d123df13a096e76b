"""Padding that a sample receives because of longer ones next to it must not change what a model computes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import nn

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL, try_collator
from oobleck.training.model import LiveModel, ModelStructure
from oobleck.training.padding_trial import try_padding
from tests.training.zoo import SPECS, structure_of

pytestmark = pytest.mark.filterwarnings("ignore:.*attention_mask.*")

ROWS = [[5, 4, 9, 8], [6, 7, 8, 5, 3, 9, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17, 18, 19, 9], [15, 16, 8]]
SIZES = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"vocab_size": 97, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "pad_token_id": 0}
IDS = {"bos_token_id": 1, "eos_token_id": 2}


def collate(
    rows: list[list[int]],
    *,
    left: bool = False,
    pad: int = 0,
    length: int | None = None,
    columns: tuple[str, ...] = ("attention_mask",),
    classes: bool = False,
) -> dict[str, torch.Tensor]:
    longest = length or max(map(len, rows))

    def filled(row: list[int], value: int) -> list[int]:
        missing = [value] * (longest - len(row))
        return [*missing, *row] if left else [*row, *missing]

    made = {
        "input_ids": [filled(row, pad) for row in rows],
        "labels": [row[0] % 2 if classes else filled(row, IGNORED_LABEL) for row in rows],
        "attention_mask": [filled([1] * len(row), 0) for row in rows],
        "position_ids": [filled(list(range(len(row))), 0) for row in rows],
        "token_type_ids": [filled([0] * len(row), 0) for row in rows],
    }
    return {name: torch.tensor(made[name]) for name in ("input_ids", "labels", *columns)}


def padded(**values: Any) -> Callable[..., Any]:
    return functools.partial(collate, **values)


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **IDS))


def llama(kind: Any = transformers.LlamaForCausalLM) -> nn.Module:
    model: nn.Module = kind(transformers.LlamaConfig(**COMMON, **IDS, num_key_value_heads=2))
    return model


def opt() -> nn.Module:
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, ffn_dim=32, max_position_embeddings=64, pad_token_id=0, word_embed_proj_dim=16)
    )


def bert(kind: Any = transformers.BertForMaskedLM) -> nn.Module:
    model: nn.Module = kind(transformers.BertConfig(**COMMON))
    return model


def roberta() -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**COMMON, **IDS))


llama_classifier = functools.partial(llama, transformers.LlamaForSequenceClassification)
bert_classifier = functools.partial(bert, transformers.BertForSequenceClassification)
bert_of_tokens = functools.partial(bert, transformers.BertForTokenClassification)


class Averaging(transformers.LlamaForSequenceClassification):
    """Classifies by the mean of all tokens, padding included."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **others: Any) -> Any:
        logits = self.score(self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state).mean(1)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def try_model(model: nn.Module, by: Callable[..., Any]) -> None:
    loss = own_loss if isinstance(model, Averaging) else None
    structure = ModelStructure.from_live(LiveModel.skeleton_of(model), compute_loss=loss, sequence_length=16)
    try_padding(structure, try_collator(ROWS, by, place="the data", batch_size=8), place="the data")


MASKLESS: dict[str, Any] = {"columns": ()}
WITH_POSITIONS: dict[str, Any] = {"columns": ("attention_mask", "position_ids")}
FIXED: dict[str, Any] = {"length": 12}


@pytest.mark.parametrize(
    ("make", "by", "words"),
    [
        (gpt2, {"left": True}, "on the left to the longest of their batch, with an attention_mask, and GPT2LMHead"),
        (gpt2, {"left": True, **MASKLESS}, "on the left .*in its embedding"),
        (llama, {"left": True, **MASKLESS}, "on the left .* without an attention_mask, .*in its model.layers.0"),
        (opt, {"left": True, **MASKLESS}, "on the left"),
        (
            bert,
            MASKLESS,
            "on the right .* without an attention_mask, and BertForMaskedLM .*in its bert.encoder.layer.0",
        ),
        (bert, {"columns": ("token_type_ids",)}, "on the right .* without an attention_mask"),
        (bert, {"left": True}, "on the left"),
        (roberta, MASKLESS, "on the right"),
        (bert_of_tokens, MASKLESS, "on the right"),
        (bert_classifier, MASKLESS, "on the right"),
        (llama_classifier, {"classes": True, "pad": 5}, "in its head.* by model.config.pad_token_id = 0"),
        (functools.partial(llama, Averaging), {"classes": True}, "on the right .*in its head"),
    ],
)
def test_padding_that_changes_a_sample_is_refused(make: Callable[[], nn.Module], by: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=rf"^the data: data_collator collate \({__file__}:\d+\) pads .*{words}"):
        try_model(make(), padded(**by))
    try_model(make(), padded(**by, **FIXED))


@pytest.mark.parametrize(
    ("make", "by"),
    [
        (gpt2, {}),
        (gpt2, MASKLESS),
        (gpt2, {"left": True, **WITH_POSITIONS}),
        (llama, {"left": True}),
        (llama, MASKLESS),
        (opt, {"left": True}),
        (bert, {}),
        (bert, {"pad": 7}),
        (bert, {"left": True, **WITH_POSITIONS}),
        (roberta, {"left": True}),
        (bert_of_tokens, {"columns": ("attention_mask", "token_type_ids")}),
        (bert_classifier, {"classes": True}),
        (llama_classifier, {"classes": True}),
        (llama_classifier, {"classes": True, **MASKLESS}),
        (llama_classifier, {"classes": True, "left": True}),
    ],
)
def test_padding_that_a_sample_does_not_see_is_taken(make: Callable[[], nn.Module], by: dict[str, Any]):
    try_model(make(), padded(**by))


@pytest.mark.parametrize("name", SPECS)
def test_padding_on_the_right_under_a_mask_is_taken_by_all_models(name: str):
    structure = structure_of(name)
    classes = structure.task == "sequence_classification"
    padding = {"pad": getattr(structure.config, "pad_token_id", None) or 0}
    rows = try_collator(ROWS, padded(classes=classes, **padding), place="the data", batch_size=8)
    assert rows
    try_padding(structure, rows, place="the data")


def masking(rows: list[list[int]], **by: Any) -> dict[str, torch.Tensor]:
    batch = collate(rows, **by)
    return {**batch, "labels": batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.5, IGNORED_LABEL)}


def test_collators_that_draw_are_tried_too():
    try_model(bert(), masking)
    with pytest.raises(ConfigError, match="without an attention_mask"):
        try_model(bert(), functools.partial(masking, columns=()))
    with pytest.raises(ConfigError, match="on the left"):
        try_model(gpt2(), functools.partial(masking, left=True))


def tokenizer(**values: Any) -> Any:
    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}, unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names, **values)


@pytest.mark.parametrize(
    ("make", "collator", "labels"),
    [
        (gpt2, transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False), None),
        (llama, transformers.DataCollatorForLanguageModeling(tokenizer(padding_side="left"), mlm=False), None),
        (bert, transformers.DataCollatorForLanguageModeling(tokenizer()), None),
        (bert_classifier, transformers.DataCollatorWithPadding(tokenizer()), int),
        (llama_classifier, transformers.DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=4), int),
        (bert_of_tokens, transformers.DataCollatorForTokenClassification(tokenizer()), list),
        (llama, transformers.DataCollatorForSeq2Seq(tokenizer()), list),
    ],
)
def test_collators_of_transformers_are_taken(make: Callable[[], nn.Module], collator: Any, labels: Any):
    rows = [{"input_ids": row} for row in ROWS]
    if labels is not None:
        rows = [{**row, "labels": 1 if labels is int else row["input_ids"]} for row in rows]
    structure = ModelStructure.from_live(LiveModel.skeleton_of(make()), sequence_length=16)
    found = try_collator(rows, collator, place="the data", batch_size=8)
    assert found
    try_padding(structure, found, place="the data")


def test_samples_of_one_length_are_not_padded():
    assert not try_collator([row[:2] for row in ROWS], collate, place="the data", batch_size=8)
