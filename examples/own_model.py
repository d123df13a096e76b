"""A model of one's own, as a list of layers: `oobleck up --local 4 examples/own_model.py`

It learns to say what came four tokens before.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from oobleck import Job

VOCAB_SIZE, LENGTH, SIZE, DISTANCE = 300, 32, 64, 4


class Block(nn.Module):
    """A gated convolution over the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.mix = nn.Conv1d(SIZE, 2 * SIZE, kernel_size=3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = functional.pad(self.norm(hidden).transpose(1, 2), (2, 0))
        return hidden + functional.glu(self.mix(before), dim=1).transpose(1, 2)


def layers() -> list[nn.Module]:
    embedding, head = nn.Embedding(VOCAB_SIZE, SIZE), nn.Linear(SIZE, VOCAB_SIZE, bias=False)
    head.weight = embedding.weight  # tied: its gradients are summed over all stages that hold it
    return [embedding, *(Block() for _ in range(4)), nn.Sequential(nn.LayerNorm(SIZE), head)]


class Echoes(torch.utils.data.Dataset):
    """Samples by index: tokens that come again after a while."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCAB_SIZE, (DISTANCE,), generator=generator).repeat(LENGTH // DISTANCE)


def job() -> Job:
    return Job(
        run_name="own-model",
        model=layers,
        data=Echoes,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95)),
        lr_lambda=lambda step: min(1.0, step / 10),
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        max_steps=120,
        global_batch_size=32,
        per_device_train_batch_size=4,
    )
