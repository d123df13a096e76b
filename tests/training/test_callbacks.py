"""A script's callbacks hear of a journal as a Trainer would tell them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback

from oobleck.control.journal import Evaluated, JobEnded, JobStarted, JournalEntry, StepDone
from oobleck.control.messages import CommitRecord
from oobleck.job import JobSpec
from oobleck.training.callbacks import CallbackRunner


def step(number: int, loss: float = 1.0, grad_norm: float = 2.0) -> StepDone:
    record = CommitRecord(
        step=number,
        generation=1,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=0.1,
        num_samples=8,
        samples_repeated=0,
        samples_missing=0,
        duration_s=0.1,
    )
    return StepDone(t_s=float(number), record=record, tokens=64)


def evaluated(number: int, loss: float) -> Evaluated:
    return Evaluated(t_s=float(number), step=number, loss=loss, num_samples=4, duration_s=0.1)


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_init_end(self, args, state, control, **kwargs):
        self.heard.append(("init", args.max_steps, args.bf16))

    def on_step_end(self, args, state, control, **kwargs):
        self.heard.append(("step", state.global_step))

    def on_log(self, args, state, control, logs, **kwargs):
        self.heard.append(("log", logs))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.heard.append(("evaluate", metrics))

    def on_train_end(self, args, state, control, **kwargs):
        self.heard.append(("end", len(state.log_history)))


def told(callback: object, *entries: JournalEntry, job: JobSpec | None = None) -> CallbackRunner:
    runner = CallbackRunner([callback], job or JobSpec(max_steps=9, dtype="bfloat16"))
    for entry in entries:
        runner.take(entry)
    return runner


def test_events_come_in_the_order_of_the_journal():
    recorder = Recorder()
    started = JobStarted(t_s=0, version="1", job=JobSpec(), nodes=(), started_at="")
    told(
        recorder,
        started,
        step(1),
        step(2, grad_norm=float("inf")),
        evaluated(2, 3.5),
        JobEnded(t_s=3, exit_code=0, reason=""),
    )
    assert recorder.heard == [
        ("init", 9, True),
        ("step", 1),
        ("log", {"loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.1}),
        ("step", 2),
        ("log", {"loss": 1.0, "learning_rate": 0.1}),
        ("evaluate", {"eval_loss": 3.5}),
        ("log", {"eval_loss": 3.5}),
        ("end", 3),
    ]


def test_transformers_own_early_stopping_stops():
    runner = told(EarlyStoppingCallback(early_stopping_patience=2), evaluated(1, 3.0), evaluated(2, 3.5))
    assert not runner.wants_stop
    runner.take(evaluated(3, 3.6))
    assert runner.wants_stop


def test_a_callback_that_fails_is_told_of_and_called_again(capsys: pytest.CaptureFixture[str]):
    class Broken:
        calls = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.calls += 1
            raise ValueError("what?")

    broken = Broken()
    told(broken, step(1), step(2))
    assert broken.calls == 2
    assert "Broken.on_step_end failed:" in capsys.readouterr().err
