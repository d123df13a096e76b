"""A job whose layers wait instead of computing, as a host waits for its accelerator: `oobleck up --local 4 …`

Nodes on one machine share its cores, which no profile tells. These take their time whatever else the machine does.

Arguments: [LAYERS [DIRECTORY]]. The layers of a node take as many times as long as the file DIRECTORY/NODE says, from
when there is such a file: a process that waits is not slowed by being stopped over and over.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16
FORWARD_S, BACKWARD_S = 0.02, 0.04
NUM_LAYERS = 6


def wait(seconds: float, said: Path | None) -> None:
    factor = float(said.read_text()) if said is not None and said.is_file() else 1.0
    time.sleep(seconds * factor)


class Wait(torch.autograd.Function):
    """The identity, after some time in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, said: Path | None) -> torch.Tensor:
        ctx.said = said
        wait(FORWARD_S, said)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        wait(BACKWARD_S, ctx.said)
        return gradient, None


class Slow(nn.Module):
    """A small layer on a device of its own."""

    def __init__(self, said: Path | None) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.said = said

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(Wait.apply(hidden, self.said)))


def job() -> Job:
    num_layers = int(sys.argv[1]) if sys.argv[1:] else NUM_LAYERS
    said = Path(sys.argv[2]) / os.environ.get("OOBLECK_NODE", "") if sys.argv[2:] else None

    def model() -> list[nn.Module]:
        return [
            nn.Embedding(VOCAB_SIZE, SIZE),
            *(Slow(said) for _ in range(num_layers)),
            nn.Linear(SIZE, VOCAB_SIZE),
        ]

    return Job(
        run_name="waiting",
        model=model,
        data=lambda: list(torch.arange(64 * LENGTH).remainder(VOCAB_SIZE).view(64, LENGTH)),
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=16,
        per_device_train_batch_size=4,
    )
