"""A job in which a worker ends at a chosen moment of a step: `oobleck up … tests/e2e/phased_job.py -- DIRECTORY PHASE`

It is the first worker of node1 that gets there some steps after the file `now` is in the directory: while it computes
`forward` or `backward`; before the last `sums` of a pass, for which the other device waits; or when it is to `apply` a
step that all have committed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16
NUM_LAYERS = 6


class Strike:
    """Ends this process once, at a moment of its kind."""

    def __init__(self, directory: Path, phase: str) -> None:
        self._directory, self._phase = directory, phase

    def at(self, moment: str) -> None:
        if moment != self._phase or os.environ.get("OOBLECK_NODE") != "node1":
            return
        try:
            (self._directory / "now").rename(self._directory / "done")  # for one process alone
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Watched(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, strike: Strike, is_first: bool) -> torch.Tensor:
        ctx.strike, ctx.is_first = strike, is_first
        strike.at("forward")
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.strike.at("backward")
        if ctx.is_first:  # nothing is left but the embedding
            ctx.strike.at("sums")
        return gradients[0], None, None


class Block(nn.Module):
    def __init__(self, strike: Strike, *, is_first: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self._strike, self._is_first = strike, is_first

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        watched: torch.Tensor = Watched.apply(hidden, self._strike, self._is_first)  # type: ignore[no-untyped-call]
        return hidden + torch.tanh(self.linear(watched))


def job() -> Job:
    strike = Strike(Path(sys.argv[1]), sys.argv[2])

    def optimizer(groups: list[dict[str, Any]]) -> Any:
        class Struck(torch.optim.AdamW):
            def step(self, closure: None = None) -> None:
                strike.at("apply")
                super().step()

        return Struck(groups, lr=3e-3)

    def layers() -> list[nn.Module]:
        blocks = (Block(strike, is_first=not index) for index in range(NUM_LAYERS))
        return [nn.Embedding(VOCAB_SIZE, SIZE), *blocks, nn.Linear(SIZE, VOCAB_SIZE)]

    return Job(
        run_name="phased",
        model=layers,
        optimizer=optimizer,
        data=lambda: list(torch.arange(64 * LENGTH).remainder(VOCAB_SIZE).view(64, LENGTH)),
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=16,
        per_device_train_batch_size=2,
    )
