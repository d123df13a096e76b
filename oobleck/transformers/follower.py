"""Reports a run to a trainer in the script's own process: keeps its state, writes its logs, calls its callbacks.

Events follow the journal, so callbacks see each committed step once, whatever fails.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerState
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, TrainOutput, speed_metrics
from transformers.utils import logging

from oobleck.control import journal
from oobleck.control.protocol import CommitRecord
from oobleck.errors import ConfigError, CorruptCheckpoint, ExitCode
from oobleck.training.checkpoint import newest_checkpoint, newest_weights
from oobleck.training.model import unwrapped

from .best import BestCheckpoint
from .callbacks import Callbacks, reported
from .checks import asks_for_best
from .counts import BatchCounts
from .elsewhere import WeightsElsewhere
from .gathered import GatheredWeights, evaluate, fitted
from .hearing import Hearing, steps_to_save
from .kept_state import KeptStates, new_state
from .plain_checkpoints import PlainCheckpoints
from .streams import is_stream

if TYPE_CHECKING:
    from .job import TrainerJob

_logger = logging.get_logger("transformers.trainer")  # by which scripts ask for what train() says, or silence it


class RunFollower:
    def __init__(self, trainer: Any, job: TrainerJob) -> None:
        self._trainer: transformers.Trainer = trainer
        self._job = job
        self._epochs = job.epochs
        self._max_steps = job.max_steps
        self._started_s = time.time()
        self._has_begun = False
        self._has_looked = False
        """Whether the nodes are ready, and what they have saved is known."""
        self._first_step: int | None = None
        self._losses: list[float] = []
        """Losses of the steps since the last log."""
        self._total_loss = 0.0
        self._callbacks = Callbacks(trainer, job.epochs, max_steps=job.max_steps)
        self._weights = GatheredWeights(trainer.model)
        self._elsewhere = WeightsElsewhere(unwrapped(trainer.model), self._refusal_of_use)
        self._checkpoints: Path | None = None
        self._saved_step: int | None = None
        """The step of the newest checkpoint that callbacks know."""
        self._best: BestCheckpoint | None = None
        self._unwritten: tuple[str, int] | None = None
        """The checkpoint of the present step, whose state is not final."""
        self._held: journal.CheckpointSaved | None = None
        """A checkpoint of the present step, of which callbacks hear after its evaluation, as with transformers."""
        self._hearing = hearing = Hearing(trainer, self._epochs, max_steps=self._max_steps)
        self._answers = journal.Answers(is_asked=hearing.is_asked, is_evaluated=hearing.is_evaluated)
        self._last_record: CommitRecord | None = None
        self._newest_epoch = -1
        """The newest epoch of whose beginning callbacks have heard, from 0."""
        self._ending: CommitRecord | None = None
        """The record of the present step, until callbacks have heard that an epoch ends with it."""
        trainer.is_in_train = True
        trainer.state = self._new_state()
        self._states = KeptStates(trainer)
        self._counts = BatchCounts(trainer, job, self._states)
        self._plain = PlainCheckpoints(trainer, job)
        self._places = [trainer.resumes_from.parent] if trainer.resumes_from is not None else []
        """Where the checkpoint that the run begins from may be."""

    def _new_state(self) -> TrainerState:
        trainer = self._trainer
        state = new_state(trainer)
        state.train_batch_size = trainer.args.train_batch_size
        state.compute_steps(trainer.args, self._max_steps)  # type: ignore[no-untyped-call]  # transformers' own
        state.max_steps = self._max_steps
        state.num_train_epochs = self._epochs.num_epochs(self._max_steps)
        return state

    def saves_in(self, checkpoints: Path) -> None:
        """Say where the run's checkpoints are, before its first entry."""
        self._weights.look_in(checkpoints)
        self._places.append(checkpoints)
        self._checkpoints = checkpoints
        trainer: Any = self._trainer
        if asks_for_best(trainer.args):
            self._best = BestCheckpoint(checkpoints, begins_from=trainer.resumes_from)

    @property
    def wants_stop(self) -> bool:
        """Whether a callback has set `control.should_training_stop` before the last step."""
        return self._callbacks.want_stop

    def take(self, entry: journal.JournalEntry) -> None:
        """Apply the journal's next entry to the trainer. A callback that fails is reported on stderr."""
        with self._elsewhere:
            self._take(entry)
        self._answers.note(entry)

    def take_allowed(self) -> tuple[int, int] | None:
        """Return the newest step that callbacks have heard of, and the last one that may begin before they hear more.

        None where workers need no word. It is not called while callbacks want training to stop.
        """
        answer = self._answers.take()
        if answer is not None and self._trainer.control.should_training_stop:
            return answer[0], answer[0] + 1  # they stop it before the first step, of which transformers does one
        return answer

    def finish(self, checkpoints: Path) -> TrainOutput:
        """Load the trained weights, and return what `train()` returns.

        Raises CorruptCheckpoint, and ConfigError where a callback has changed what workers train with. Exits where
        the run was stopped before it had anything.
        """
        trainer = self._trainer
        self._tell_held()
        self._end_epoch()
        if self._callbacks.problem:
            raise ConfigError(self._callbacks.problem)
        try:
            self._load(checkpoints, newest_weights(checkpoints))
        except CorruptCheckpoint:
            if self._has_looked or self._has_begun:
                raise
            sys.stderr.write("oobleck: the run was stopped before its first step, so there are no trained weights\n")
            raise SystemExit(ExitCode.DONE) from None
        self._weights.are_here = True
        self._end_epoch_early(checkpoints)
        if self._first_step is None:  # an earlier run did all steps
            self._places.append(checkpoints)
            self._restore(*newest_checkpoint(checkpoints))
        if not self._has_begun:
            self._begin(has_start_weights=False)
        if self._best is not None and trainer.args.load_best_model_at_end:
            self._load_best(checkpoints, self._best.weights())
        first = self._first_step or trainer.state.global_step + 1
        num_steps = trainer.state.global_step - first + 1
        mean = self._total_loss / max(num_steps, 1)
        num_samples = num_steps * trainer.args.train_batch_size * self._epochs.batches_per_step
        metrics: dict[str, float] = speed_metrics(  # type: ignore[no-untyped-call]  # transformers' own
            "train", self._started_s, num_samples=num_samples, num_steps=num_steps
        )
        metrics["total_flos"] = trainer.state.total_flos
        metrics["train_loss"] = mean
        trainer.is_in_train = False
        stopped_at = self._callbacks.stopped_at
        if stopped_at is not None and trainer.state.global_step > stopped_at:
            sys.stderr.write(
                f"oobleck: a callback asked to stop after step {stopped_at}, and the run stopped after step "
                f"{trainer.state.global_step}: workers had begun these steps\n"
            )
        # First, because an error of a callback in on_train_end ends the script. Without the line of the whole training,
        # like what transformers saves: a script that continues with more steps trains on.
        self._save_state(checkpoints)
        trainer.log(metrics)
        self._plain.leave_best()
        self._set_mode()
        self._callbacks.call("on_train_end")
        return TrainOutput(trainer.state.global_step, mean, metrics)

    def _load_best(self, checkpoints: Path, best: Mapping[str, torch.Tensor] | None) -> None:
        """Load the best weights: those that the run has kept, or those of before the checkpoint it began from."""
        trainer, state = self._trainer, self._trainer.state
        if best is not None:
            self._load(checkpoints, best)
        elif state.best_model_checkpoint is not None:
            trainer._load_from_checkpoint(state.best_model_checkpoint)
        elif state.best_metric is not None:
            sys.stderr.write(f"oobleck: the best weights, of step {state.best_global_step}, are not here any more\n")
            return
        if state.best_metric is not None:
            sys.stderr.write(
                f"oobleck: the weights are those of step {state.best_global_step}, the best by "
                f"{trainer.args.metric_for_best_model} ({state.best_metric:g})\n"
            )

    def _set_mode(self) -> None:
        """Leave the model in the mode of transformers' loop: of evaluation, if one followed the last step."""
        trainer: Any = self._trainer
        trainer.model.train(not self._is_evaluated)

    @property
    def _is_evaluated(self) -> bool:
        """Whether the history has an evaluation of the present step."""
        state = self._trainer.state
        last = (entry for entry in state.log_history if entry["step"] == state.global_step)
        return any(name.startswith("eval_") for entry in last for name in entry)

    def _load(self, checkpoints: Path, weights: Mapping[str, torch.Tensor]) -> None:
        model = unwrapped(self._trainer.model)
        known = model.state_dict(keep_vars=True)
        fitted(model, weights, checkpoints)
        model.load_state_dict(weights, strict=False)
        # The script may hold these tensors, in an optimizer of its own for instance.
        after = model.state_dict(keep_vars=True)
        assert all(after[name] is tensor for name, tensor in known.items()), "values are set, tensors stay"

    def _end_epoch_early(self, checkpoints: Path) -> None:
        """Do what transformers does at the end of an epoch that a callback has stopped within."""
        trainer, step = self._trainer, self._trainer.state.global_step
        if step != self._callbacks.stopped_at or self._last_record is None or self._epochs.is_last(step):
            return
        args, control = trainer.args, trainer.control
        self._callbacks.call("on_epoch_end")
        self._log(self._last_record)
        if args.eval_strategy == IntervalStrategy.EPOCH and control.should_evaluate:
            metrics = self._evaluate_here()
            if metrics is not None and self._is_best(metrics):
                self._best = None  # whose weights are older than those that are loaded
        if args.save_strategy == SaveStrategy.EPOCH and control.should_save:
            self._saved(newest_checkpoint(checkpoints)[0], step)

    def _restore(self, restored: str | None, step: int) -> None:
        """Restore the state of a step from the checkpoint `restored`, or else the step alone."""
        trainer = self._trainer
        trainer.state.global_step, trainer.state.epoch = step, self._epochs.progress(step) if step else 0
        if restored is not None and any(self._states.read(place / restored) for place in self._places):
            return
        if trainer.args.restore_callback_states_from_checkpoint:
            sys.stderr.write("oobleck: the checkpoint has no states of callbacks, which start afresh\n")
        self._counts.go_back(step)

    def _save_state(self, checkpoints: Path) -> None:
        # A script that runs again after the last step trains nothing, and finds its state here.
        self._note_state()
        self._states.write(checkpoints, newest_checkpoint(checkpoints)[0], self._trainer.state.global_step)

    def _take(self, entry: journal.JournalEntry) -> None:
        trainer = self._trainer
        match entry:
            case journal.PlanAdopted() if not self._has_begun:
                # A run that resumes begins with other weights than the script's model.
                if begins_after := max(entry.boundary, entry.restored_step or 0):
                    self._restore(entry.restored, begins_after)
                self._begin(has_start_weights=begins_after == 0)
            case journal.JobStarted():
                every = steps_to_save(trainer.args, self._epochs, trainer.state)
                if every is not None and every < self._max_steps:  # the last step is saved in any case
                    self._plain.look_at(entry.job.checkpoint, every=every)
            case journal.ProfileKnown():
                self._has_looked = True
            case journal.StepDone():
                self._step(entry.record)
            case journal.Evaluated():
                if trainer.args.eval_strategy == IntervalStrategy.EPOCH:
                    self._end_epoch()
                self._evaluated(entry)
                self._tell_held()
                if not self._is_saved_first:
                    self._end_epoch()
            case journal.CheckpointSaved():
                self._checkpoint_saved(entry, is_last_word=self._is_evaluated)
            case journal.RecoveryDone():
                self._callbacks.call_on_recovery(entry)

    def _begin(self, *, has_start_weights: bool) -> None:
        self._has_begun = True
        trainer: Any = self._trainer
        if not has_start_weights:
            self._weights.are_gone()
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        self._note_state()
        for line in _beginning(trainer, self._job):
            _logger.info(line)
        if self._best is not None and has_start_weights:
            self._best.forget()
        elif self._best is not None and (kept := self._best.restore()) is not None:
            self._trainer.state.best_metric, self._trainer.state.best_global_step = kept
        self._callbacks.call("on_train_begin")
        if self._trainer.args.eval_on_start and has_start_weights:
            self._evaluate_here()
        elif self._trainer.args.eval_on_start:
            sys.stderr.write("oobleck: eval_on_start has no effect: the weights of a run that continues are on nodes\n")

    def _step(self, record: CommitRecord) -> None:
        trainer, step = self._trainer, record.step
        has_gone_back = step <= trainer.state.global_step
        self._tell_held()
        if has_gone_back:
            self._ending = None  # the epoch's last step is run again
        self._end_epoch()
        if self._first_step is None:
            self._first_step = step
            self._callbacks.begin()
        self._last_record = record
        self._note_state()  # of the step before, which may have been evaluated
        self._begin_epoch(step)
        self._callbacks.call("on_step_begin")
        if has_gone_back:
            self._counts.go_back(step - 1)
        self._counts.add(step)
        trainer.state.global_step, trainer.state.epoch = step, self._epochs.progress(step)
        self._weights.are_gone()
        self._note_loss(record.loss)
        self._callbacks.call("on_step_end")
        self._log(record)
        self._callbacks.require_due_end(step)
        self._callbacks.remark_on_wishes(step)
        if step == self._max_steps or self._epochs.is_last(step):
            self._ending = record
        if not self._is_evaluated_first and not self._is_saved_first:
            self._end_epoch()

    def _begin_epoch(self, step: int) -> None:
        """Tell callbacks once of each epoch, whether or not the run begins within it."""
        epoch, _ = self._epochs.epoch_of(step)
        if epoch > self._newest_epoch:
            self._newest_epoch = epoch
            self._callbacks.call("on_epoch_begin")

    def _end_epoch(self) -> None:
        """Tell callbacks of an epoch that ends with the present step, unless they have heard of it."""
        record, self._ending = self._ending, None
        if record is not None:
            self._callbacks.call("on_epoch_end")
            # transformers asks for logs by epoch only in on_epoch_end. What has been logged is not logged twice.
            self._log(record)

    @property
    def _is_evaluated_first(self) -> bool:
        """Whether the evaluation of the present step comes before the end of an epoch."""
        step = self._trainer.state.global_step
        return self._trainer.args.eval_strategy == IntervalStrategy.STEPS and self._hearing.is_evaluated(step)

    @property
    def _is_saved_first(self) -> bool:
        """Whether the end of an epoch waits for the checkpoint of the present step.

        It does not while training goes on: the disk takes some steps, and callbacks may stop training in on_epoch_end.
        """
        return self._trainer.args.save_strategy == SaveStrategy.STEPS and self._is_over

    @property
    def _is_over(self) -> bool:
        return self._trainer.state.global_step == self._max_steps

    def _note_state(self) -> None:
        with reported():
            self._states.note(is_saved=self._saved_step == self._trainer.state.global_step)
        if self._unwritten is not None and self._unwritten[1] == self._trainer.state.global_step:
            self._write_state(*self._unwritten)
        self._unwritten = None

    def _write_state(self, name: str, step: int) -> None:
        if self._checkpoints is not None:
            self._states.write(self._checkpoints, name, step)
            self._write_plain_state(step)

    def _write_plain_state(self, step: int) -> None:
        if self._trainer.args.save_strategy != SaveStrategy.NO and (content := self._states.content(step)) is not None:
            with reported():
                self._plain.write_state(step, content)
            self._states.give_callbacks(step)

    def _tell_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._checkpoint_saved(held, is_last_word=True)

    def _checkpoint_saved(self, entry: journal.CheckpointSaved, *, is_last_word: bool) -> None:
        """Write a checkpoint, and tell callbacks; `is_last_word`: no evaluation of the present step will follow."""
        if entry.step == self._trainer.state.global_step:
            self._note_state()
            self._unwritten = entry.name, entry.step  # again, as its evaluation may still come
        self._write_state(entry.name, entry.step)
        args, is_present = self._trainer.args, entry.step == self._trainer.state.global_step
        is_by_epoch = args.save_strategy == SaveStrategy.EPOCH
        # What strategies ask for at steps comes before what they ask for at the end of an epoch.
        is_early = is_present and self._hearing.is_evaluated(entry.step)
        is_early = is_early and (is_by_epoch or args.eval_strategy == IntervalStrategy.STEPS)
        if is_early and not is_last_word:
            self._held = entry
        elif self._is_save_due(entry.step):
            if is_present and is_by_epoch:
                self._end_epoch()
            with self._weights.saved(entry.name):
                self._saved(entry.name, entry.step)
            if is_present and self._is_over:
                self._end_epoch()

    def _is_save_due(self, step: int) -> bool:
        """Return whether the script asks for a checkpoint of a step: the run saves others for itself."""
        strategy, is_last = self._trainer.args.save_strategy, step == self._max_steps
        if strategy == SaveStrategy.STEPS:
            return is_last or step % self._trainer.state.save_steps == 0
        return strategy == SaveStrategy.EPOCH and (is_last or self._epochs.is_last(step))

    def _saved(self, name: str | None, step: int) -> None:
        """Report a checkpoint once, with the state as it was at its step."""
        state = self._trainer.state
        if step == self._saved_step:
            return
        self._saved_step = step
        now = state.global_step, state.epoch  # the checkpoint was complete on disk some steps later
        state.global_step, state.epoch = step, self._epochs.progress(step)
        try:
            self._write_plain(step, name)
            self._callbacks.call("on_save")
            self._callbacks.require_due_end(step)
        finally:
            state.global_step, state.epoch = now

    def _write_plain(self, step: int, name: str | None) -> None:
        """Write a checkpoint of transformers' kind, with the optimizer's state if the run has saved one by a name."""
        if self._checkpoints is None:
            return
        with reported():  # a full disk does not end the run
            self._plain.write(step, self._weights.fetch, None if name is None else self._checkpoints / name)
            self._write_plain_state(step)
            self._plain.rotate()

    def _note_loss(self, loss: float) -> None:
        # Like transformers, replace a loss that is no number by the mean of those before.
        if self._trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = sum(self._losses) / (1 + len(self._losses))
        self._losses.append(loss)
        self._total_loss += loss

    def _log(self, record: CommitRecord) -> None:
        if not self._trainer.control.should_log or not self._losses:
            return
        logs = {
            "loss": sum(self._losses) / len(self._losses),
            "grad_norm": record.grad_norm,
            "learning_rate": record.learning_rate,
        }
        self._losses = []
        with self._callbacks.noting("on_log"):
            self._trainer.log(logs, self._started_s)

    def _evaluated(self, entry: journal.Evaluated) -> None:
        args, state = self._trainer.args, self._trainer.state
        with self._weights.gathered(entry.step) as directory:
            # Workers evaluate the step that they continue from. Callbacks that count have heard of it.
            if self._first_step is None and self._is_evaluated:
                return
            if (state.epoch if args.eval_strategy == IntervalStrategy.EPOCH else entry.step) < args.eval_delay:
                return
            if entry.loss is not None:
                metrics: dict[str, float] | None = self._evaluated_there(entry, entry.loss)
            elif self._weights.fetch():
                metrics = self._evaluate_here()
            else:
                self._callbacks.stop_for(
                    f"the weights after step {entry.step} were not gathered here, so none are evaluated"
                )
                return
            self._callbacks.require_due_end(entry.step)
            if metrics is not None and self._is_best(metrics) and directory is not None:
                self._keep_best(directory)

    def _evaluated_there(self, entry: journal.Evaluated, loss: float) -> dict[str, float]:
        """Report an evaluation of the workers."""
        trainer = self._trainer
        metrics = {"eval_loss": loss, "eval_runtime": round(entry.duration_s, 4)}
        if entry.duration_s > 0:
            num_batches = math.ceil(entry.num_samples / trainer.args.eval_batch_size)
            metrics["eval_samples_per_second"] = round(entry.num_samples / entry.duration_s, 3)
            metrics["eval_steps_per_second"] = round(num_batches / entry.duration_s, 3)
        with self._callbacks.noting("on_evaluate"):
            trainer.log(metrics)
            trainer.control = trainer.callback_handler.on_evaluate(
                trainer.args, trainer.state, trainer.control, metrics
            )
        return metrics

    def _evaluate_here(self) -> dict[str, float] | None:
        """Evaluate the weights of the moment in this process; stops the run, and returns None, where that fails."""
        trainer: Any = self._trainer
        trainer.place_model()
        self._elsewhere.look_again()
        try:
            with self._callbacks.noting("on_evaluate", catches=False):
                return evaluate(trainer, trainer.ignored_keys)
        # Without its results, the run would not be what the script asks for.
        except Exception as error:  # noqa: BLE001  it is the user's code
            traceback.print_exc()
            self._callbacks.stop_for(
                f"the evaluation after step {trainer.state.global_step} fails: {type(error).__name__}: {error}"
            )
            return None

    def _is_best(self, metrics: dict[str, float]) -> bool:
        """Note a better value of `metric_for_best_model`: like transformers, once callbacks have seen the metrics."""
        try:
            return bool(self._trainer._determine_best_metric(metrics, None))
        except KeyError as error:
            self._callbacks.stop_for(f"TrainingArguments(metric_for_best_model=…): {error.args[0]}")
            return False

    def _keep_best(self, directory: Path) -> None:
        args, state = self._trainer.args, self._trainer.state
        step = state.global_step
        # Like transformers, which takes the best of those that it saves.
        is_saved = args.save_strategy != SaveStrategy.STEPS or step % state.save_steps == 0 or step == self._max_steps
        if self._best is None or not is_saved or state.best_metric is None:
            return
        if args.save_strategy == SaveStrategy.BEST:
            self._write_plain(step, None)  # now: these weights are moved
        self._best.keep(directory, step, state.best_metric)
        plain = self._plain.of_step(step)
        state.best_model_checkpoint = self._best.path if plain is None else str(plain)
        if args.save_strategy == SaveStrategy.BEST:
            self._callbacks.call("on_save")
            self._callbacks.require_due_end(step)

    def _refusal_of_use(self, parameter: str) -> ConfigError | None:
        """Return the error for a callback that uses a parameter's value, or None while that value is right."""
        with suppress(CorruptCheckpoint):
            if self._weights.fetch():
                return None
        return self._callbacks.refuse_weights(parameter)


