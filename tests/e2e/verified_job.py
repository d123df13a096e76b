"""A script with a `job()`: layers, a loss, samples and an optimizer of its own."""

import torch
from torch import nn

from oobleck import Job

LENGTH, VOCAB_SIZE, SIZE = 16, 300, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.wide = nn.Linear(SIZE, 2 * SIZE)
        self.narrow = nn.Linear(2 * SIZE, SIZE)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden):
        mixed = self.norm(hidden).cumsum(1) / torch.arange(1, LENGTH + 1, device=hidden.device)[:, None]
        return hidden + self.drop(self.narrow(nn.functional.gelu(self.wide(mixed))))


def layers():
    return [nn.Embedding(VOCAB_SIZE, SIZE), *(Block() for _ in range(3)), nn.Linear(SIZE, VOCAB_SIZE)]


def loss(output, labels, num_items):
    """Half of the cross entropy, and half of the squared error of the predicted token's probability."""
    logits, targets = output[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    chosen = logits.softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return (nn.functional.cross_entropy(logits, targets, reduction="sum") + (1 - chosen).square().sum()) / 2 / num_items


def samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB_SIZE, (LENGTH,), generator=generator).tolist() for _ in range(64)]


def job():
    return Job(
        model=layers,
        loss=loss,
        data=samples,
        optimizer=lambda groups: torch.optim.RAdam(groups, lr=3e-3),
        lr_lambda=lambda step: 1 / step,
        sequence_length=LENGTH,
        vocab_size=VOCAB_SIZE,
        max_steps=40,
        global_batch_size=8,
        microbatch_size=2,
    )
