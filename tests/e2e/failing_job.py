"""A job whose layers fail on request: `oobleck up --local 4 tests/e2e/failing_job.py -- DIRECTORY`

A file in the directory that is named for a worker's process (`1234`), or for all of them (`all`), says what happens
there next: an exception, a segmentation fault, an end, or more memory than there is.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16
PAUSE_S = 0.01
"""Of each forward pass, in which the machine is left to others: the tests wait for processes, not for steps."""


class Trap(nn.Module):
    """A layer that fails when it is told to."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self._directory = directory

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for path in (self._directory / str(os.getpid()), self._directory / "all"):
            if path.exists():
                fail(path.read_text())
        time.sleep(PAUSE_S)
        return hidden + torch.tanh(self.linear(hidden))


def fail(kind: str) -> None:
    match kind:
        case "exception":
            raise ValueError("the model has a bug")
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(7)
        case "memory":
            torch.empty(1 << 50)
        case "cgroup":
            torch.ones(8 << 30, dtype=torch.uint8)  # more than tests give any cgroup, for the kernel to end it


def layers(directory: Path) -> list[nn.Module]:
    return [nn.Embedding(VOCAB_SIZE, SIZE), *(Trap(directory) for _ in range(4)), nn.Linear(SIZE, VOCAB_SIZE)]


def job() -> Job:
    directory = Path(sys.argv[1])
    return Job(
        run_name="failing",
        model=lambda: layers(directory),
        data=lambda: list(torch.arange(64 * LENGTH).remainder(VOCAB_SIZE).view(64, LENGTH)),
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=16,
        per_device_train_batch_size=2,
    )
