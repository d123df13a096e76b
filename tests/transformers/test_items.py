"""By how many labels a loss is divided: by those that are predicted, which not all of transformers' classes count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from oobleck.training.data import IGNORED_LABEL, Batch

from .trainers import LENGTH, VOCAB_SIZE, model, trainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB_SIZE,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(("made", "counts_first"), [(model, True), (llama, False)])
@pytest.mark.parametrize("is_masked", [True, False])
def test_first_labels_count_for_transformers_alone_and_for_some_classes(
    tmp_path: Path, made: Any, counts_first: bool, is_masked: bool
):
    theirs = trainer(tmp_path, kind=transformers.Trainer, model=made())
    ids = torch.arange(3, 3 + 4 * 6).reshape(4, 6)
    labels = ids.clone()
    if is_masked:
        labels[:, 0] = IGNORED_LABEL
    batches = iter([{"input_ids": ids, "labels": labels}])
    _, counted = theirs.get_batch_samples(batches, 1, torch.device("cpu"))
    assert Batch(input_ids=ids, labels=labels).num_items == 4 * 5
    assert int(counted) == (4 * 6 if counts_first and not is_masked else 4 * 5)
