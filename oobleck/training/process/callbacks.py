"""Calls a script's callbacks for entries of the journal.

Callbacks have the events of transformers' `TrainerCallback`, whose subclasses work unchanged, and one more:
`on_recovery`. They run next to the master and not in a worker, so that no failure of a node ends them or calls them
twice, and none of them delays training. So they see what the journal holds: losses, rates, evaluations, recoveries; no
tensors.

    event            when
    on_init_end      the run begins
    on_train_begin   the first plan is in force
    on_step_begin    after one step's events and before the next step's
    on_step_end      a step is committed: state.global_step, state.log_history
    on_log           after each step and each evaluation: logs=
    on_evaluate      an evaluation is done: metrics={"eval_loss": …}
    on_save          a checkpoint is complete on disk
    on_recovery      the run continues after a loss, a join or a departure: recovery=, the journal's entry;
                     text=, it as a sentence
    on_train_end     the run ends
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType

from oobleck.control import journal
from oobleck.job import JobSpec


class CallbackRunner:
    """Calls callbacks, one event after the other. A callback that raises is reported, and called for later events."""

    def __init__(self, callbacks: Sequence[object], job: JobSpec) -> None:
        self._callbacks = callbacks
        self._arguments = JobArguments(job)
        self._state = TrainerState(
            max_steps=job.max_steps,
            train_batch_size=job.microbatch_size,
            logging_steps=1,
            eval_steps=job.eval_steps or 0,
            save_steps=job.checkpoint.save_steps or 0,
        )
        self._control = TrainerControl()
        self._has_begun = False
        self._failed: set[str] = set()
        self.failures: list[str] = []
        """Sentences on first failures; the reader that shows one removes it. stderr has all failures."""

    @property
    def wants_stop(self) -> bool:
        """Whether a callback has set `control.should_training_stop`."""
        return bool(self._control.should_training_stop)

    def take(self, entry: journal.JournalEntry) -> None:
        """Call the callbacks for the next entry of the journal."""
        for event, details in self._events(entry):
            for callback in self._callbacks:
                self._call(callback, event, details)

    def _events(self, entry: journal.JournalEntry) -> Iterator[tuple[str, dict[str, Any]]]:
        match entry:
            case journal.JobStarted():
                yield "on_init_end", {}
            case journal.PlanAdopted() if not self._has_begun:
                self._has_begun = True
                yield "on_train_begin", {}
                yield "on_step_begin", {}
            case journal.StepDone():
                yield from self._step(entry)
            case journal.Evaluated(loss=float() as loss):
                yield "on_evaluate", {"metrics": {"eval_loss": loss}}
                best = self._state.best_metric  # updated after `on_evaluate`, where callbacks compare with it
                self._state.best_metric = loss if best is None else min(best, loss)
                yield "on_log", {"logs": self._note({"eval_loss": loss}, entry.step)}
            case journal.CheckpointSaved():
                yield "on_save", {}
            case journal.RecoveryDone():
                yield "on_recovery", {"recovery": entry, "text": entry.sentence}
            case journal.JobEnded():
                yield "on_train_end", {}

    def _step(self, entry: journal.StepDone) -> Iterator[tuple[str, dict[str, Any]]]:
        record = entry.record
        self._state.global_step = record.step
        logs = {"loss": record.loss, "grad_norm": record.grad_norm, "learning_rate": record.learning_rate}
        noted = self._note({name: value for name, value in logs.items() if math.isfinite(value)}, record.step)
        yield "on_step_end", {}
        yield "on_log", {"logs": noted}
        # The journal has no entry for a step's begin, which is the moment after the step before.
        if record.step < self._state.max_steps:
            yield "on_step_begin", {}

    def _note(self, logs: dict[str, float], step: int) -> dict[str, float]:
        self._state.log_history.append({**logs, "step": step})
        return logs

    def _call(self, callback: object, event: str, details: dict[str, Any]) -> None:
        method: Any = getattr(callback, event, None)
        if method is None:
            return
        name = f"{type(callback).__name__}.{event}"
        try:
            answer = method(self._arguments, self._state, self._control, **details)
        except Exception as error:  # noqa: BLE001  the user's code, on which training does not depend
            print(f"{name} failed:", file=sys.stderr)  # noqa: T201  the process's own log
            traceback.print_exc()
            if name not in self._failed:
                self._failed.add(name)
                self.failures.append(f"the callback {name} failed: {type(error).__name__}: {error}")
            return
        if isinstance(answer, TrainerControl):
            self._control = answer
        if self._control.should_epoch_stop:
            self._control.should_epoch_stop = False
            said = f"the callback {name} sets control.should_epoch_stop, which has no effect: a job() has no epochs"
            if said not in self._failed:
                self._failed.add(said)
                self.failures.append(said)


def trackers(job: JobSpec) -> list[object]:
    """Return transformers' own callbacks for `report_to`."""
    classes: list[Any] = get_reporting_integration_callbacks(list(job.report_to))  # type: ignore[no-untyped-call]  # transformers' own
    return [each() for each in classes]


class JobArguments(TrainingArguments):
    """A job by the names of `TrainingArguments`, with transformers' defaults for the rest.

    Trackers write all arguments down (`to_dict`, `to_json_string`, `to_sanitized_dict`), so they need the whole class.
    """

    def __init__(self, job: JobSpec) -> None:
        # The base's constructor is not called: it sets up devices and processes, and needs the package accelerate.
        for field in fields(TrainingArguments):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            setattr(self, field.name, None if default is MISSING else default)
        for name, value in _values(job).items():
            setattr(self, name, value)
        self.job = job
        self.distributed_state = None
        self._n_gpu = 0
        self.__dict__["_setup_devices"] = torch.device("cpu")  # this process computes nothing

    @property
    def train_batch_size(self) -> int:
        return self.job.global_batch_size

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.to_json_string()})"  # type: ignore[no-untyped-call]  # transformers' own

    __repr__ = __str__


def _values(job: JobSpec) -> dict[str, object]:
    optimizer, checkpoint = job.optimizer, job.checkpoint
    return {
        "run_name": job.tag,
        "output_dir": job.tag,
        "report_to": list(job.report_to),
        "max_steps": job.max_steps,
        "per_device_train_batch_size": job.microbatch_size,
        "per_device_eval_batch_size": job.microbatch_size,
        "seed": job.seed,
        "bf16": job.dtype == "bfloat16",
        "fp16": job.dtype == "float16",
        "use_cpu": job.device == "cpu",
        "gradient_checkpointing": job.recompute != "none",
        "torch_compile": job.compile,
        "eval_strategy": IntervalStrategy.NO if job.eval_steps is None else IntervalStrategy.STEPS,
        "eval_steps": job.eval_steps,
        "logging_strategy": IntervalStrategy.STEPS,
        "logging_steps": 1,
        "save_strategy": SaveStrategy.STEPS if checkpoint.enabled else SaveStrategy.NO,
        "save_steps": checkpoint.save_steps,
        "save_total_limit": checkpoint.save_total_limit,
        "optim": optimizer.optim,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_epsilon": optimizer.adam_epsilon,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": SchedulerType(optimizer.lr_scheduler_type),
        "lr_scheduler_kwargs": dict(optimizer.lr_scheduler_kwargs),
        "warmup_steps": optimizer.warmup_steps,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "load_best_model_at_end": True,
    }
