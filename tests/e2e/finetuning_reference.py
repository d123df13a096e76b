"""Fine-tuning as transformers and torch do it in one process: losses of whole steps, and torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from .finetuning_job import IGNORED

__all__ = ["as_tensors", "mean_loss", "saved_model", "step_losses"]

Samples = Sequence[dict[str, torch.Tensor]]


def saved_model(case: str, directory: Path) -> PreTrainedModel:
    torch.set_num_threads(1)
    auto: Any = AutoModelForSequenceClassification if case == "labels" else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(directory, dtype=torch.float64).train()
    return model


def as_tensors(samples: Iterable[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.as_tensor(value) for name, value in each.items()} for each in samples]


def step_losses(model: PreTrainedModel, case: str, batches: Iterable[Samples]) -> Iterator[float]:
    """The loss of each step; it is applied before it is given out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    for batch in batches:
        total = mean_loss(model, case, batch)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield float(total.detach())


def mean_loss(model: PreTrainedModel, case: str, batch: Samples) -> torch.Tensor:
    """The mean over what counts, of each sample's losses: one after the other, padded by nothing."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in batch:
        columns = {name: value[None] for name, value in each.items() if name not in ("labels", "label")}
        logits = model(**columns, use_cache=False).logits
        if case == "labels":
            labels = each["label"][None]
        else:
            logits, labels = logits[0, :-1], each["labels"][1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        count += int((labels != IGNORED).sum())
    return total / count
