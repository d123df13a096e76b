"""Jobs that fine-tune a saved model on samples of a script: `finetuning_job.py CASE MODEL`.

Cases: `padded` (samples of many lengths, some padded at their beginning by themselves, prompts not predicted), `lora`
(the same samples, with adapters), `packed` (documents that share samples), `labels` (a label a sample) and `streamed`
(samples of any length one after the other, without saying how many).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from oobleck import Job

LENGTH, VOCAB_SIZE, NUM_SAMPLES, NUM_LABELS = 24, 300, 64, 3
NUM_STREAMED = 505
"""Which are no whole steps, twice over."""
PAD, IGNORED = 0, -100
PAUSE_S = 0.05
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16.0, "use_rslora": True}


def samples(case: str) -> list[dict[str, Any]]:
    return list(_samples(case))


def _samples(case: str) -> Iterator[dict[str, Any]]:
    randomness = np.random.default_rng(5)
    for number in range(NUM_STREAMED if case == "streamed" else NUM_SAMPLES):
        count = int(randomness.integers(4, LENGTH + 1))
        tokens = randomness.integers(1, VOCAB_SIZE, size=LENGTH if case == "packed" else count)
        if case == "labels":
            yield {"input_ids": tokens, "label": int(tokens[0]) % NUM_LABELS}
            continue
        labels = tokens.copy()
        labels[: len(labels) // 2 if number % 4 else 1] = IGNORED
        if case == "packed":
            labels[count // 2] = IGNORED
            positions = np.concatenate([np.arange(count // 2), np.arange(LENGTH - count // 2)])
            yield {"input_ids": tokens, "labels": labels, "position_ids": positions}
        elif number % 2 or case == "plain":
            yield {"input_ids": tokens, "labels": labels}
        else:
            before = min(3, LENGTH - len(tokens))
            yield {
                "input_ids": np.concatenate([np.full(before, PAD), tokens]),
                "labels": np.concatenate([np.full(before, IGNORED), labels]),
                "attention_mask": np.concatenate([np.zeros(before, np.int64), np.ones(len(tokens), np.int64)]),
            }


def optimizer(groups: list[dict[str, Any]]) -> Any:
    """What a job asks for by default, at a pace that leaves time to kill nodes."""
    from torch.optim import AdamW

    class Paced(AdamW):
        def step(self, closure: None = None) -> None:
            time.sleep(PAUSE_S)
            super().step()

    return Paced(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)


def job() -> Job:
    case, model = sys.argv[1:]
    kept: dict[str, Any] = {"validation_split": 0.25, "eval_steps": 10}
    streamed: dict[str, Any] = {"streaming": True, "epochs": 2, "max_steps": 1000}
    return Job(
        model={
            "path": model,
            "task": "sequence_classification" if case == "labels" else "causal_lm",
            **({"lora": LORA} if case == "lora" else {}),
        },
        data=lambda: _samples(case) if case == "streamed" else samples(case),
        optimizer=optimizer,
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.1,
        **(streamed if case == "streamed" else kept),
        global_batch_size=16,
        microbatch_size=2,
        num_pipelines=2,
        reductions_per_step=2,
        dtype="float64",
        torch_threads=1,
        checkpoint={"enabled": False},
        control={"orphan_timeout_s": 30, "lease_s": 10, "start_timeout_s": 200},
    )
