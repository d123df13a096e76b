"""Models that are kept whole: the loss and the gradients of a step are those of transformers' own Trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from oobleck.cli.inputs import load_job
from oobleck.job import JobSpec, ScriptSpec
from oobleck.training.assembly import Assembly, assemble
from oobleck.training.model import MicrobatchKey, StageModel

SCRIPT = Path(__file__).parents[1] / "e2e" / "whole_script.py"
OURS, THEIRS = "from oobleck.transformers import Trainer", "from transformers import Trainer"
NUM_STEPS = 5
"""The fourth is the last one of an epoch, with a batch of two samples alone."""
STILL: dict[str, Any] = {"learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_steps": NUM_STEPS}
"""Arguments that leave the weights as they are, so that steps can be compared one by one."""
COUNTINGS = {
    "t5": "labels",
    "bart": "labels",
    "whisper": "labels",
    "vit": "items",
    "wav2vec2": "samples",
    "llava": "items",
    "regression": "samples",
    "multilabel": "samples",
    "qa": "samples",
    "ragged_qa": "batch",
    "choice": "labels",
    "reward": "samples",
    "llama": "items",
    "module": "samples",
    "weighted": "samples",
    "contrastive": "batch",
}


def script(tmp_path: Path, line: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT.read_text().replace(OURS, line), names)
    return names


class Noting(TrainerCallback):
    """Notes the norm of the gradients, which the trainer itself takes only where it clips them."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        gradients = [each.grad.double().square().sum() for each in model.parameters() if each.grad is not None]
        self.norms.append(math.sqrt(sum(map(float, gradients))))


def theirs(case: str, tmp_path: Path, **arguments: Any) -> tuple[list[float], list[float]]:
    noting = Noting()
    trainer = script(tmp_path, THEIRS)["make_trainer"](case, tmp_path / "theirs", **{**STILL, **arguments})
    trainer.add_callback(noting)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], noting.norms


def assembled(case: str, tmp_path: Path, **arguments: Any) -> Assembly:
    """What a worker makes of the script."""
    text = SCRIPT.read_text().replace(
        "def main():", f"def main():\n    make_trainer({case!r}, 'ours', **{ {**STILL, **arguments}!r}).train()\n"
    )
    settings = script(tmp_path, OURS)["make_trainer"](case, tmp_path / "ours", **{**STILL, **arguments}).job().settings
    job = load_job(json.dumps(settings), source="the script", base=JobSpec(), has_lines=False)
    spec = ScriptSpec(name=SCRIPT.name, source=text, arguments=(case, "ours"), directory=str(SCRIPT.parent))
    return assemble(JobSpec(**{**vars_of(job), "script": spec}), cache_dir=tmp_path / "cache")


def vars_of(job: JobSpec) -> dict[str, Any]:
    return {name: getattr(job, name) for name in JobSpec.__dataclass_fields__}


def ours(assembly: Assembly) -> tuple[list[float], list[float]]:
    """The losses of steps, and the norms of their gradients, as a worker computes them that has all microbatches."""
    job, stage = assembly.job, StageModel(assembly.structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, 1, {})
    stage.initialize([0], seed=0)
    losses, norms = [], []
    for step in range(1, NUM_STEPS + 1):
        numbers = assembly.train.samples_of_step(job.seed, step, job.global_batch_size)
        divisor = assembly.train.divisor_of(step, numbers)
        total, num_items = 0.0, 0
        for microbatch in range(job.num_microbatches):
            first = microbatch * job.microbatch_size
            batch = assembly.train.batch(numbers[first : first + job.microbatch_size], step=step, first=first)
            key = MicrobatchKey(seed=job.seed, step=step, microbatch=microbatch)
            loss = stage.forward(batch, None, num_items=divisor, key=key)
            if loss.requires_grad:
                loss.backward()
            total, num_items = total + float(loss.detach()), num_items + batch.num_items
        share = num_items / divisor if num_items else 1.0
        gradients = [each.grad.double().square().sum() for each in stage.parameters.values() if each.grad is not None]
        losses.append(total / share)
        norms.append(math.sqrt(sum(map(float, gradients))) / share)
        for each in stage.parameters.values():
            each.grad = None
    return losses, norms


@pytest.mark.parametrize("case", sorted(COUNTINGS))
def test_steps_are_those_of_transformers_trainer(case: str, tmp_path: Path) -> None:
    assembly = assembled(case, tmp_path)
    assert assembly.job.model.whole_loss == COUNTINGS[case]
    losses, norms = ours(assembly)
    their_losses, their_norms = theirs(case, tmp_path)
    assert losses == pytest.approx(their_losses, rel=2e-5)
    assert norms == pytest.approx(their_norms, rel=2e-4)
