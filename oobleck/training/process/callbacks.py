"""A script's callbacks, called for what the journal says.

They have the events of transformers' `TrainerCallback`, whose subclasses work as they are, and one more: `on_recovery`.
They run beside the master and not in a worker, so that no failure of a node ends them or calls them twice, and none of
them can hold up training. So they see what the journal holds: losses, rates, evaluations, recoveries; no tensors.

    event            when
    on_init_end      the run begins
    on_train_begin   the first plan is in force
    on_step_begin    before each step, as far as the order of events goes
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
from typing import Any

from transformers import TrainerControl, TrainerState

from oobleck.control import journal
from oobleck.job import JobSpec

from .callback_arguments import JobArguments


class CallbackRunner:
    """Calls callbacks, one event after the other. One that raises is reported, and continues to be called."""

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
        """What has failed for the first time, for people, and taken out by what shows them. All are on stderr."""

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
            case journal.Evaluated():
                yield "on_evaluate", {"metrics": {"eval_loss": entry.loss}}
                best = self._state.best_metric  # callbacks compare with what was best before
                self._state.best_metric = entry.loss if best is None else min(best, entry.loss)
                yield "on_log", {"logs": self._note({"eval_loss": entry.loss}, entry.step)}
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
        if record.step < self._state.max_steps:
            yield "on_step_begin", {}

    def _note(self, logs: dict[str, float], step: int) -> dict[str, float]:
        self._state.log_history.append({**logs, "step": step})
        return logs

    def _call(self, callback: object, event: str, details: dict[str, Any]) -> None:
        method: Any = getattr(callback, event, None)
        if method is None:
            return
        try:
            answer = method(self._arguments, self._state, self._control, **details)
        except Exception as error:  # noqa: BLE001  it is somebody else's code, and training does not depend on it
            name = f"{type(callback).__name__}.{event}"
            print(f"{name} failed:", file=sys.stderr)  # noqa: T201  its own log
            traceback.print_exc()
            if name not in self._failed:
                self._failed.add(name)
                self.failures.append(f"the callback {name} failed: {type(error).__name__}: {error}")
            return
        if isinstance(answer, TrainerControl):
            self._control = answer
