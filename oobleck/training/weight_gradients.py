"""Weight gradients that are computed after the gradients of inputs, as schedules without bubbles require.

The stage before waits for the gradient of a stage's input, but no stage waits for the gradients of its weights. So
linear layers, whose weights take half of a backward pass, put off that half: their backward pass computes the gradient
of the input, and keeps the operands of the weights' gradient. Gradients of other parameters (norms, embeddings) are
cheap, and computed at once. Sums have the same order either way, by microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D


class _Owed(NamedTuple):
    """The operands of one linear layer's weight gradient for one microbatch."""

    layer: nn.Module
    weight: nn.Parameter
    bias: nn.Parameter | None
    inputs: torch.Tensor
    """[tokens, in]"""
    gradient: torch.Tensor
    """The outputs' gradient, [tokens, out]."""


class WeightGradients:
    """The weight gradients that linear layers owe. Only one thread may use it, and autograd on its behalf."""

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._is_on = False
        self._owed: dict[int, list[_Owed]] = {}
        self._current: list[_Owed] = []

    def put_off(self, module: nn.Module) -> None:
        """Have the linear layers within a module put off their weights' gradients while `engage` is on."""
        assert not self._is_on
        # Exactly these types, since a subclass may compute something else.
        self._layers += [layer for layer in module.modules() if type(layer) in (nn.Linear, Conv1D)]

    def engage(self, *, is_on: bool) -> None:
        """Turn it on or off, between two steps; off restores the layers' own forward."""
        if is_on == self._is_on:
            return
        self._is_on = is_on
        for layer in self._layers:
            if is_on:
                layer.forward = partial(_forward, layer, self._note)
            else:
                del layer.forward

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait for `finish`; tensors that several layers keep count once."""
        kept = (tensor.untyped_storage() for owed in self._owed.values() for each in owed for tensor in each[3:])
        return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())

    def begin(self, microbatch: int) -> None:
        """Announce the microbatch of the next backward pass."""
        self._current = self._owed[microbatch] = []

    def finish(self, microbatch: int) -> None:
        """Add the gradients that this microbatch owes."""
        for owed in self._owed.pop(microbatch):
            _add(owed)

    def _note(self, owed: _Owed) -> None:
        self._current.append(owed)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward pass leaves out the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        layer: nn.Module,
        note: Callable[[_Owed], None],
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.layer, ctx.weight, ctx.bias, ctx.note = layer, weight, bias, note
        return functional.linear(inputs, weight.t() if isinstance(layer, Conv1D) else weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        ctx.note(_Owed(ctx.layer, ctx.weight, ctx.bias, _rows(inputs), _rows(gradient)))
        # Weight and bias get no gradient from autograd: `finish` adds it from what is noted here.
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        # Conv1D keeps its weight as [in, out].
        matrix = weight.t() if isinstance(ctx.layer, Conv1D) else weight
        # Under autocast the layer computes in another type than its weights have.
        return (gradient @ matrix.to(gradient.dtype)).to(inputs.dtype), None, None, None, None


def _forward(layer: Any, note: Callable[[_Owed], None], inputs: torch.Tensor) -> torch.Tensor:
    # Hooks on parameters would not see gradients that autograd does not compute.
    is_hooked = layer.weight._backward_hooks or (layer.bias is not None and layer.bias._backward_hooks)
    if not torch.is_grad_enabled() or not layer.weight.requires_grad or is_hooked:
        return type(layer).forward(layer, inputs)  # type: ignore[no-any-return]
    return _Linear.apply(inputs, layer.weight, layer.bias, layer, note)  # type: ignore[no-any-return,no-untyped-call]


@torch.no_grad()
def _add(owed: _Owed) -> None:
    inputs, gradient = owed.inputs.to(owed.gradient.dtype), owed.gradient
    left, right = (inputs.t(), gradient) if isinstance(owed.layer, Conv1D) else (gradient.t(), inputs)
    grad = owed.weight.grad
    if grad is not None and grad.dtype == left.dtype:
        # This adds in place, without another tensor of the weight's size.
        grad.addmm_(left, right)
    else:
        _accumulate(owed.weight, left @ right)
    if owed.bias is not None and owed.bias.requires_grad:
        _accumulate(owed.bias, gradient.sum(0))


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