def _beginning(trainer: Any, job: TrainerJob) -> Iterator[str]:
    """Yield what transformers' own Trainer logs before its first step."""
    args, dataset = trainer.args, trainer.train_dataset
    samples_per_step = job.batch_size * job.epochs.batches_per_step
    num_samples = job.max_steps * samples_per_step if is_stream(dataset) else len(dataset)
    trained = (each for each in unwrapped(trainer.model).parameters() if each.requires_grad)
    num_parameters = sum(each.numel() for each in trained)
    yield "***** Running training *****"
    yield f"  Num examples = {num_samples:,}"
    yield f"  Num Epochs = {job.epochs.num_epochs(job.max_steps):,}"
    yield f"  Num update steps per epoch = {job.epochs.num_steps:,}"
    yield f"  Instantaneous batch size per device = {args.per_device_train_batch_size:,}"
    yield f"  Total train batch size (w. parallel, distributed & accumulation) = {samples_per_step:,}"
    yield f"  Gradient Accumulation steps = {args.gradient_accumulation_steps:,}"
    yield f"  Total optimization steps = {job.max_steps:,}"
    yield f"  Number of trainable parameters = {num_parameters:,}"
    if trainer.state.global_step:
        yield f"  Resuming training from step {trainer.state.global_step:,}"
