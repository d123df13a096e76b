"""AdamW over the parameters that a worker holds at the moment.

The state of a parameter is the parameter itself and the two moments of its gradient. The number of steps is
no part of it: every parameter takes part in every step, so the step's own number serves. A layer's state can
be taken out and put in as one flat tensor, which is what travels between workers and goes into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.adamw import adamw

from oobleck.job import OptimizerSpec

from .learning_rate import learning_rate

__all__ = ["STATE_TENSORS", "Optimizer"]

STATE_TENSORS = 3
"""Tensors of state a parameter: itself, exp_avg and exp_avg_sq."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A parameter and what AdamW keeps for it."""

    parameter: nn.Parameter
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    """A scalar that AdamW counts up; set before each step."""

    @classmethod
    def fresh(cls, parameter: nn.Parameter) -> _Slot:
        return cls(
            parameter=parameter,
            exp_avg=torch.zeros_like(parameter, requires_grad=False),
            exp_avg_sq=torch.zeros_like(parameter, requires_grad=False),
            step=torch.zeros((), dtype=torch.float32, device=parameter.device),
        )

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        return (self.parameter.detach(), self.exp_avg, self.exp_avg_sq)


class Optimizer:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019) with a schedule.

    Parameters of one dimension (norms, biases) are not decayed.
    """

    def __init__(self, spec: OptimizerSpec, *, max_steps: int) -> None:
        self.spec = spec
        self.max_steps = max_steps
        self._slots: dict[str, _Slot] = {}

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look after these parameters, by canonical name, from now on.

        A parameter object that is known already keeps its moments; a new one starts with zeros, until
        `load_layer_state` sets them. The moments of the others are let go.
        """
        self._slots = {name: self._slot(name, parameter) for name, parameter in parameters.items()}

    def learning_rate(self, step: int) -> float:
        """Return the learning rate that a step is applied with; steps count from 1."""
        return learning_rate(self.spec, step=step, max_steps=self.max_steps)

    def step(self, step: int, gradients: Mapping[str, torch.Tensor], clip_coefficient: float = 1.0) -> None:
        """Apply one step.

        Arguments:
            step: its number, from 1.
            gradients: one for each parameter, by canonical name, reduced over its owners. Not changed.
            clip_coefficient: what gradients are multiplied with, at most 1.
        """
        assert gradients.keys() == self._slots.keys(), "every parameter needs its gradient"
        for is_decayed, weight_decay in ((True, self.spec.weight_decay), (False, 0.0)):
            names = [name for name, slot in self._slots.items() if (slot.parameter.ndim > 1) == is_decayed]
            if names:
                self._apply(names, gradients, step=step, clip_coefficient=clip_coefficient, weight_decay=weight_decay)

    @torch.no_grad()
    def layer_state(self, names: Sequence[str]) -> torch.Tensor:
        """Return a copy of the state of these parameters: one flat tensor, for each name the parameter and moments."""
        return torch.cat([tensor.reshape(-1) for tensor in self._state(names)])

    @torch.no_grad()
    def load_layer_state(self, names: Sequence[str], flat: torch.Tensor) -> None:
        """Set the state of these parameters, in place, from what `layer_state` returned for the same names."""
        assert flat.numel() == sum(tensor.numel() for tensor in self._state(names)), flat.numel()
        start = 0
        for tensor in self._state(names):
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()

    def _state(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            yield from self._slots[name].state

    def _slot(self, name: str, parameter: nn.Parameter) -> _Slot:
        known = self._slots.get(name)
        return known if known is not None and known.parameter is parameter else _Slot.fresh(parameter)

    def _apply(
        self,
        names: Sequence[str],
        gradients: Mapping[str, torch.Tensor],
        *,
        step: int,
        clip_coefficient: float,
        weight_decay: float,
    ) -> None:
        slots = [self._slots[name] for name in names]
        for slot in slots:
            slot.step.fill_(step - 1)
        scaled = [gradients[name].view_as(self._slots[name].parameter) for name in names]
        if clip_coefficient != 1.0:
            scaled = [gradient * clip_coefficient for gradient in scaled]
        with torch.no_grad():
            adamw(
                [slot.parameter for slot in slots],
                scaled,
                [slot.exp_avg for slot in slots],
                [slot.exp_avg_sq for slot in slots],
                [],
                [slot.step for slot in slots],
                fused=True,
                amsgrad=False,
                beta1=self.spec.adam_beta1,
                beta2=self.spec.adam_beta2,
                lr=self.learning_rate(step),
                weight_decay=weight_decay,
                eps=self.spec.adam_epsilon,
                maximize=False,
            )
