"""Evaluations while training runs that workers cannot make: the script's own process has the results and the best
weights that transformers' own loop comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import TrainerCallback

from oobleck.control.journal import Evaluated, PlanAdopted
from oobleck.errors import ConfigError
from oobleck.training.checkpoint.trainer_checkpoint import write_checkpoint
from oobleck.training.model import LiveModel, ModelStructure
from oobleck.transformers import Seq2SeqTrainer, Trainer
from tests.control.journals import run_with_a_loss

from .test_follower import step
from .trainers import LENGTH, collate, gather, model, rows, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:'pin_memory':UserWarning"
)
EVALUATING: dict[str, Any] = {
    "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5, "save_strategy": "steps", "save_steps": 2,
    "load_best_model_at_end": True, "per_device_eval_batch_size": 2, "per_device_train_batch_size": 4,
    "learning_rate": 0.05,
}  # fmt: skip


class Keeping(TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **details: Any) -> None:
        self.weights[state.global_step] = {name: each.clone() for name, each in model.state_dict().items()}


def accuracy(predicted: Any) -> dict[str, float]:
    logits, labels = predicted
    return {"accuracy": float((logits == labels)[labels != -100].mean()), "width": float(labels.shape[1])}


def followed(made: Any, kept: Keeping, directory: Path) -> Any:
    """Tell a trainer of the run whose weights were kept; returns its result, and leaves it trained."""
    last, every = max(kept.weights), made.args.eval_steps
    follower, checkpoints, twin = made.follow(made.job()), directory / "checkpoints", made.model
    follower.saves_in(checkpoints)
    follower.take(next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted)))
    before = {name: each.clone() for name, each in twin.state_dict().items()}
    for number, weights in sorted(kept.weights.items()):
        follower.take(step(number, 5.0))
        if number % every == 0 or number == last:
            twin.load_state_dict(weights)
            gather(checkpoints, twin, number)
            twin.load_state_dict(before)
            follower.take(Evaluated(t_s=1.0, step=number, loss=None, num_samples=0, duration_s=0.1))
    twin.load_state_dict(kept.weights[last])
    live = LiveModel.skeleton_of(twin, is_whole=True)
    whole = ModelStructure.with_its_loss(live, lambda *_, **__: torch.zeros(()), sequence_length=LENGTH)
    write_checkpoint(checkpoints, whole, twin.state_dict(keep_vars=True), {}, step=last)
    twin.load_state_dict(before)
    return follower.finish(checkpoints)


def evaluations(made: Any) -> list[dict[str, float]]:
    """The logged evaluations, without times."""
    ours = [entry for entry in made.state.log_history if any(name.startswith("eval_") for name in entry)]
    timed = ("runtime", "per_second", "preparation_time")
    return [{name: value for name, value in entry.items() if not name.endswith(timed)} for entry in ours]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_metrics_and_the_best_weights_are_those_of_transformers(tmp_path: Path, metric: str) -> None:
    kept, values = Keeping(), {**EVALUATING, "metric_for_best_model": metric}
    own = {
        "compute_metrics": accuracy, "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "eval_dataset": rows(5),
    }  # fmt: skip
    theirs = trainer(tmp_path, kind=transformers.Trainer, callbacks=[kept], **own, **values)
    theirs.train()
    ours = trainer(tmp_path, **own, **values)
    followed(ours, kept, tmp_path)
    assert len(evaluations(theirs)) == 3  # the last one is after the last step, whose turn it is not
    assert evaluations(ours) == evaluations(theirs)
    assert ours.state.best_metric == theirs.state.best_metric
    assert ours.state.best_global_step == theirs.state.best_global_step
    for name, each in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], each), name


@pytest.mark.parametrize("delay", [0, 99])
def test_the_model_is_left_in_the_mode_in_which_transformers_leaves_it(tmp_path: Path, delay: int) -> None:
    kept, values = Keeping(), {**EVALUATING, "eval_delay": delay, "load_best_model_at_end": False}
    theirs = trainer(tmp_path, kind=transformers.Trainer, callbacks=[kept], eval_dataset=rows(5), **values)
    theirs.train()
    ours = trainer(tmp_path, model=model().train(delay == 0), eval_dataset=rows(5), **values)
    followed(ours, kept, tmp_path)
    assert {each.training for each in ours.model.modules()} == {each.training for each in theirs.model.modules()}
    assert ours.model.training is (delay > 0), "an evaluation follows the last step, or none"


def test_several_datasets_and_streams_are_evaluated(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]  # of mappings
        def __iter__(self) -> Any:
            return iter(rows(3))

    kept, values = Keeping(), {**EVALUATING, "metric_for_best_model": "two_loss", "eval_delay": 4}
    own = {"eval_dataset": {"one": rows(5), "two": Stream()}}
    theirs = trainer(tmp_path, kind=transformers.Trainer, callbacks=[kept], **own, **values)
    theirs.train()
    ours = trainer(tmp_path, **own, **values)
    followed(ours, kept, tmp_path)
    assert {name for entry in evaluations(ours) for name in entry} >= {"eval_one_loss", "eval_two_loss"}
    assert evaluations(ours) == evaluations(theirs)
    assert ours.state.best_global_step == theirs.state.best_global_step


def test_text_is_generated_at_evaluations(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=300, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    lengths: list[int] = []

    def count(predicted: Any) -> dict[str, float]:
        lengths.append(predicted.predictions.shape[1])
        return {"sum": float(np.where(predicted.predictions < 0, 0, predicted.predictions).sum())}

    def make(kind: Any, *callbacks: Any) -> Any:
        torch.manual_seed(1)
        given = {**EVALUATING, "predict_with_generate": True, "generation_max_length": 7, "report_to": []}
        settings = {**given, "output_dir": str(tmp_path / "out"), "use_cpu": True, "metric_for_best_model": "sum"}
        return kind(
            model=transformers.T5ForConditionalGeneration(config),
            args=transformers.Seq2SeqTrainingArguments(**settings),
            train_dataset=rows(11), eval_dataset=rows(3), data_collator=collate, compute_metrics=count,
            callbacks=[*callbacks],
        )  # fmt: skip

    kept = Keeping()
    theirs = make(transformers.Seq2SeqTrainer, kept)
    theirs.train()
    ours = make(Seq2SeqTrainer)
    assert isinstance(ours, Trainer)
    followed(ours, kept, tmp_path)
    assert evaluations(ours) == evaluations(theirs)
    assert lengths[:3] == lengths[3:]
    assert max(lengths) > 1


def test_callbacks_read_the_weights_of_evaluations_and_saves(tmp_path: Path) -> None:
    class Reading(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, int, float]] = []

        def on_evaluate(self, args: Any, state: Any, control: Any, *, model: Any, **details: Any) -> None:
            self.seen.append(("evaluate", state.global_step, float(model.lm_head.weight.detach().mean())))

    reading = Reading()
    values = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 3}
    made = trainer(tmp_path, callbacks=[reading], eval_dataset=rows(3), **values)
    follower, checkpoints, trained = made.follow(made.job()), tmp_path / "checkpoints", model()
    follower.saves_in(checkpoints)
    follower.take(next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted)))
    with torch.no_grad():
        trained.lm_head.weight.fill_(2.0)
    gather(checkpoints, trained, 2)
    for entry in (step(1, 5.0), step(2, 5.0), Evaluated(t_s=1.0, step=2, loss=3.0, num_samples=3, duration_s=0.1)):
        follower.take(entry)
    assert not follower.wants_stop
    assert reading.seen == [("evaluate", 2, 2.0)]
    assert "gathers" in made.job().provides


def test_an_evaluation_that_fails_ends_the_run_by_name(tmp_path: Path) -> None:
    def fail(predicted: Any) -> dict[str, float]:
        raise ValueError("no references")

    made = trainer(tmp_path, eval_dataset=rows(3), compute_metrics=fail, eval_strategy="steps", eval_steps=1)
    follower, checkpoints = made.follow(made.job()), tmp_path / "checkpoints"
    follower.saves_in(checkpoints)
    gather(checkpoints, model(), 1)
    for entry in (step(1, 5.0), Evaluated(t_s=1.0, step=1, loss=None, num_samples=0, duration_s=0.1)):
        follower.take(entry)
    assert follower.wants_stop
    with pytest.raises(ConfigError, match="the evaluation after step 1 fails: ValueError: no references"):
        follower.finish(checkpoints)


def test_weights_that_are_not_here_end_the_run_by_name(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=rows(3), compute_metrics=accuracy, eval_strategy="steps", eval_steps=2)
    follower = made.follow(made.job())
    follower.saves_in(tmp_path / "checkpoints")
    for entry in (step(1, 5.0), step(2, 5.0), Evaluated(t_s=1.0, step=2, loss=None, num_samples=0, duration_s=0.1)):
        follower.take(entry)
    with pytest.raises(ConfigError, match="the weights after step 2 were not gathered here"):
        follower.finish(tmp_path)
