"""A trainer whose model is kept whole: its own loss, called in workers, and how that is counted over microbatches.

Batches are cut into microbatches over nodes, where their losses show how: tried on samples of the script, with its
collator, against the losses of their parts. Where nothing fits, batches are not cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from oobleck.errors import ConfigError
from oobleck.job import LossCounting
from oobleck.training.counters import counter_of
from oobleck.training.data import IGNORED_LABEL, WholeInputs, from_all_over, items_of, mapped_tensors
from oobleck.training.flow import Flow, constant_parameters, prove_cuts, trace_flow
from oobleck.training.model import unwrapped
from oobleck.training.randomness import drawing_alike

from .checks import overrider_of
from .epochs import Epochs

_TRIED_SAMPLES = 8
_PROVEN_SAMPLES = 3
_TOLERANCE, _OF_HALF_PRECISION = 1e-4, 3e-2
"""By how much the losses of parts may differ from that of all, as a share of it."""
_ROUNDING = 1e-6
_LABELS = "labels"
_IN_STEPS = ("training_step", "_prepare_inputs", "_prepare_input", "compute_loss_context_manager")
"""Methods that transformers calls in each step around `compute_loss`."""
_WAYS: tuple[LossCounting, ...] = ("items", "samples", "labels", "sum")

_Columns = dict[str, Any]


class TrainerLoss:
    """A trainer's `compute_loss`, as transformers' own loop calls it."""

    def __init__(self, trainer: Any, loader: Any, epochs: Epochs, *, max_steps: int, batch_size: int) -> None:
        self._trainer = trainer
        self._loader = loader
        self._epochs = epochs
        self._max_steps = max_steps
        self._batch_size = batch_size

    def __call__(self, model: nn.Module, inputs: _Columns, num_items: int, *, step: int) -> torch.Tensor:
        """Return the loss of a batch in a step. Raises ConfigError for one that is no number, and for logs within."""
        trainer = self._trainer
        is_told = self._takes_items and self._labels(inputs) is not None
        device = next(model.parameters()).device
        items = torch.tensor(float(num_items), device=device) if is_told else None
        with self._as_in(step, model), self._noise(model):
            if model.training and any(overrider_of(trainer, name) for name in _IN_STEPS):
                loss = self._of_training_step(model, dict(inputs), items)
            else:
                loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
        for metrics in trainer.metrics_for_logs():
            metrics.clear()  # logs are the script's, and here they would only grow
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(f"Trainer: the loss of {type(model).__name__} is no number: {type(loss).__name__}")
        return loss.reshape(())

    def _of_training_step(self, model: nn.Module, inputs: _Columns, items: torch.Tensor | None) -> torch.Tensor:
        """Return what `training_step` gives to accelerate for the backward pass, which the nodes run themselves."""
        taken: list[torch.Tensor] = []
        accelerator = self._trainer.accelerator
        accelerator.backward = lambda loss, **_: taken.append(loss)
        try:
            self._trainer.training_step(model, inputs, items)
        finally:
            del accelerator.backward
        if len(taken) != 1:
            raise ConfigError(
                f"Trainer.training_step calls self.accelerator.backward {len(taken)} times: nodes run the backward "
                "pass of one loss; call it once, as super().training_step does"
            )
        return taken[0]

    def require_one_backward(self, model: nn.Module) -> None:
        """Try a step. Raises ConfigError for a `training_step` that computes gradients by itself."""
        modes = {module: module.training for module in model.modules()}
        try:
            with drawing_alike(0), torch.enable_grad():
                columns = self.collated([0])
                self(model.train(), columns, self.count(columns) or 1, step=1)
            if any(each.grad is not None for each in model.parameters()):
                raise ConfigError(
                    "Trainer.training_step computes gradients by itself: nodes run the backward pass, of the one loss "
                    "that self.accelerator.backward is given"
                )
        finally:
            model.zero_grad()
            for module, mode in modes.items():
                module.training = mode

    @contextmanager
    def _noise(self, model: nn.Module) -> Iterator[None]:
        """Within the block, embeddings are noisy if NEFTune is asked for: only in training, as of transformers."""
        if (alpha := self._trainer.neftune_noise_alpha) is None or not model.training:
            yield
            return
        handle = activate_neftune(model, alpha)  # type: ignore[no-untyped-call]  # transformers' own
        try:
            yield
        finally:
            deactivate_neftune(model, handle)  # type: ignore[no-untyped-call]  # transformers' own

    def count(self, inputs: Mapping[str, Any]) -> int | None:
        """Return how many labels of a batch transformers counts; None for a batch without labels."""
        if (labels := self._labels(inputs)) is None:
            return None
        if "shift_labels" not in inputs and getattr(self._trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return int(labels.ne(IGNORED_LABEL).sum())

    @staticmethod
    def _labels(inputs: Mapping[str, Any]) -> torch.Tensor | None:
        labels = inputs.get("shift_labels", inputs.get(_LABELS))
        return labels if isinstance(labels, torch.Tensor) else None

    def inputs(self, counting: LossCounting) -> WholeInputs:
        """Return what data has to know of the loss."""
        return WholeInputs(counting=counting, count=self.count, averages=not self._is_scaled)

    @functools.cached_property
    def _is_scaled(self) -> bool:
        """Whether transformers adds the losses of a step's batches up, rather than taking their mean."""
        asked: bool | None = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if asked is not None:
            return asked
        return self._takes_items and self.count(self.collated([0])) is not None

    @property
    def _takes_items(self) -> bool:
        return bool(self._trainer.model_accepts_loss_kwargs or self._trainer.compute_loss_func is not None)

    def collated(self, numbers: Sequence[int], *, seed: int = 0) -> _Columns:
        with drawing_alike(seed):
            return dict(self._loader.collate_fn(items_of(self._loader.dataset, numbers)))

    def flow(self) -> Flow:
        """Follow the tensors of the model's forward pass. Raises UncutModel where it has to stay whole."""
        return trace_flow(
            unwrapped(self._trainer.model), self._loss_of(from_all_over(self.num_samples, min(2, self.most_together)))
        )

    def prove_cuts(self, flow: Flow) -> None:
        """Compare the losses of some samples with those of the model in pieces. Raises UncutModel."""
        numbers = from_all_over(self.num_samples, _PROVEN_SAMPLES)
        samples = [numbers[: self.most_together], *([number] for number in numbers)]
        prove_cuts(unwrapped(self._trainer.model), flow, [self._loss_of(some) for some in samples])

    @functools.cached_property
    def most_together(self) -> int:
        """How many samples are tried in one batch: two where the script has one, if its code takes two."""
        if self._batch_size > 1:
            return self._batch_size
        model = unwrapped(self._trainer.model)
        try:
            with _evaluating(model), drawing_alike(0):
                self._loss_of(from_all_over(self.num_samples, 2))()
        # A collator may have no padding, or a model no dimension for samples.
        except Exception:  # noqa: BLE001  it is the user's code
            return 1
        return 2

    def _loss_of(self, numbers: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Return what computes the loss of some samples."""
        model = unwrapped(self._trainer.model)
        device = next(model.parameters()).device
        inputs = mapped_tensors(self.collated(numbers), lambda tensor: tensor.to(device))
        return lambda: self(model, dict(inputs), self.count(inputs) or 1, step=1)

    def length(self) -> int:
        """Return how many tokens the longest of some samples has, for reports; 2, a job's least, if it has none."""
        numbers, most = from_all_over(self.num_samples, _TRIED_SAMPLES), self.most_together
        batches = [self.collated(numbers[first : first + most]) for first in range(0, len(numbers), most)]
        tokens = [columns.get(name) for columns in batches for name in ("input_ids", _LABELS)]
        return max(2, *(each.shape[-1] for each in tokens if isinstance(each, torch.Tensor) and each.ndim > 1), 2)

    @property
    def num_samples(self) -> int:
        return len(self._loader.dataset)

    @contextmanager
    def _as_in(self, step: int, model: nn.Module) -> Iterator[None]:
        """Within the block, the trainer is as transformers' loop would have it in a step, with one device."""
        trainer, epochs = self._trainer, self._epochs
        state, args = trainer.state, trainer.args
        num_gpus = args.n_gpu
        done = step - 1 if model.training else step  # evaluations follow their step
        state.global_step, state.max_steps = done, self._max_steps
        state.epoch = epochs.progress(done) if done else 0.0
        if unwrapped(trainer.model) is trainer.model:
            trainer.model = trainer.model_wrapped = model  # its own code may take either
        trainer.current_gradient_accumulation_steps = 1  # the nodes' own data averages over batches
        before = {
            name: value
            for name, value in vars(trainer).items()
            if type(value) in (int, float) and name not in trainer.counts_for_logs
        }
        args._n_gpu = min(num_gpus, 1)
        trainer.log = _refuse_log
        try:
            yield
        finally:
            del trainer.log
            args._n_gpu = num_gpus
        for name, value in before.items():
            if getattr(trainer, name) != value:
                raise ConfigError(
                    f"Trainer.compute_loss changes self.{name}: it runs on several nodes, and again after a failure; "
                    "follow self.state.global_step instead"
                )


def why_whole(trainer: Any) -> str:
    """Return why a trainer's steps take its model as a whole, whatever that is; empty if they do not."""
    for name in _IN_STEPS:
        if (owner := overrider_of(trainer, name)) is not None:
            return f"{name} is overridden by {owner}, and takes the model as a whole"
    if trainer.neftune_noise_alpha is not None:
        return "the noise of NEFTune depends on the length of each batch"
    return ""


def _refuse_log(*_: Any, **__: Any) -> None:
    raise ConfigError("Trainer.compute_loss calls self.log: it runs on nodes, and logs are the script's; leave it out")


def find_counting(loss: TrainerLoss, model: nn.Module, *, batch: int, microbatch: int) -> LossCounting:
    """Find how the losses of a batch's parts make that of the batch, by its first samples from all over.

    Runs the model about ten times on eight samples at most. Raises ConfigError for a loss that differs when it is
    computed again.
    """
    numbers = from_all_over(loss.num_samples, min(loss.most_together, _TRIED_SAMPLES))
    trial = _Trial(loss, model, numbers)
    with constant_parameters(model), _evaluating(model):
        trial.require_repeats()
        if len(numbers) < 2:
            return "batch"
        cuts = [[0, 1, len(numbers)]]
        if microbatch < len(numbers):
            cuts.append([*range(0, len(numbers), microbatch), len(numbers)])
        errors: dict[LossCounting, float] = {}
        for hides in (False, True):
            for cut in cuts:
                for counting, error in trial.errors(cut, hides=hides).items():
                    errors[counting] = max(error, errors.get(counting, 0.0))
    dtype = next(model.parameters()).dtype
    tolerance = _TOLERANCE if dtype in (torch.float32, torch.float64) else _OF_HALF_PRECISION
    # Losses may agree with several ways to count; the first of the nearest holds for all samples.
    near = {counting: error for counting, error in errors.items() if error <= tolerance}
    nearest = min(near.values(), default=0.0)
    found: LossCounting = next((each for each, error in near.items() if error <= max(4 * nearest, _ROUNDING)), "batch")
    if batch == microbatch and found != "items":
        return "batch"  # exact, whatever else
    return found


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model evaluate within the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class _Trial:
    """Losses of some samples and of their parts."""

    def __init__(self, loss: TrainerLoss, model: nn.Module, numbers: Sequence[int]) -> None:
        self._compute = loss
        self._model = model
        self._numbers = numbers
        self._all = loss.collated(numbers)
        other = loss.collated(numbers, seed=1)
        self._is_drawn = not all(_are_equal(self._all[name], other.get(name)) for name in self._all)

    def require_repeats(self) -> None:
        first = self._loss(self._all, self._compute.count(self._all) or 1)

        def is_same() -> bool:
            again = self._loss(self._all, self._compute.count(self._all) or 1)
            return again == first or again != again

        if (counter := counter_of(dict(self._model.named_modules()), is_same)) is not None:
            raise ConfigError(
                f"model: the loss of {type(self._model).__name__} is another one when it is computed again, by "
                f"{counter}: microbatches are spread over nodes, and run again after a failure; leave out what depends "
                "on earlier forward passes"
            )

    def errors(self, cut: Sequence[int], *, hides: bool) -> dict[LossCounting, float]:
        """Return how far the parts' losses are from that of all, as a share of it, for each way to count.

        With `hides`, half of the first sample's labels are ignored, so that means over labels and over samples differ;
        nothing is returned where the model has no ignored labels.
        """
        failed: dict[LossCounting, float] = dict.fromkeys(_WAYS, math.inf)
        whole, count = self._all, self._compute.count
        parts: list[_Columns] = []
        for start, stop in pairwise(cut):
            if (part := self._part(start, stop)) is None:
                return failed
            parts.append(part)
        if hides:
            hidden, first = _with_hidden_labels(whole), _with_hidden_labels(parts[0])
            if hidden is None or first is None:
                return {}
            whole, parts = hidden, [first, *parts[1:]]
        rows, counts = [stop - start for start, stop in pairwise(cut)], [count(part) or 0 for part in parts]
        num_items = count(whole) or 1
        together = self._loss(whole, num_items)
        shares = [self._loss(part, number or 1) for part, number in zip(parts, counts, strict=True)]
        if not all(map(math.isfinite, (together, *shares))):
            return {} if hides else failed

        def error_of(*values: float) -> float:
            return max(abs(value - together) for value in values) / max(abs(together), _ROUNDING)

        def weighed(numbers: Sequence[int]) -> float:
            return sum(share * number for share, number in zip(shares, numbers, strict=True)) / (sum(numbers) or 1)

        # A sum divided by the number of items halves with twice as many, and any other loss is as it was.
        of_twice = self._loss(whole, 2 * num_items)
        return {
            "items": error_of(sum(self._loss(part, num_items) for part in parts), 2 * of_twice),
            "samples": error_of(weighed(rows), of_twice),
            "labels": error_of(weighed(counts), of_twice),
            "sum": error_of(sum(shares), of_twice),
        }

    def _part(self, start: int, stop: int) -> _Columns | None:
        """Return some of the samples, as a node would collate them; None where they cannot be told apart."""
        if not self._is_drawn:
            return self._compute.collated(self._numbers[start:stop])
        # What was drawn for all is not what is drawn for a part.
        if any(tensor.ndim == 0 or len(tensor) != len(self._numbers) for tensor in _tensors_in(self._all)):
            return None
        cut: _Columns = mapped_tensors(self._all, lambda tensor: tensor[start:stop])
        return _without_padding(cut)

    def _loss(self, columns: _Columns, num_items: int) -> float:
        with drawing_alike(0):
            return float(self._compute(self._model, dict(columns), num_items, step=1))


def _with_hidden_labels(columns: _Columns | None) -> _Columns | None:
    """Return columns in which the last half of the first sample's labels is ignored; None where none could be."""
    labels = None if columns is None else columns.get(_LABELS)
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.ndim == 0 or columns is None:
        return None
    labels = labels.clone()
    counted = (labels[0] != IGNORED_LABEL).nonzero() if labels.ndim > 1 else None
    if counted is None:
        labels[0] = IGNORED_LABEL
    else:
        for place in counted[len(counted) // 2 :]:
            labels[0][tuple(place)] = IGNORED_LABEL
    return {**columns, _LABELS: labels}


def _without_padding(columns: _Columns) -> _Columns:
    """Return columns without the last tokens that no row attends to, as their collator would pad them alone."""
    mask = columns.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        return columns
    length, width = int(mask.any(0).nonzero().max()) + 1 if bool(mask.any()) else mask.shape[1], mask.shape[1]
    cut: _Columns = mapped_tensors(
        columns, lambda tensor: tensor[:, :length] if tensor.ndim > 1 and tensor.shape[1] == width else tensor
    )
    return cut


def _tensors_in(columns: _Columns) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped_tensors(columns, note)
    return found


def _are_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(value, other)
    with suppress(ValueError, RuntimeError):
        return bool(value == other)
    return True
