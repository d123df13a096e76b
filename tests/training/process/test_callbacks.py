"""A script's callbacks hear of a journal as a Trainer would tell them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback, TrainerState
from transformers.integrations import integration_utils

from oobleck.control.journal import Evaluated, JobEnded, JobStarted, JournalEntry, PlanAdopted, StepDone
from oobleck.control.protocol import CommitRecord
from oobleck.job import JobSpec, OptimizerSpec
from oobleck.training.process.callbacks import CallbackRunner, trackers
from tests.control.journals import run_with_a_loss


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


SINK = """
__version__ = "3.0"
said = []
class utils:
    class validation: MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH = 500, 100
def is_tracking_uri_set(): return True
def get_tracking_uri(): return "here"
def active_run(): return RUN if said and said[-1] != ("end",) else None
class RUN:
    class info: run_id = "1"
def start_run(**options): said.append(("run", options["run_name"]))
def log_params(params, **_): said.append(("params", params))
def log_metrics(metrics, step, **_): said.append(("metrics", step, metrics))
def end_run(): said.append(("end",))
class SummaryWriter:
    def __init__(self, log_dir): said.append(("writer", log_dir))
    def add_text(self, name, text): said.append((name, text))
    def add_scalar(self, name, value, step): said.append((name, value, step))
    def flush(self): pass
    def close(self): said.append(("closed",))
"""


@pytest.fixture
def sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[tuple[Any, ...]]]:
    """Stands for a tracker's package: keeps what transformers' own callback for it says."""

    def install(package: str) -> list[tuple[Any, ...]]:
        (tmp_path / f"{package}.py").write_text(SINK)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, package, None)  # so that what was there before is there again after the test
        del sys.modules[package]
        said: list[tuple[Any, ...]] = importlib.import_module(package).said
        return said

    return install


RUN = (
    JobStarted(t_s=0, version="1", job=JobSpec(), nodes=(), started_at=""),
    next(entry for entry in run_with_a_loss() if isinstance(entry, PlanAdopted)),
    step(1),
    evaluated(1, 2.5),
    JobEnded(t_s=3, exit_code=0, reason=""),
)


def test_mlflows_callback_has_all_arguments_and_metrics(sink, capsys):
    said = sink("mlflow")
    told(integration_utils.MLflowCallback(), *RUN, job=JobSpec(tag="mine", global_batch_size=6, microbatch_size=3))
    assert "failed" not in capsys.readouterr().err
    assert said[0] == ("run", "mine")
    parameters = {name: value for kind, *rest in said if kind == "params" for name, value in rest[0].items()}
    assert parameters["per_device_train_batch_size"] == 3
    assert parameters["lr_scheduler_type"] == "cosine"
    assert ("metrics", 1, {"eval_loss": 2.5}) in said
    assert said[-1] == ("end",)


def test_tensorboards_callback_has_all_arguments_and_scalars(sink, capsys):
    said = sink("tensorboardX")
    writer = sys.modules["tensorboardX"].SummaryWriter("logs")
    if not integration_utils.is_tensorboard_available():
        pytest.skip("transformers looked for TensorBoard before, and keeps the answer")
    told(integration_utils.TensorBoardCallback(writer), *RUN, job=JobSpec(tag="mine"))
    assert "failed" not in capsys.readouterr().err
    written = {name: rest for name, *rest in said}
    assert json.loads(written["args"][0])["output_dir"] == "mine"
    assert written["train/loss"] == [1.0, 1]
    assert written["eval/loss"] == [2.5, 1]
    assert said[-1] == ("closed",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("scheduler", get_args(get_type_hints(OptimizerSpec)["lr_scheduler_type"]))
def test_arguments_and_state_write_themselves_down_as_transformers_do(scheduler, dtype, tmp_path):
    job = JobSpec(dtype=dtype, eval_steps=5, optimizer=OptimizerSpec(lr_scheduler_type=scheduler))
    heard = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            assert json.loads(args.to_json_string())["lr_scheduler_type"] == scheduler
            assert json.loads(json.dumps(args.to_dict()))["bf16"] == (dtype == "bfloat16")
            plain = (bool, int, float, str)
            assert all(isinstance(value, plain) for value in args.to_sanitized_dict().values())
            assert args.train_batch_size == args.job.global_batch_size == 8
            assert (args.world_size, args.process_index, args.n_gpu, args.should_save) == (1, 0, 0, True)
            assert "learning_rate" in str(args)
            state.save_to_json(str(tmp_path / "state.json"))
            heard.append(TrainerState.load_from_json(str(tmp_path / "state.json")).global_step)
            assert json.loads(json.dumps(asdict(state)))["max_steps"] == 120

    told(Tracker(), step(1), step(2), job=job)
    assert heard == [1, 2]


@pytest.mark.parametrize("callback", [EarlyStoppingCallback, PrinterCallback, ProgressCallback])
def test_transformers_other_callbacks_find_what_they_ask_for(callback, capsys):
    told(callback(), *RUN, job=JobSpec(eval_steps=1))
    assert "failed" not in capsys.readouterr().err


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


def test_an_epochs_end_that_a_callback_asks_for_is_said_once_to_be_none():
    class Quick:
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = True

    runner = told(Quick(), step(1), step(2))
    assert not runner.wants_stop
    (said,) = runner.failures
    assert "Quick.on_step_end sets control.should_epoch_stop, which has no effect" in said


def test_a_tracker_of_the_job_gets_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    job = JobSpec(max_steps=9, report_to=("tensorboard",))
    runner = CallbackRunner(trackers(job), job)
    for entry in run_with_a_loss():
        runner.take(entry)
    assert runner.failures == []
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [each.step for each in events.Scalars("train/loss")] == [
        entry.record.step for entry in run_with_a_loss() if isinstance(entry, StepDone)
    ]
