"""A job whose layers wait instead of computing, as a host waits for its accelerator: `oobleck up --local 4 …`

Nodes on one machine share its cores, which no profile tells. These take their time whatever else the machine does.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16
FORWARD_S, BACKWARD_S = 0.02, 0.04


class Wait(torch.autograd.Function):
    """The identity, after some time in both directions."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Slow(nn.Module):
    """A small layer on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(Wait.apply(hidden)))


def job() -> Job:
    return Job(
        run_name="waiting",
        model=lambda: [nn.Embedding(VOCAB_SIZE, SIZE), *(Slow() for _ in range(6)), nn.Linear(SIZE, VOCAB_SIZE)],
        data=lambda: list(torch.arange(64 * LENGTH).remainder(VOCAB_SIZE).view(64, LENGTH)),
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=16,
        per_device_train_batch_size=4,
    )
