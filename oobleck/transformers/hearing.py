"""The steps for which workers wait until a script has heard of them: where its callbacks can stop training, and saves.

No worker waits elsewhere. What transformers brings itself, except for EarlyStoppingCallback, shows and reports alone. A
script that falls behind the run's saves would find those removed of which it has to write checkpoints.
"""

from __future__ import annotations

from typing import Any

from transformers import EarlyStoppingCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from .checks import evaluates, hears, overrider_of
from .epochs import Epochs
from .streams import is_stream


def strategy_steps(args: Any, max_steps: int) -> TrainerState:
    """Return a state that has the arguments' numbers of steps, which may be given as shares of all."""
    state = TrainerState()
    state.compute_steps(args, max_steps)  # type: ignore[no-untyped-call]  # transformers' own
    return state


def evaluation_steps(trainer: Any, epochs: Epochs, steps: TrainerState) -> int | None:
    """Return the number of steps between two evaluations; None without any."""
    if not evaluates(trainer):
        return None
    return epochs.num_steps if trainer.args.eval_strategy == IntervalStrategy.EPOCH else int(steps.eval_steps)


def steps_to_save(args: Any, epochs: Epochs, steps: TrainerState) -> int | None:
    """Return the number of steps between two checkpoints; None where no such number says when they are written."""
    every = {SaveStrategy.STEPS: steps.save_steps, SaveStrategy.EPOCH: epochs.num_steps}.get(args.save_strategy)
    return int(every) if every else None


class Hearing:
    def __init__(self, trainer: Any, epochs: Epochs, *, max_steps: int) -> None:
        self._args, self._epochs, self._max_steps = trainer.args, epochs, max_steps
        self._steps = strategy_steps(trainer.args, max_steps)
        self._eval_steps = evaluation_steps(trainer, epochs, self._steps)
        self._at_logs = hears(trainer, "on_log") or overrider_of(trainer, "log") is not None
        self._at_epochs = hears(trainer, "on_epoch_begin") or hears(trainer, "on_epoch_end")
        # Where epochs of a stream end is known once it is read.
        is_unknown = is_stream(trainer.train_dataset) and (self._at_logs or self._at_epochs)
        self._at_each_step = is_unknown or hears(trainer, "on_step_begin") or hears(trainer, "on_step_end")
        self._at_first = hears(trainer, "on_train_begin")
        is_early = any(isinstance(each, EarlyStoppingCallback) for each in trainer.callback_handler.callbacks)
        hears_evaluations = hears(trainer, "on_evaluate") or overrider_of(trainer, "evaluate") is not None
        self._save_steps = steps_to_save(trainer.args, epochs, self._steps)
        # Which are logged as well.
        self._at_evaluations = self._eval_steps is not None and (is_early or hears_evaluations or self._at_logs)

    @property
    def is_wanted(self) -> bool:
        """Whether workers wait at any step."""
        is_stopped = self._at_each_step or self._at_logs or self._at_epochs or self._at_first or self._at_evaluations
        return is_stopped or self._save_steps is not None

    def is_evaluated(self, step: int) -> bool:
        """Return whether an evaluation follows a step."""
        return self._eval_steps is not None and (step % self._eval_steps == 0 or step == self._max_steps)

    def is_asked(self, step: int) -> bool:
        """Return whether the script has to hear of a step."""
        return (
            self._at_each_step
            or (self._save_steps is not None and step % self._save_steps == 0)
            or (self._at_epochs and (self._epochs.epoch_of(step)[1] == 0 or self._epochs.is_last(step)))
            or (self._at_logs and self._is_logged(step))
            or (self._at_evaluations and self.is_evaluated(step))
        )

    def _is_logged(self, step: int) -> bool:
        args = self._args
        every = self._steps.logging_steps if args.logging_strategy == IntervalStrategy.STEPS else 0
        is_due = bool(every) and step % every == 0
        is_due = is_due or (args.logging_strategy == IntervalStrategy.EPOCH and self._epochs.is_last(step))
        return is_due or (step == 1 and bool(args.logging_first_step))
