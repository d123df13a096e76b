"""Masks, positions and types reach every layer, wherever the model is cut; and heads that classify."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.job import Task
from oobleck.training.data.batches import IGNORED_LABEL, Batch
from oobleck.training.model.layer_trial import separates_documents
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import (
    KEY,
    SEQUENCE_LENGTH,
    SPECS,
    VOCAB_SIZE,
    gradients_of,
    loss_of,
    random_batch,
    run_pipeline,
    seed_each_layer,
    stages_of,
    state_of,
    structure_of,
    transformers_model,
    whole_stage,
)

SEPARATING = {
    "gpt2", "gpt2-dropout", "llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2",
    "olmo", "gpt_neox", "mixtral",
}  # fmt: skip
"""Models that keep documents apart by their positions."""
NUM_LABELS, PAD = 3, 0
POSITIONS = torch.cat([torch.arange(10), torch.arange(SEQUENCE_LENGTH - 10)]).expand(2, -1)


def padded(structure: ModelStructure) -> Batch:
    """One sample padded at its end, the other at its beginning; with two types of tokens, where the model has them."""
    plain = random_batch(1, is_causal=structure.task == "causal_lm")
    mask = torch.ones_like(plain.input_ids)
    mask[0, 17:] = mask[1, :5] = 0
    others = {"attention_mask": mask}
    if "token_type_ids" in structure.takes:
        others["token_type_ids"] = (torch.arange(SEQUENCE_LENGTH) > 8).long().expand(2, -1)
    return replace(plain, labels=plain.labels.masked_fill(mask == 0, IGNORED_LABEL), others=others)


def packed(_structure: ModelStructure) -> Batch:
    """Two documents a sample."""
    plain = random_batch(1)
    labels = plain.labels.clone()
    labels[:, 10] = IGNORED_LABEL
    return replace(plain, labels=labels, others={"position_ids": POSITIONS})


def assert_every_cut_equals_the_whole(structure: ModelStructure, batch: Batch) -> float:
    state = state_of(whole_stage(structure))
    model = transformers_model(structure, state)
    seed_each_layer(model, structure, KEY)
    loss = loss_of(model, structure, batch)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for cuts in ([1], [2, 4], list(range(1, structure.num_layers))):
        stages = stages_of(structure, cuts, state, dtype=torch.float32)
        torch.testing.assert_close(run_pipeline(stages, batch), loss.detach(), rtol=1e-6, atol=0)
        gradients = gradients_of(stages)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)
    return float(loss.detach())


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """All of some families, of which these are tried every day."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(SPECS, "gpt2-dropout", "llama", "bert", "opt", "gemma3"))
def test_masks_and_types_are_the_models_own_on_every_stage(name: str):
    structure = structure_of(name)
    batch = padded(structure)
    loss = assert_every_cut_equals_the_whole(structure, batch)
    model = transformers_model(structure, state_of(whole_stage(structure)))
    seed_each_layer(model, structure, KEY)
    blind = float(loss_of(model, structure, replace(batch, others={})).detach())
    assert abs(loss - blind) > 1e-5, "without them it is another loss"


@pytest.mark.parametrize("name", quick(sorted(SEPARATING), "gpt2", "llama", "gemma3"))
def test_several_documents_a_sample_are_the_models_own_on_every_stage(name: str):
    structure = structure_of(name)
    assert_every_cut_equals_the_whole(structure, packed(structure))


@pytest.mark.parametrize(
    "name", quick([name for name in SPECS if "dropout" not in name], "gpt2", "llama", "mistral", "bert", "bloom", "opt")
)
def test_whether_documents_are_kept_apart_is_what_the_model_does(name: str):
    """Tried on the model itself: tokens of the first document are exchanged, and the second must not notice."""
    structure = structure_of(name)
    model = transformers_model(structure, state_of(whole_stage(structure))).eval()
    ids = random_batch(1).input_ids
    others = ids.clone()
    others[:, :10] = (others[:, :10] + 1) % VOCAB_SIZE
    options = {"position_ids": POSITIONS} if "position_ids" in structure.takes else {}
    with torch.no_grad():
        one, other = (model(input_ids=each, **options).logits[:, 10:] for each in (ids, others))
    is_apart = torch.equal(one, other)
    assert separates_documents(structure) == is_apart == (name in SEPARATING)


def classifying(name: str, task: Task, **config: int) -> ModelStructure:
    spec = replace(SPECS[name], task=task, config={**SPECS[name].config, "num_labels": NUM_LABELS, **config})
    return ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification"])
@pytest.mark.parametrize("name", quick(("gpt2", "llama", "qwen2", "bert"), "gpt2", "bert"))
def test_heads_that_classify_are_the_models_own_wherever_it_is_cut(name: str, task: Task):
    structure = classifying(name, task, pad_token_id=PAD)
    batch = padded(replace(structure, task="causal_lm"))
    mask = batch.others["attention_mask"]
    labels = torch.tensor([2, 1]) if task == "sequence_classification" else (batch.input_ids % NUM_LABELS)
    if task == "token_classification":
        labels = labels.masked_fill(mask == 0, IGNORED_LABEL)
    batch = replace(batch, input_ids=batch.input_ids.masked_fill(mask == 0, PAD), labels=labels, is_causal=False)
    loss = assert_every_cut_equals_the_whole(structure, batch)
    if name == "bert":
        return  # it has dropout in its head, which the model's own loss below would draw again
    model = transformers_model(structure, state_of(whole_stage(structure))).eval()
    own = model(input_ids=batch.input_ids, labels=labels, **batch.others).loss
    whole = whole_stage(structure)
    with whole.evaluating():
        ours = whole.forward(batch, None, num_items=batch.num_items, key=KEY)
    torch.testing.assert_close(ours, own)
    assert loss > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_of_several_documents_a_sample_are_classified_as_by_the_model(name: str):
    structure = classifying(name, "token_classification", use_cache=True)
    batch = packed(structure)
    assert_every_cut_equals_the_whole(structure, replace(batch, labels=batch.input_ids % NUM_LABELS, is_causal=False))


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        ("sequence_classification", {}, r"model\.config\.pad_token_id: set it"),
        ("sequence_classification", {"pad_token_id": 0, "num_labels": 1}, r"num_labels: 1 \(regression\)"),
        ("token_classification", {"num_labels": 1}, r"num_labels: 1"),
    ],
)
def test_heads_that_predict_something_else_are_refused(task: Task, config: dict[str, int], words: str):
    with pytest.raises(ConfigError, match=words):
        classifying("llama", task, **config)


def test_the_task_of_a_scripts_model_is_its_classs():
    for task in ("sequence_classification", "token_classification", "masked_lm"):
        made = classifying("bert", task, pad_token_id=PAD)
        structure = ModelStructure.from_factory(
            lambda made=made: made.make(torch.float32), vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH
        )
        assert structure.task == task
