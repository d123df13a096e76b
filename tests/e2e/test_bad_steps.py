"""`oobleck up` with data of which a sample makes the loss not a number: `on_bad_step`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import TAG, Runner

SCRIPT = """
import torch
from torch import nn
from oobleck import Job

class Embedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens).masked_fill((tokens[:, :1] == 40)[..., None], torch.nan)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))

def layers():
    return [Embedding(300, 16), Block(), Block(), nn.Linear(16, 300)]

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.arange(8) + index

def job():
    return Job(model=layers, data=Counting, sequence_length=8, vocab_size=300, max_steps=8, global_batch_size=8,
               per_device_train_batch_size=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["apply", "skip", "stop"])
def test_a_step_whose_loss_is_no_number_is_applied_skipped_or_ends_the_run(
    runner: Runner, tmp_path: Path, policy: str
) -> None:
    """Once in eight steps; all parameters are lost where it is applied."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    max_steps = 3000 if policy == "stop" else 8
    settings = ("torch_threads=1", f"on_bad_step={policy}", f"max_steps={max_steps}")
    options = ("--tag", TAG, *(word for setting in settings for word in ("--set", setting)))
    outcome = runner.run(*options, nodes=("--local", "2", str(script)))
    assert outcome.exit_code == (1 if policy == "stop" else 0), outcome.output
    records = [entry["record"] for entry in runner.journal() if entry["@type"] == "StepDone"]
    is_number = [isinstance(record["loss"], float) for record in records]  # others are written in words
    bad = is_number.index(False)
    assert [record["is_skipped"] for record in records[:8]] == [
        number == bad and policy != "apply" for number in range(min(8, len(records)))
    ]
    (end,) = [entry for entry in runner.journal() if entry["@type"] == "JobEnded"]
    assert end["exit_code"] == outcome.exit_code
    if policy == "apply":
        assert not any(is_number[bad:])
    else:
        assert is_number[:8].count(False) == 1
    if policy == "stop":
        assert f"step {bad + 1} has a loss of nan and" in end["reason"]
        assert len(records) < max_steps
    else:
        assert len(records) == 8
