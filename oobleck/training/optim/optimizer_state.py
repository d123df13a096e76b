"""What an optimizer keeps for a parameter, found by trying it on a parameter of six numbers.

Layers travel between workers with their optimizer state, so its size must be known where the layer is not held. That
is possible for optimizers whose state is a few tensors of the parameter's own shape, a few scalars, and a count of
steps. The count is no part of what travels: every parameter takes part in every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError

STEP = "step"
"""What torch's optimizers call their count of steps."""

_PROBE_SHAPE = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor that an optimizer keeps for a parameter."""

    name: str
    is_scalar: bool
    """Else it has the parameter's shape."""
    initial: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """All that an optimizer keeps for a parameter, beside the count of steps."""

    entries: tuple[StateEntry, ...]
    step_device: torch.device | None
    """Where the count of steps is kept; None where there is none."""

    @property
    def num_tensors(self) -> int:
        """Tensors of a parameter's shape."""
        return sum(not entry.is_scalar for entry in self.entries)

    def size(self, num_elements: int) -> int:
        """Elements of the state of a parameter of so many, itself included."""
        return sum(1 if entry.is_scalar else num_elements for entry in self.entries) + num_elements


NO_STATE = StateLayout(entries=(), step_device=None)
"""Of a parameter that is not trained."""


def layout_of(optimizer: torch.optim.Optimizer, probe: nn.Parameter) -> StateLayout:
    """Find what `optimizer`, which looks after `probe` alone, keeps for it. Changes both.

    Raises ConfigError for an optimizer whose state depends on a parameter's shape in another way.
    """
    probe.grad = torch.ones_like(probe)
    before = _initialized(optimizer, probe)
    optimizer.step()
    state: Mapping[str, object] = optimizer.state[probe]
    entries = [
        _entry(optimizer, name, value, before.get(name), probe)
        for name, value in state.items()
        if name != STEP and value is not None
    ]
    step = state.get(STEP)
    device = step.device if isinstance(step, torch.Tensor) else torch.device("cpu")
    return StateLayout(entries=tuple(entries), step_device=None if step is None else device)


def make_probe(device: torch.device) -> nn.Parameter:
    """Return a parameter to try an optimizer on."""
    return nn.Parameter(torch.ones(_PROBE_SHAPE, device=device))


def initial_state(
    layout: StateLayout, parameter: nn.Parameter, values: Sequence[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step; with `values`, these, one for each entry."""
    if values is not None:
        state = {entry.name: value for entry, value in zip(layout.entries, values, strict=True)}
    else:
        state = {
            entry.name: torch.full((), entry.initial, device=parameter.device)
            if entry.is_scalar
            else torch.full_like(parameter, entry.initial, requires_grad=False)
            for entry in layout.entries
        }
    if layout.step_device is not None:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=layout.step_device)
    return state


def flat_tensors(
    layout: StateLayout, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield what travels of a parameter: itself, and its state in the layout's order."""
    yield parameter.detach()
    for entry in layout.entries:
        yield state[entry.name]


def _entry(
    optimizer: torch.optim.Optimizer, name: str, value: object, before: object, probe: nn.Parameter
) -> StateEntry:
    kind = type(optimizer).__name__
    if not isinstance(value, torch.Tensor) or value.shape not in (probe.shape, torch.Size()):
        raise ConfigError(
            f"optimizer.optim: {kind} keeps {name}, which is neither a number nor of the parameter's shape; layers "
            "cannot change hands with it. Choose another, as adamw or sgd"
        )
    initial = float(before.reshape(-1)[0]) if isinstance(before, torch.Tensor) else 0.0
    return StateEntry(name=name, is_scalar=value.ndim == 0, initial=initial)


def _initialized(optimizer: torch.optim.Optimizer, probe: nn.Parameter) -> dict[str, object]:
    """Return copies of what the optimizer keeps before its first step; what it makes in that step starts from zero."""
    start: Any = getattr(optimizer, "_init_group", None)
    if start is not None:
        lists: Sequence[list[object]] = [[] for _ in list(inspect.signature(start).parameters)[1:]]
        start(optimizer.param_groups[0], *lists)
    state = optimizer.state[probe]
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
