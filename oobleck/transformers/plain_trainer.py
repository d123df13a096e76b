"""transformers' own Trainer, which records its first steps, and writes nothing where the script would.

It trains as usual, except for what would make two runs incomparable: dropout is off, and a sampler whose order depends
on earlier draws, and so cannot be repeated, gives the order that it has on the nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from oobleck.control.verification import PlainAccount, PlainJob, tolerance_of
from oobleck.errors import ConfigError
from oobleck.host.handover import TrainReached
from oobleck.training.data import items_of
from oobleck.training.dropout import turn_off_dropout
from oobleck.training.model import unwrapped
from oobleck.training.plain import Recorder, gradient_norm
from oobleck.training.randomness import drawing_alike

from .epochs import EpochOrder
from .job import epochs_of
from .streams import is_stream

_CAUSAL = frozenset(
    name
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
)
_TRIED_SAMPLES = 8
_DRAWN = (
    "the sampler's order depends on all earlier draws, and a run draws it from the seed and the epoch: the script by "
    "itself used the order of the run"
)


def plain_trainer(
    observation: Observation, kind: type[transformers.Trainer] = transformers.Trainer
) -> type[transformers.Trainer]:
    """Return the class that replaces ours in a script: `kind`, which records its steps."""

    class Trainer(kind):  # type: ignore[misc, valid-type]  # of the caller's choice
        def __init__(
            self, model: Any = None, args: TrainingArguments | None = None, *others: Any, **named: Any
        ) -> None:
            args = args or TrainingArguments(output_dir="tmp_trainer")
            observation.keep_outputs(args)
            super().__init__(model, args, *others, **named)

        def train(self, *args: Any, **named: Any) -> Any:
            """Train the first steps from the script's own model, and end the script."""
            observation.begin(self)
            super().train()
            raise TrainReached(self)

    return Trainer


