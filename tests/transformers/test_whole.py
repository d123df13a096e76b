"""Models that compute their own loss, cut or whole: a step's loss and gradients are those of transformers' Trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from oobleck.cli.inputs import load_job
from oobleck.errors import ConfigError
from oobleck.host.handover import receiving
from oobleck.job import JobSpec, ScriptSpec
from oobleck.schedule import ScheduleKind
from oobleck.training.assembly import Assembly, assemble
from oobleck.training.checkpoint import read_weights
from oobleck.training.comm import Waiter
from oobleck.training.model import MicrobatchKey, StageModel
from oobleck.training.step.evaluation import Evaluator
from oobleck.training.step.step_work import PipelineRank
from tests.traced import through

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:Model has .tie_word_embeddings:UserWarning"
)  # of PEFT

SCRIPT = Path(__file__).parents[1] / "e2e" / "whole_script.py"
OURS, THEIRS = "from oobleck.transformers import Trainer", "from transformers import Trainer"
OURS_OF_TRL, THEIRS_OF_TRL = "from oobleck.trl import", "from trl import"
NUM_STEPS = 5
"""The fourth is the last one of an epoch, with a batch of two samples alone."""
STILL: dict[str, Any] = {
    "learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_steps": NUM_STEPS,
    "per_device_eval_batch_size": 3,
}  # fmt: skip
"""Arguments that leave the weights as they are, so that steps can be compared one by one."""
COUNTINGS = {
    "t5": "labels",
    "bart": "labels",
    "whisper": "labels",
    "vit": "items",
    "wav2vec2": "samples",
    "llava": "items",
    "qwen2_vl": "items",
    "gemma3": "items",
    "regression": "samples",
    "multilabel": "samples",
    "qa": "samples",
    "ragged_qa": "batch",
    "choice": "labels",
    "reward": "samples",
    "llama": "items",
    "chain": None,
    **dict.fromkeys(("ia3", "dora", "vera", "trainable tokens", "prompt", "prefix"), "items"),
    "tied_head": "items",
    **dict.fromkeys(("adalora", "pads_left", "flattens"), "batch"),
    "module": "samples",
    "single": "samples",
    "recurrent": "batch",
    "weighted": "samples",
    "contrastive": "batch",
}
WHOLE = {"single"}
"""The cases whose model cannot be cut."""
EVALUATED_HERE = {*(case for case, counting in COUNTINGS.items() if counting == "batch"), "module"}
"""The cases whose evaluations are the script's own: of other batches than those of training, or without a loss."""
BRIEFLY = {"t5", "chain", "llava", "regression", "ragged_qa", "choice", "single", "module", "recurrent", "contrastive"}
"""One of each kind; the rest is slow."""


def script(tmp_path: Path, line: str, source: Path = SCRIPT) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "script"}
    text = source.read_text().replace(OURS, line)
    exec(text.replace(OURS_OF_TRL, THEIRS_OF_TRL) if line == THEIRS else text, names)
    return names


