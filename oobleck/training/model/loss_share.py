"""Whether a loss that a script brings gives each microbatch's share of the loss of a step.

Samples are spread over microbatches and nodes, and what these return is added up: so a loss must be a sum over samples
divided by the number that it is given. A mean, or weights that depend on the other samples, would train differently
with each plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

_TOLERANCE = 1e-3

Loss = Callable[[Any, torch.Tensor, int], torch.Tensor]
"""From outputs, labels and the number of items in a step, to a microbatch's share."""


@torch.no_grad()
def fault_of_loss(compute: Loss, outputs: Any, labels: torch.Tensor, *, num_items: int) -> str | None:
    """Say what a loss returns that is no sum over samples divided by `num_items`; None where it is one.

    Raises what `compute` raises.
    """
    count = len(labels)

    def loss_of(first: int, stop: int, num_items: int) -> float:
        # Copies: a loss may work in place.
        return float(compute(_rows(outputs, first, stop, count), labels[first:stop].clone(), num_items))

    together, halved = loss_of(0, count, num_items), loss_of(0, count, 2 * num_items)
    if not is_near(2 * halved, together):
        return f"of twice as many items it returns {halved:g}, and of these {together:g}"
    if count < 2:
        return None
    first, others = loss_of(0, 1, num_items), loss_of(1, count, num_items)
    if is_near(first + others, together):
        return None
    return f"of {count} samples it returns {together:g}, and of the first alone {first:g} and of the others {others:g}"


def unfit_loss(compute: object, fault: str, *, argument: str = "num_items_in_batch") -> str:
    """Return what to say of a loss with that fault; `argument` is what it calls the number of items."""
    place = "compute_loss_func" if argument == "num_items_in_batch" else "the script's loss"
    return (
        f"{place}: {_name_of(compute)} must return a sum divided by {argument}, as samples are spread over nodes; "
        f"{fault}. Divide the sum over the labels by {argument}, with weights that do not depend on other samples"
    )


def _name_of(function: object) -> str:
    if isinstance(function, functools.partial):
        return _name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


def is_near(value: float, other: float) -> bool:
    """Say whether two losses are the same but for rounding."""
    return abs(value - other) <= _TOLERANCE * max(abs(value), abs(other))


def _rows(value: Any, first: int, stop: int, count: int) -> Any:
    """Copy those samples of outputs for `count`."""
    if isinstance(value, torch.Tensor):
        return (value[first:stop] if value.ndim and len(value) == count else value).clone()
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _rows(each, first, stop, count) for name, each in value.items()})
    if type(value) in (tuple, list):
        return type(value)(_rows(each, first, stop, count) for each in value)
    return value