class Observation(TrainerCallback):
    """Records a trainer's steps as its callback, and stops training after the last step to compare."""

    recorder: Recorder
    _trainer: Any

    def __init__(self, asked: PlainJob) -> None:
        self._asked = asked
        self._output_dir = ""
        self._dropped: dict[str, float] = {}
        self._remarks: list[str] = []
        self._batches: list[Sequence[int]] = []
        """The batches that the loader has returned."""
        self._num_batches = 0
        """The number of batches that were computed."""
        self._samples: list[int] = []
        self._loss = 0.0
        self._grad_norm = 0.0
        self._learning_rate = 0.0
        self._is_drawn = False
        self._order: EpochOrder | None = None
        self._steps_per_epoch = 0

    def account(self) -> PlainAccount:
        steps = tuple(self.recorder.steps)
        return PlainAccount(
            steps=steps,
            samples_on_nodes=() if self._order is None else tuple(self._order(step.step) for step in steps),
            dropped=self._dropped,
            remarks=(*self._remarks, *((_DRAWN,) if self._is_drawn else ())),
            output_dir=self._output_dir,
        )

    def keep_outputs(self, args: TrainingArguments) -> None:
        """Redirect a trainer's output from the script's directory, and turn off evaluations and reports."""
        self._output_dir = str(Path(args.output_dir or "").absolute())
        args.output_dir = str(Path(self._asked.directory) / "output")
        args.report_to = []
        args.push_to_hub = False
        args.save_strategy = SaveStrategy.NO
        args.eval_strategy = IntervalStrategy.NO

    def begin(self, trainer: Any) -> None:
        self._trainer = trainer
        self._count_as_predicted(trainer)
        trainer.add_callback(self)
        training_step, get_train_dataloader = trainer.training_step, trainer.get_train_dataloader

        def noted_step(*args: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = training_step(*args, **named)
            self._batch_done(float(loss))
            return loss

        def noted_loader() -> Any:
            loader = get_train_dataloader()
            self._note_batches_of(trainer, loader)
            return loader

        trainer.training_step, trainer.get_train_dataloader = noted_step, noted_loader

    def _count_as_predicted(self, trainer: Any) -> None:
        """Make transformers divide a step's loss by the predicted labels, as it does for most models."""
        # For classes that do not name their loss, such as GPT-2's, it counts the first label of each sample as well.
        kind = type(unwrapped(trainer.model))
        names = {base.__name__ for base in kind.__mro__}
        if getattr(trainer, "_loss_shifts_labels", True) or names.isdisjoint(_CAUSAL):
            return
        trainer._loss_shifts_labels = True
        self._remarks.append(
            f"transformers divides the loss of {kind.__name__} by all labels of a step, including the first of each "
            "sample, which is never predicted; here both divide by the predicted ones"
        )

    def _note_batches_of(self, trainer: Any, loader: Any) -> None:
        if is_stream(loader.dataset):
            raise ConfigError(
                "Trainer(train_dataset=…): samples are compared by their numbers, and those of a stream have none; "
                "give a list of its first samples"
            )
        _require_lasting_samples(loader)
        inner, epochs = loader.batch_sampler, epochs_of(trainer, loader)
        self._steps_per_epoch = epochs.num_steps
        self._order = EpochOrder(_Copy(inner), epochs, seed=trainer.args.seed)
        base = getattr(loader, "base_dataloader", loader)
        object.__setattr__(base, "batch_sampler", _NotedBatches(inner, self))  # torch refuses an ordinary assignment

    def batches_of_epoch(self, batches: list[list[int]], *, is_drawn: bool) -> list[list[int]]:
        """Record the batches of an epoch, by numbers of samples; returns those to compute."""
        if is_drawn:
            self._is_drawn = True
            batches = self._as_on_nodes(batches)
        self._batches += batches
        return batches

    def _as_on_nodes(self, batches: list[list[int]]) -> list[list[int]]:
        assert self._order is not None
        first = len(self.recorder.steps) + 1
        # The sampler's own batches have the sizes that transformers expects; only their samples are the nodes'.
        numbers: list[int] = []
        for step in range(first, first + self._steps_per_epoch):
            numbers += self._order(step)
        ends = np.cumsum([len(batch) for batch in batches])
        return [numbers[end - len(batch) : end] for end, batch in zip(ends.tolist(), batches, strict=True)]

    def on_train_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Start the recorder with the initial model, without dropout."""
        job, model = self._asked.job, unwrapped(self._trainer.model)
        if job.dtype == "float64":
            model.double()  # in place: the optimizer has its parameters already, and no state yet
        self._dropped = turn_off_dropout(self._trainer.model)
        self.recorder = Recorder(model, num_steps=self._asked.num_steps, tolerance=tolerance_of(job.dtype))

    def _batch_done(self, loss: float) -> None:
        self._loss += loss
        self._samples += self._batches[self._num_batches]
        self._num_batches += 1
        accelerator = self._trainer.accelerator
        if accelerator.sync_gradients:  # after the step's last batch
            scale = 1.0 if accelerator.scaler is None else accelerator.scaler.get_scale()
            # The loss scale is still in the gradients here.
            self._grad_norm = gradient_norm(self._trainer.model.parameters()) / scale
            self.recorder.note_gradients()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        """Record the rate of this step, before the scheduler changes it."""
        self._learning_rate = float(self._trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.recorder.step_done(
            loss=self._loss, grad_norm=self._grad_norm, learning_rate=self._learning_rate, samples=self._samples
        )
        self._loss, self._samples = 0.0, []
        if self.recorder.is_done:
            control.should_training_stop = True


class _NotedBatches:
    """A batch sampler that records its batches, an epoch at a time."""

    def __init__(self, inner: Any, observation: Observation) -> None:
        self._inner = inner
        self._observation = observation
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        # On a copy: a draw would change the order that transformers is about to use.
        is_drawn = _is_drawn(_Copy(self._inner), self._epoch)
        self._epoch += 1
        batches = [list(map(int, batch)) for batch in self._inner]
        yield from self._observation.batches_of_epoch(batches, is_drawn=is_drawn)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Copy:
    """A copy of a loader's batch sampler, in place of the loader."""

    def __init__(self, sampler: Any) -> None:
        self.batch_sampler = copy.deepcopy(sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the batch sampler and of its inner sampler, as accelerate's loader does."""
        each: Any
        for each in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)


def _is_drawn(twin: _Copy, epoch: int) -> bool:
    """Return whether a sampler's order depends on earlier draws, so that the same epoch has another order."""
    orders = []
    with drawing_alike(0):
        for _ in range(2):
            twin.set_epoch(epoch)
            orders.append([list(map(int, batch)) for batch in twin.batch_sampler])
    return orders[0] != orders[1]


def _require_lasting_samples(loader: Any) -> None:
    # Where samples change each time that they are read, no two runs are equal.
    numbers = range(min(_TRIED_SAMPLES, len(loader.dataset)))
    read = []
    for seed in range(2):
        with drawing_alike(seed):
            batch = loader.collate_fn(items_of(loader.dataset, numbers))
            read.append({name: torch.as_tensor(value) for name, value in batch.items()})
    if any(not torch.equal(value, read[1][name]) for name, value in read[0].items()):
        raise ConfigError(
            "train_dataset or data_collator draws random numbers, which a run draws from (seed, step, samples) and the "
            "script after all its earlier draws; have it draw none (mlm=False, for instance) to compare the rest"
        )
