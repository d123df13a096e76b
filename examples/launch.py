"""A run from Python, which kills a node of its own on the way: `python examples/launch.py`"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import oobleck

VOCAB_SIZE, LENGTH, SIZE = 300, 32, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


def layers() -> list[nn.Module]:
    return [nn.Embedding(VOCAB_SIZE, SIZE), *(Block() for _ in range(4)), nn.Linear(SIZE, VOCAB_SIZE)]


def samples() -> list[torch.Tensor]:
    """Numbers that follow each other."""
    return list(torch.arange(512 * LENGTH).remainder(VOCAB_SIZE).view(512, LENGTH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill-at", type=int, default=20)
    parser.add_argument("--tag", default="launched")
    parser.add_argument("--base-dir")
    given = parser.parse_args()
    job = oobleck.Job(
        model=layers,
        data=samples,
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        global_batch_size=32,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        torch_threads=1,
    )
    with oobleck.launch(job, local=3, tag=given.tag, steps=given.steps, base_dir=given.base_dir, resume="never") as run:
        for event in run:
            print(event, flush=True)
            if event.kind == "StepDone" and event.entry.record.step == given.kill_at:
                run.kill("node2")
        summary = run.wait()
    print(f"{summary.steps_committed} steps, {summary.steps_lost} lost, loss {summary.losses[-1]:.4f}")


if __name__ == "__main__":  # workers run this file again, for its functions
    main()
