"""Records a plain loop: the numbers of each step, and the model before, after the first step and at the end.

It keeps three copies of the model in the host's memory until they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from oobleck.control.verification import StepAccount, TensorDifference, Tolerance

Values = dict[str, torch.Tensor]


class Recorder:
    def __init__(self, model: nn.Module, *, num_steps: int, tolerance: Tolerance) -> None:
        """Copies the model's current values."""
        self._model = model
        self._num_steps = num_steps
        self._tolerance = tolerance
        self._names = _names_of(model)
        self._buffers = frozenset(self._names) - {name for name, _ in model.named_parameters()}
        self._before = self._values()
        self._after: dict[int, Values] = {}
        self._noise: frozenset[str] = frozenset()
        self.steps: list[StepAccount] = []

    @property
    def is_done(self) -> bool:
        return len(self.steps) >= self._num_steps

    def note_gradients(self) -> None:
        """Find gradients that are mere rounding noise, before the first step clips them. O(parameters)."""
        if self.steps:
            return
        norms = {
            name: float(parameter.grad.norm(dtype=torch.float64))
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }
        least = self._tolerance.noise * sum(norm**2 for norm in norms.values()) ** 0.5
        self._noise = frozenset(name for name, norm in norms.items() if 0 < norm <= least)

    def step_done(self, *, loss: float, grad_norm: float, learning_rate: float, samples: Iterable[int] | None) -> None:
        step = len(self.steps) + 1
        self.steps.append(
            StepAccount(
                step=step,
                loss=loss,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                samples=None if samples is None else tuple(samples),
            )
        )
        if step in (1, self._num_steps):
            self._after[step] = self._values()

    def forget_model(self) -> None:
        """Release the model, and keep the copies."""
        self._model = nn.Module()

    def compare(self, weights_after: Callable[[int], Mapping[str, torch.Tensor] | None]) -> Iterator[TensorDifference]:
        """Compare the copies with the weights of a run, which are None after a step that it did not save."""
        for step, values in self._after.items():
            weights = weights_after(step)
            if weights is not None:
                yield from self._compare(step, values, weights)

    def _compare(self, step: int, values: Values, weights: Mapping[str, torch.Tensor]) -> Iterator[TensorDifference]:
        unknown = set(weights)
        for name, aliases in self._names.items():
            is_buffer = name in self._buffers
            unknown -= set(aliases)
            found = [weights[alias] for alias in aliases if alias in weights]
            if not found:
                problem = "is not in what the run has saved"
                yield TensorDifference(name=name, step=step, is_buffer=is_buffer, problem=problem)
            elif found[0].shape != values[name].shape:
                shapes = f"{tuple(found[0].shape)} on the nodes, and {tuple(values[name].shape)} by itself"
                problem = f"has the shape {shapes}"
                yield TensorDifference(name=name, step=step, is_buffer=is_buffer, problem=problem)
            else:
                yield self._difference(name, step, values[name], found[0])
        for name in sorted(unknown):
            problem = "is in what the run has saved, and not in the script's model"
            yield TensorDifference(name=name, step=step, problem=problem)

    def _difference(self, name: str, step: int, own: torch.Tensor, found: torch.Tensor) -> TensorDifference:
        wide = torch.float64
        ours, theirs = found.to(own.dtype).to(wide), own.to(wide)
        # Training that diverges alike in both is no difference between them: what is not a number in both is left out.
        is_number = theirs.isfinite()
        difference = (ours - theirs).masked_fill((ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0)
        moved = (theirs - self._before[name].to(wide))[is_number]
        return TensorDifference(
            name=name,
            step=step,
            is_buffer=name in self._buffers,
            size=float(theirs[is_number].norm()),
            moved=float(moved.norm()),
            difference=float(difference.norm()),
            largest=float(difference.abs().max()) if difference.numel() else 0.0,
            is_noise=name in self._noise,
        )

    def _values(self) -> Values:
        state = self._model.state_dict()
        return {name: state[name].detach().to("cpu", copy=True) for name in self._names}


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the global norm of gradients, as torch's clipping computes it."""
    # Not the exact norm: in single precision, torch's is too small by a factor of 1e-5 for a million values.
    return float(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))


def _names_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter and saved buffer, keyed by its first name."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        home = first.setdefault(id(value), name)
        names[home] = (*names.get(home, ()), name)
    return names
