"""Small trainers to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from oobleck.storage import CheckpointDirectory
from oobleck.training.checkpoint import gathered_in
from oobleck.training.checkpoint.state import write_layer
from oobleck.transformers import Trainer

LENGTH, VOCAB_SIZE = 24, 300


def model(**values: Any) -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=VOCAB_SIZE, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **values,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(count: int) -> list[dict[str, list[int]]]:
    """Rows of some lengths; the first token says which row it is."""
    return [{"input_ids": [5 + n, *range(3, 3 + n % 8)], "labels": [5 + n, *range(3, 3 + n % 8)]} for n in range(count)]


def gather(checkpoints: Path, trained: Any, number: int) -> Path:
    """Write the weights of a step where workers gather them."""
    gathered = gathered_in(checkpoints, number)
    gathered.mkdir(parents=True)
    write_layer(CheckpointDirectory(gathered.parent), gathered.name, 0, trained.state_dict(), metadata={})
    return gathered


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in batch])

    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def arguments(directory: Path, **values: Any) -> TrainingArguments:
    given = {"output_dir": str(directory / "out"), "report_to": [], "use_cpu": True, "disable_tqdm": True, **values}
    return TrainingArguments(**given)


def trainer(directory: Path, *, kind: type = Trainer, count: int = 11, **values: Any) -> Any:
    """A trainer of `kind`; `values` are its own where it takes them, and else those of its arguments."""
    own = ("model", "train_dataset", "eval_dataset", "callbacks", "compute_loss_func", "optimizers", "model_init")
    others = ("optimizer_cls_and_kwargs", "compute_metrics", "preprocess_logits_for_metrics")
    given = {name: values.pop(name) for name in (*own, *others) if name in values}
    if "model_init" not in given:
        given.setdefault("model", model())
    given.setdefault("train_dataset", rows(count))
    return kind(args=arguments(directory, **values), data_collator=collate, **given)
