"""What `kinds.py` trains: layers that take a given time, longer on some nodes, and leave the processors to others."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from torch import nn

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16


class Pause(torch.autograd.Function):
    """Does nothing, for so many seconds on the way there, and so many on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.mix = nn.Linear(SIZE, SIZE)
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        paused: torch.Tensor = Pause.apply(hidden, self.seconds / 3, self.seconds * 2 / 3)  # type: ignore[no-untyped-call]
        mixed: torch.Tensor = self.mix(paused)
        return hidden + mixed


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=generator)


def job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of a block for a microbatch, there and back")
    parser.add_argument("--slow", required=True, help="nodes that take longer, with commas between")
    parser.add_argument("--factor", type=float, required=True, help="how many times as long")
    parser.add_argument("--microbatches", type=int, required=True)
    given = parser.parse_args()
    is_slow = os.environ.get("OOBLECK_NODE", "") in given.slow.split(",")
    seconds = given.seconds * (given.factor if is_slow else 1.0)

    def layers() -> list[nn.Module]:
        blocks = [Block(seconds) for _ in range(given.blocks)]
        return [nn.Embedding(VOCAB_SIZE, SIZE), *blocks, nn.Linear(SIZE, VOCAB_SIZE)]

    return Job(
        run_name="bench-kinds",
        model=layers,
        data=Samples,
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=given.microbatches,
        per_device_train_batch_size=1,
    )