class Noting(TrainerCallback):
    """Notes the norm of the gradients, which the trainer itself takes only where it clips them."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        gradients = [each.grad.double().square().sum() for each in model.parameters() if each.grad is not None]
        self.norms.append(math.sqrt(sum(map(float, gradients))))


def theirs(
    case: str, tmp_path: Path, source: Path = SCRIPT, **arguments: Any
) -> tuple[list[float], list[float], list[float]]:
    """The losses and the norms of steps, and the losses of evaluations."""
    noting = Noting()
    trainer = script(tmp_path, THEIRS, source)["make_trainer"](case, tmp_path / "theirs", **{**STILL, **arguments})
    trainer.add_callback(noting)
    trainer.train()
    losses, evaluations = (
        [entry[name] for entry in trainer.state.log_history if name in entry] for name in ("loss", "eval_loss")
    )
    return losses, noting.norms, evaluations


def assembled(case: str, tmp_path: Path, source: Path = SCRIPT, **arguments: Any) -> Assembly:
    """What a worker makes of the script."""
    text = source.read_text().replace(
        "def main():", f"def main():\n    make_trainer({case!r}, 'ours', **{ {**STILL, **arguments}!r}).train()\n"
    )
    described = script(tmp_path, OURS, source)["make_trainer"](case, tmp_path / "ours", **{**STILL, **arguments}).job()
    job = load_job(json.dumps(described.settings), source="the script", base=JobSpec(), has_lines=False)
    spec = ScriptSpec(
        name=source.name, source=text, arguments=(case, "ours"), directory=str(SCRIPT.parent),
        provides=described.provides,
    )  # fmt: skip
    return assemble(JobSpec(**{**vars_of(job), "script": spec}), cache_dir=tmp_path / "cache")


def vars_of(job: JobSpec) -> dict[str, Any]:
    return {name: getattr(job, name) for name in JobSpec.__dataclass_fields__}


def ours(assembly: Assembly, cuts: Sequence[int] = ()) -> tuple[list[float], list[float]]:
    """The losses of steps, and the norms of their gradients, as stages between the cuts compute all microbatches."""
    job, structure = assembly.job, assembly.structure
    stages = []
    for first, stop in pairwise((0, *cuts, structure.num_layers)):
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        stage.adopt(first, stop, {})
        stage.initialize(range(first, stop), seed=0)
        stages.append(stage)
    losses, norms = [], []
    for step in range(1, NUM_STEPS + 1):
        numbers = assembly.train.samples_of_step(job.seed, step, job.global_batch_size)
        divisor = assembly.train.divisor_of(step, numbers)
        total, num_items = 0.0, 0
        for microbatch in range(job.num_microbatches):
            first = microbatch * job.microbatch_size
            batch = assembly.train.batch(numbers[first : first + job.microbatch_size], step=step, first=first)
            key = MicrobatchKey(seed=job.seed, step=step, microbatch=microbatch)
            run = partial(StageModel.carry, num_items=divisor, key=key)
            total, num_items = total + through(stages, batch, run), num_items + batch.num_items
        share = num_items / divisor if num_items else 1.0
        gradients: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, each in stage.parameters.items():
                if each.grad is not None:
                    gradients[name] = gradients[name] + each.grad if name in gradients else each.grad
                each.grad = None
        losses.append(total / share)
        norms.append(math.sqrt(sum(float(each.double().square().sum()) for each in gradients.values())) / share)
    return losses, norms


def evaluated(assembly: Assembly, step: int) -> float | None:
    """The loss of an evaluation after a step, as workers of one pipeline compute it; None if they do not."""
    if assembly.validation is None:
        return None
    stage = StageModel(assembly.structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, assembly.structure.num_layers, {})
    stage.initialize(range(assembly.structure.num_layers), seed=0)
    evaluator = Evaluator(
        assembly.job, assembly.validation, stage, Waiter(), node_sums=None, interrupted=lambda: False,
        on_progress=lambda _: None,
    )  # fmt: skip
    alone = PipelineRank(stage=0, num_stages=1, group=None, rank=0, degree=1, schedule=ScheduleKind.ONE_F_ONE_B)
    sums = [(0.0, 0.0)]  # of two pipelines, one after the other

    def sum_up(numbers: tuple[float, ...]) -> tuple[float, ...]:
        sums.append((sums[-1][0] + numbers[0], sums[-1][1] + numbers[1]))
        return sums[-1]

    for number in range(2):
        found = evaluator.run(step, alone, share=(number, 2), sum_up=sum_up)
    return found.loss


@pytest.mark.parametrize(
    "case", [case if case in BRIEFLY else pytest.param(case, marks=pytest.mark.slow) for case in sorted(COUNTINGS)]
)
def test_steps_are_those_of_transformers_trainer(case: str, tmp_path: Path) -> None:
    assembly = assembled(case, tmp_path)
    assert assembly.job.model.whole_loss == COUNTINGS[case]
    their_losses, their_norms, evaluations = theirs(case, tmp_path)
    found = [evaluated(assembly, step) for step in (4, NUM_STEPS)]
    if case in EVALUATED_HERE:
        assert found == [None, None]
    else:
        assert found == pytest.approx(evaluations, rel=2e-5)
    num_layers = assembly.structure.num_layers
    assert (num_layers == 1) == (case in WHOLE)
    is_traced = num_layers > 1 and COUNTINGS[case] is not None
    for cuts in {(), (num_layers // 2,), tuple(range(1, num_layers))} if is_traced else {()}:
        losses, norms = ours(assembly, cuts)
        assert losses == pytest.approx(their_losses, rel=2e-5)
        assert norms == pytest.approx(their_norms, rel=2e-4)


def test_a_checkpoint_of_transformers_is_continued_whole(tmp_path: Path) -> None:
    values = {**STILL, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    saved = script(tmp_path, THEIRS)["make_trainer"]("regression", tmp_path / "theirs", **values)
    saved.train()
    trainer = script(tmp_path, OURS)["make_trainer"]("regression", tmp_path / "ours", **values)
    with receiving(lambda reached: reached):
        trainer.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-2"))
    found = Path(str(trainer.resume(trainer.job())))
    _, weights = read_weights(found)
    assert weights.keys() >= {"classifier.weight", "bert.embeddings.word_embeddings.weight"}
    assert found.name.startswith("step-")


def test_a_loss_that_logs_or_counts_is_refused_by_name(tmp_path: Path) -> None:
    names = script(tmp_path, OURS)

    class Logging(names["Through"]):  # type: ignore[misc]  # of the script
        def compute_loss(self, *args: Any, **named: Any) -> Any:
            self.log({"part": 1.0})
            return super().compute_loss(*args, **named)

    class Counting(names["Through"]):  # type: ignore[misc]  # of the script
        calls = 0

        def compute_loss(self, *args: Any, **named: Any) -> Any:
            self.calls = self.calls + 1
            return super().compute_loss(*args, **named)

    for kind, words in ((Logging, "calls self.log"), (Counting, "changes self.calls")):
        names["CASES"]["llama"] = (*names["CASES"]["llama"][:2], kind)
        with pytest.raises(ConfigError, match=words):
            names["make_trainer"]("llama", tmp_path / "ours").job().check()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_forward_pass_that_changes_its_parameters_is_refused_by_name(tmp_path: Path, num_stages: int) -> None:
    """RWKV divides the weights of its blocks for evaluations, and multiplies them again in training."""
    names = script(tmp_path, OURS)
    kind = names["Own"] if num_stages > 1 else names["Single"]

    class Scaled(kind):  # type: ignore[misc, valid-type]  # of the script
        is_scaled = False

        def forward(self, features: Any, labels: Any = None, wanted: Any = None) -> Any:
            if self.is_scaled == self.training:
                with torch.no_grad():
                    self.inner.weight.mul_(2.0 if self.training else 0.5)
                self.is_scaled = not self.training
            return super().forward(features, labels if wanted is None else wanted)

    case = "module" if num_stages > 1 else "single"
    names["CASES"][case] = (Scaled, names["CASES"][case][1])
    with pytest.raises(ConfigError, match=r"in Scaled, a forward pass changes the parameter inner\.weight in place"):
        names["make_trainer"](case, tmp_path / "ours", pause_s=0).job().check()


class OfOne(torch.nn.Module):
    """A model without a dimension for samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)])

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:
        (logits,) = features
        for layer in self.layers:
            logits = layer(logits).tanh()
        return {"loss": (logits.sum() - labels.squeeze()).square(), "logits": logits}


