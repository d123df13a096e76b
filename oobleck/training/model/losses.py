"""The losses of models in the precision of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from oobleck.training.data import IGNORED_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """How a model's own loss is normalized, and over which labels."""

    is_mean: bool = False
    """It is the mean over the labels that count among those given; else their sum divided by `num_items_in_batch`."""
    counts_first: bool = False
    """Each sample's first label counts too: the model does not shift labels."""

    def __str__(self) -> str:
        what = "the mean" if self.is_mean else "a sum divided by num_items_in_batch,"
        return f"{what} over all labels{'' if self.counts_first else ' but the first'}"


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: int | None = None,
    **_options: Any,
) -> torch.Tensor:
    """Return the sum of the token losses over `num_items_in_batch` (their mean without it), in the logits' dtype.

    The same function as transformers' own, in its calling convention, without its conversion to float32.
    `logits` are [batch, length, vocabulary], `labels` [batch, length] and not shifted.
    """
    predictions = logits[:, :-1].reshape(-1, vocab_size)
    targets = labels[:, 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(predictions, targets, ignore_index=IGNORED_LABEL, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def label_loss(logits: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
    """Return the sum of the losses of all that has a label, over `num_items`, in the logits' dtype.

    `labels` are those of masked tokens, or of each token or sample to classify; `logits` have one dimension more.
    Models take the mean over the microbatch instead, which is not to be added up.
    """
    return (
        functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
        )
        / num_items
    )
