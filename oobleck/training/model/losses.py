"""The losses of models in the precision of their logits, and the check of a script's own loss.

Samples are spread over microbatches and nodes, whose losses are added up. So a loss must be a sum over samples divided
by its argument, the number of items in the step. A mean, or weights that depend on the other samples, would make the
result depend on the plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from oobleck.errors import ConfigError
from oobleck.training.data import IGNORED_LABEL

_TOLERANCE, _ROUNDING = 1e-3, 1e-6
_OF_LOGITS = (0.01, 8.0)
"""Factors of made-up logits: nearly equal ones, as a new model has, and ones that are far apart."""
_SMALL_LOSSES = (0.5, 0.02)
"""Losses of a token that a model reaches once it has learned its samples."""

Loss = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""Maps outputs, labels and the number of items in a step to a microbatch's share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """The normalization of a model's own loss, and the labels that count."""

    is_mean: bool = False
    """Whether it is the mean over the counted labels; else it is their sum divided by `num_items_in_batch`."""
    counts_first: bool = False
    """Whether each sample's first label counts, because the model does not shift labels."""

    def __str__(self) -> str:
        what = "the mean" if self.is_mean else "a sum divided by num_items_in_batch,"
        return f"{what} over all labels{'' if self.counts_first else ' but the first'}"


def causal_lm_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: int | None = None, **_options: Any
) -> torch.Tensor:
    """Return the sum of the token losses over `num_items_in_batch` (their mean without it), in the logits' dtype.

    Like transformers' own, with the same arguments, but without its conversion to float32. `logits` are
    [batch, length, vocabulary], `labels` [batch, length] and not shifted.
    """
    predictions = logits[:, :-1].reshape(-1, vocab_size)
    targets = labels[:, 1:].reshape(-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functional.cross_entropy(predictions, targets, ignore_index=IGNORED_LABEL, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def label_loss(logits: torch.Tensor, labels: torch.Tensor, num_items: int) -> torch.Tensor:
    """Return the sum of the losses of labelled tokens or samples over `num_items`, in the logits' dtype.

    `logits` have one dimension more than `labels`. Models take the mean over the microbatch instead, and such means do
    not add up.
    """
    predictions, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return functional.cross_entropy(predictions, targets, ignore_index=IGNORED_LABEL, reduction="sum") / num_items


def loss_of_outputs(compute: Callable[..., torch.Tensor]) -> Loss:
    """Return a `Trainer(compute_loss_func=…)` function as a `Loss`."""

    def loss_of(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        # transformers' Trainer passes a tensor too, so scripts may use it as one.
        return compute(outputs, labels, num_items_in_batch=torch.tensor(num_items, device=labels.device))

    return loss_of


def tried_at_first(loss: Loss, given: object, *, argument: str = "num_items_in_batch") -> Loss:
    """Return a loss that raises ConfigError on its first microbatch if its values there do not add up.

    `given` is the script's own function, whose name for the number of items is `argument`.
    """
    is_tried = False

    def compute(outputs: Any, labels: torch.Tensor, num_items: int) -> torch.Tensor:
        nonlocal is_tried
        if not is_tried and (fault := fault_of_loss(loss, outputs, labels, num_items=num_items)) is not None:
            raise ConfigError(unfit_loss(given, fault, argument=argument))
        is_tried = True
        return loss(outputs, labels, num_items)

    return compute


@torch.no_grad()
def fault_of_loss(
    compute: Loss, outputs: Any, labels: torch.Tensor, *, num_items: int, size: int | None = None
) -> str | None:
    """Describe how a loss differs from a sum over samples divided by `num_items`; None if it is one.

    The first sample is compared with the others, or, with `size`, all microbatches of that many. Raises what `compute`
    raises.
    """
    count = len(labels)

    def loss_of(first: int, stop: int, num_items: int) -> float:
        # Copies: a loss may work in place.
        return float(compute(_rows(outputs, first, stop, count), labels[first:stop].clone(), num_items))

    together, halved = loss_of(0, count, num_items), loss_of(0, count, 2 * num_items)
    if not is_same(again := loss_of(0, count, num_items), together):
        return f"of the same {count} samples it returns {again:g} when it runs again, after {together:g}"
    # A mean over the labels of the call ignores the number of items.
    if not is_near(2 * halved, together):
        return f"of twice as many items it returns {halved:g}, and of these {together:g}"
    if count < 2:
        return None
    cuts = [0, 1, count] if size is None else [*range(0, count, size), count]
    shares = [loss_of(first, stop, num_items) for first, stop in pairwise(cuts)]
    if is_near(sum(shares), together):
        return None
    parts = f"the first alone {shares[0]:g} and of the others {shares[1]:g}"
    if size is not None:
        parts = f"microbatches of {size} {sum(shares):g} in all"
    return f"of {count} samples it returns {together:g}, and of {parts}"


def of_other_sizes(outputs: Any, labels: torch.Tensor) -> Iterator[Any]:
    """Yield outputs as they are, and others for which losses are about as large as at first, small, and large."""
    yield outputs
    logits = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "logits", None)
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point():
        return
    for scale in _OF_LOGITS:
        yield _with_logits(outputs, scale * logits)
    if labels.shape != logits.shape[:-1]:
        return
    # A token's logits may be for its own label or for that of the next.
    for ahead in range(min(labels.ndim, 2)):
        wanted = labels.roll(-ahead, -1).clamp(min=0, max=logits.shape[-1] - 1)
        is_wanted = functional.one_hot(wanted, logits.shape[-1])
        for loss in _SMALL_LOSSES:
            # Where the other logits are equal, the cross entropy of the wanted one is about vocabulary · exp(-margin).
            margin = math.log(logits.shape[-1] / loss)
            yield _with_logits(outputs, _OF_LOGITS[0] * logits + margin * is_wanted)


def _with_logits(outputs: Any, logits: torch.Tensor) -> Any:
    if isinstance(outputs, torch.Tensor):
        return logits
    return type(outputs)(**{**outputs, "logits": logits})


def unfit_loss(compute: object, fault: str, *, argument: str = "num_items_in_batch") -> str:
    """Return the error message for a loss with that fault; `argument` is its name for the number of items."""
    place = "compute_loss_func" if argument == "num_items_in_batch" else "the script's loss"
    return (
        f"{place}: {name_of(compute)} must return a sum divided by {argument}, as samples are spread over nodes; "
        f"{fault}. Divide the sum over the labels by {argument}, with weights that depend neither on other samples nor "
        "on earlier calls"
    )


def name_of(function: object) -> str:
    """Return a script's name for a function or a callable object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


def is_near(value: float, other: float) -> bool:
    """Return whether two losses differ by rounding alone."""
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


def is_same(value: float, other: float) -> bool:
    """Return whether two losses of the same samples, from the same operations, are equal."""
    are_no_numbers = value != value and other != other  # NaN, of made-up values
    return value == other or are_no_numbers or abs(value - other) <= _ROUNDING * abs(other)


def _rows(value: Any, first: int, stop: int, count: int) -> Any:
    """Copy samples [first, stop) of outputs for `count` samples."""
    if isinstance(value, torch.Tensor):
        return (value[first:stop] if value.ndim and len(value) == count else value).clone()
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _rows(each, first, stop, count) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(_rows(each, first, stop, count) for each in value)
    return value