def unpadded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("is_of_one", [True, False])
def test_a_batch_of_one_is_tried_alone_where_its_code_takes_no_two(tmp_path: Path, *, is_of_one: bool) -> None:
    """A model, or a collator that does not pad rows of several lengths."""

    def rows() -> list[dict[str, Any]]:
        lengths = [6 if is_of_one else 6 + n % 3 for n in range(16)]
        return [{"features": torch.full((length,), n / 16), "labels": n / 8} for n, length in enumerate(lengths)]

    class Short(OfOne):
        def forward(self, features: torch.Tensor, labels: torch.Tensor) -> Any:
            return super().forward(features[:, :6], labels)

    names = script(tmp_path, OURS)
    names["CASES"]["module"] = (OfOne if is_of_one else Short, rows)
    names["COLLATORS"]["module"] = unpadded
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    job = names["make_trainer"]("module", tmp_path / "ours", pause_s=0, **sizes).job()
    assert (job.settings["model"]["whole_loss"], job.settings["microbatch_size"]) == ("batch", 1)
    assert job.flow is not None, "it is cut all the same"


def test_a_batch_that_is_not_cut_takes_no_other_microbatch(tmp_path: Path) -> None:
    job = script(tmp_path, OURS)["make_trainer"]("contrastive", tmp_path / "ours").job()
    assert job.settings["microbatch_size"] == 4
    with pytest.raises(ConfigError, match="microbatch_size is 2, and the loss is that of a batch of 4 as a whole"):
        job.check_for(JobSpec(microbatch_size=2))


def test_batch_norms_are_refused_in_whole_models_too(tmp_path: Path) -> None:
    names = script(tmp_path, OURS)

    class Normed(names["Own"]):  # type: ignore[misc]  # of the script
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)

    names["CASES"]["module"] = (Normed, names["CASES"]["module"][1])
    with pytest.raises(ConfigError, match="in Normed, norm is a BatchNorm1d"):
        names["make_trainer"]("module", tmp_path / "ours").job().check()
