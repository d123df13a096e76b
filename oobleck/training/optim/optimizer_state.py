"""What an optimizer keeps for a parameter, found by trying it on a parameter of six numbers.

Layers travel between workers with their optimizer state, so its size must be known where the layer is not held. That
is possible for optimizers whose state is a few tensors of the parameter's own shape, a few scalars, and a count of
steps. The count is no part of what travels: every parameter takes part in every step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError

STEP = "step"
"""What torch's optimizers call their count of steps."""

_PROBE_SHAPE = (2, 3)
_PROBE_SHAPES = {"probe": _PROBE_SHAPE, "other": (5, 7)}
_GRADIENT_SCALES = (1.0, 1e4)
"""Of the steps of a trial: large enough for what clips them to do so."""
_SAME = 1e-4
"""How near updates are that differ by rounding alone: fused and not, or several parameters in one kernel."""


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


def make_probe(device: torch.device, shape: tuple[int, int] = _PROBE_SHAPE) -> nn.Parameter:
    """Return a parameter to try an optimizer on."""
    return nn.Parameter(torch.ones(shape, device=device))


def require_independent(
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer], device: torch.device
) -> None:
    """Require that a parameter's updates do not depend on the others that the optimizer from `make` looks after.

    Workers hold different layers, so such an optimizer would train differently with each plan. Raises ConfigError.
    """
    kind, together = _updated(make, tuple(_PROBE_SHAPES), device)
    for name, value in together.items():
        _, alone = _updated(make, (name,), device)
        if not torch.allclose(value, alone[name], rtol=_SAME, atol=_SAME * float((alone[name] - 1).abs().max())):
            raise ConfigError(
                f"optimizer.optim: {kind} updates a parameter differently when it looks after others too, as where it "
                "clips the norm of all gradients itself; workers hold different layers each, so results would depend "
                "on the plan. Leave that to max_grad_norm, or choose another, as adamw or sgd"
            )


def _updated(
    make: Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer], names: Sequence[str], device: torch.device
) -> tuple[str, dict[str, torch.Tensor]]:
    """The optimizer's class, and parameters of ones after some steps, which have the same gradients every time."""
    parameters = {name: make_probe(device, _PROBE_SHAPES[name]) for name in names}
    optimizer = make(parameters)
    for scale in _GRADIENT_SCALES:
        for parameter in parameters.values():
            parameter.grad = scale * torch.linspace(-1, 2, parameter.numel(), device=device).view_as(parameter)
        optimizer.step()
    return type(optimizer).__name__, {name: parameter.detach() for name, parameter in parameters.items()}


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
