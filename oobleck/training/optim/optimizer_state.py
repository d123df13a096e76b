"""What an optimizer keeps for a parameter, found by trying it on a parameter of six numbers.

Layers travel between workers with their optimizer state, so its size must be known where the layer is not held. That
is possible for optimizers whose state is a few tensors of the parameter's own shape, a few scalars, and a count of
steps. The count is no part of what travels: it follows from the step's number, and from the number of steps in which
the parameter had no gradient.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.training.counters import counter_of
from oobleck.training.randomness import drawing_alike, generator_states

STEP = "step"  # the name that torch's optimizers give their count of steps

_PROBE_SHAPE = (2, 3)
_PROBE_SHAPES = {"probe": _PROBE_SHAPE, "other": (5, 7)}
# The second step's gradients are large enough for an optimizer that clips them to do so.
_GRADIENT_SCALES = (1.0, 1e4)
# The sizes of one parameter's gradients in other trials, and the factor by which those of the other are larger.
_SIZES, _FARTHER = tuple(10.0**exponent for exponent in range(-8, 8, 2)), 1e3
# A longer trial has enough steps for a count up to ten to start over.
_SCALES_OF_STEPS = (1.0, 1e4, -1.0, 0.5, 2.0, -3.0, 1.0, 1.0, -0.1, 10.0, 1.0, -1.0)
_NO_OWN = frozenset({"state", "param_groups"})
_DEEPEST = 6  # levels of nested containers that are compared
# Updates nearer than this differ by rounding alone: fused or not, or several parameters in one kernel.
_SAME = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """One tensor that an optimizer keeps for a parameter."""

    name: str
    is_scalar: bool
    """Else it has the parameter's shape."""
    initial: float | None
    """None for the parameter's own value, as of the slow weights of Lookahead."""

    def fresh(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return it as it is before the first step of a parameter with these values."""
        if self.initial is None:
            return parameter.detach().clone()
        shape = () if self.is_scalar else parameter.shape
        # Torch's scalars have its default type, whatever the type of the parameter is.
        dtype = None if self.is_scalar else parameter.dtype
        return torch.full(shape, self.initial, dtype=dtype, device=parameter.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """All that an optimizer keeps for a parameter, except the count of steps."""

    entries: tuple[StateEntry, ...]
    step_device: torch.device | None
    """The device of the count of steps; None if the optimizer has no count."""

    @property
    def num_tensors(self) -> int:
        """The number of tensors of the parameter's shape."""
        return sum(not entry.is_scalar for entry in self.entries)

    def size(self, num_elements: int) -> int:
        """Return the number of elements of a parameter's state, the parameter's own `num_elements` included."""
        own = num_elements + self.counts_steps
        return sum(1 if entry.is_scalar else num_elements for entry in self.entries) + own

    @property
    def counts_steps(self) -> bool:
        return self.step_device is not None


_Make = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
NO_STATE = StateLayout(entries=(), step_device=None)  # for frozen parameters


def layout_of(make: _Make, device: torch.device) -> StateLayout:
    """Find the state that an optimizer from `make` keeps for a parameter.

    Raises ConfigError for an optimizer whose state depends on a parameter's shape in another way.
    """
    probe = _uneven_probe(device)
    own = probe.detach().clone()
    optimizer = make({"probe": probe})
    probe.grad = own.flip(1)
    before = _initialized(optimizer, probe)
    optimizer.step()
    state: Mapping[str, Any] = optimizer.state[probe]
    entries = [
        _entry(optimizer, name, value, before.get(name), own)
        for name, value in state.items()
        if name != STEP and value is not None
    ]
    step = state.get(STEP)
    step_device = step.device if isinstance(step, torch.Tensor) else torch.device("cpu")
    layout = StateLayout(entries=tuple(entries), step_device=None if step is None else step_device)
    created = {entry.name for entry in entries if not isinstance(before.get(entry.name), torch.Tensor)}
    # What the first step creates starts from zero, or else from the parameter's own value. Any other optimizer fails
    # the comparison of `require_state_alone`.
    others = created and _other_state(make, layout, state, device)
    by_value = [
        replace(entry, initial=None) if entry.name in others and not entry.is_scalar else entry for entry in entries
    ]
    from_values = replace(layout, entries=tuple(by_value))
    return from_values if others and not _other_state(make, from_values, state, device) else layout


def _other_state(make: _Make, layout: StateLayout, state: Mapping[str, Any], device: torch.device) -> set[str]:
    """Name what differs from `state` after the first step of an optimizer that starts with the layout's state."""
    probe = _uneven_probe(device)
    probe.grad = probe.detach().flip(1)
    optimizer = make({"probe": probe})
    optimizer.state[probe] = dict(initial_state(layout, probe))
    optimizer.step()
    found = optimizer.state[probe]
    return {entry.name for entry in layout.entries if not _are_alike(found[entry.name], state[entry.name])}


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _are_near(one.double(), other.double(), size=other.abs().max())


def _are_near(one: torch.Tensor, other: torch.Tensor, *, size: torch.Tensor, rounding: float = 0.0) -> bool:
    # A rate that is too large makes numbers that are none, which is for the run to report and not for a trial.
    atol = rounding + (_SAME * float(size) if size.isfinite() else 0.0)
    return torch.allclose(one, other, rtol=_SAME, atol=atol, equal_nan=True)


def _uneven_probe(device: torch.device) -> nn.Parameter:
    # State with the same values is a copy of it, and not of a number.
    return nn.Parameter(torch.linspace(-1.0, 2.0, 6, device=device).view(_PROBE_SHAPE))


def make_probe(device: torch.device, shape: tuple[int, int] = _PROBE_SHAPE) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, device=device))


def require_independent(make: _Make, device: torch.device) -> None:
    """Require that a parameter's updates do not depend on the other parameters of an optimizer from `make`.

    Workers hold different layers, so such an optimizer would train differently with each plan. Raises ConfigError.
    """
    kind = type(make({"probe": make_probe(device)})).__name__
    with drawing_alike(0):
        before = generator_states()
        _updated(make, ("probe",), device)
        if generator_states() != before:
            raise ConfigError(
                f"optimizer.optim: {kind} draws random numbers in a step, and workers hold different layers each, so "
                "results would depend on the plan; leave that out, or add noise in a layer"
            )
    _require_alike(kind, make, device, {"probe": 1.0, "other": 1.0})
    # The other parameter's gradients are much larger, at many sizes of both. A bound on all gradients that is neither
    # tiny nor huge then lies between the two, and makes a difference.
    for size in _SIZES:
        with suppress(TypeError, ValueError, RuntimeError):  # some optimizers do not compute in this precision
            _require_alike(kind, make, device, {"probe": size, "other": _FARTHER * size}, torch.float64)


def _require_alike(
    kind: str, make: _Make, device: torch.device, sizes: Mapping[str, float], dtype: torch.dtype = torch.float32
) -> None:
    together = _updated(make, tuple(sizes), device, sizes, dtype)
    for name, value in together.items():
        alone = _updated(make, (name,), device, sizes, dtype)[name]
        changed, expected = value - 1, alone - 1
        if not _are_near(changed, expected, size=expected.abs().max(), rounding=torch.finfo(dtype).eps * 16):
            raise ConfigError(
                f"optimizer.optim: {kind} updates a parameter differently when it looks after others too, as where it "
                "clips the norm of all gradients itself, or skips steps by it; workers hold different layers each, so "
                "results would depend on the plan. Leave that to max_grad_norm, or choose another, as adamw or sgd"
            )


def _updated(
    make: _Make,
    names: Sequence[str],
    device: torch.device,
    sizes: Mapping[str, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Return parameters after some steps from ones, with the same gradients every time."""
    parameters = {name: nn.Parameter(make_probe(device, _PROBE_SHAPES[name]).detach().to(dtype)) for name in names}
    optimizer = make(parameters)
    for scale in _GRADIENT_SCALES:
        for name, parameter in parameters.items():
            numbers = torch.linspace(-1, 2, parameter.numel(), device=device, dtype=dtype).view_as(parameter)
            parameter.grad = scale * (1.0 if sizes is None else sizes[name]) * numbers
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def require_state_alone(make: _Make, layout: StateLayout, device: torch.device) -> None:
    """Require that the updates of an optimizer from `make` depend on nothing but its `state`, as in `layout`.

    Workers recreate it in every recovery, each with other parameters, and would lose anything that it keeps elsewhere.
    Raises ConfigError that names what it keeps elsewhere, where that can be found.
    """
    stayed, moved = _uneven_probe(device), _uneven_probe(device)
    start = stayed.detach().clone()
    optimizer = make({"probe": stayed})
    kept: dict[str, object] = {}
    for step, scale in enumerate(_SCALES_OF_STEPS):
        recreated = make({"probe": moved})
        state = optimizer.state[stayed]
        values = [state[entry.name].clone() for entry in layout.entries] if step else None
        recreated.state[moved] = dict(initial_state(layout, moved, values))
        if layout.step_device is not None:
            recreated.state[moved][STEP].fill_(step)
        for each, parameter in ((optimizer, stayed), (recreated, moved)):
            parameter.grad = scale * torch.linspace(-1, 2, parameter.numel(), device=device).view_as(parameter)
            each.step()
        # Later steps may go by what the first ones only keep, such as weights to return to.
        for entry in layout.entries:
            if not _are_alike(recreated.state[moved][entry.name], state[entry.name]):
                raise ConfigError(
                    f"optimizer.optim: {type(optimizer).__name__} keeps {entry.name}, which starts from other values "
                    "than one number for all parameters, or the parameter's own: layers could not move with it before "
                    "its first step; start it from zeros_like or clone of the parameter"
                )
        _require_known(optimizer, stayed, layout)
        before, kept = kept, _kept_outside(optimizer, stayed)
        changed = sorted(name for name in kept.keys() | before.keys() if kept.get(name) != before.get(name))
        # Whatever the first step creates, the first step of a new optimizer creates too.
        if (changed and step) or not _is_close(stayed, moved, start):
            raise ConfigError(
                f"optimizer.optim: {type(optimizer).__name__} goes by {changed[0] if changed else 'something'}, which "
                "it keeps outside of `state`, and workers make new optimizers whenever layers change hands; "
                "keep it in the `state` of each parameter, as a scalar or a tensor of the parameter's shape, or leave "
                "rates to lr_lambda"
            )
        with torch.no_grad():
            # Otherwise rounding would add up over the steps.
            moved.copy_(stayed)


def _require_known(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, layout: StateLayout) -> None:
    if (name := unknown_state(optimizer.state[parameter], layout)) is not None:
        raise ConfigError(late_state(type(optimizer).__name__, name))


def unknown_state(state: Mapping[str, object], layout: StateLayout) -> str | None:
    """Name something in a parameter's state that the first step has not created."""
    known = {STEP, *(entry.name for entry in layout.entries)}
    return next((name for name, value in state.items() if name not in known and value is not None), None)


def late_state(optimizer: str, name: str) -> str:
    """Return the message for state that an optimizer creates after its first step."""
    return (
        f"optimizer.optim: {optimizer} creates {name} in a later step than its first, and layers move with the state "
        "that the first step creates; create all of it in the first step"
    )


def require_elementwise(make: _Make, device: torch.device) -> None:
    """Require that an optimizer from `make` updates the rows of a parameter alike, together and apart.

    Devices that hold some rows each would otherwise train a parameter in another way than one with all. Raises
    ConfigError.
    """
    start = torch.linspace(-1.0, 2.0, 12, device=device).view(4, 3)
    rows = (slice(0, 4), slice(0, 2), slice(2, 4))
    whole, *parts = probes = [nn.Parameter(start[own].clone()) for own in rows]
    optimizers = [make({"probe": probe}) for probe in probes]
    for scale in _SCALES_OF_STEPS:
        for own, probe, optimizer in zip(rows, probes, optimizers, strict=True):
            probe.grad = scale * start.flip(1)[own].clone()
            optimizer.step()
    expected, found = whole.detach() - start, torch.cat([part.detach() for part in parts]) - start
    if not _are_near(found, expected, size=expected.abs().max()):
        raise ConfigError(
            f"optimizer.optim: {type(optimizers[0]).__name__} goes by all of a parameter, and with sharding each "
            "device has some of its rows; choose one that goes by each number alone, as adamw, or set sharding: none"
        )


def require_no_count(make: _Make, device: torch.device) -> None:
    """Require that no update of an optimizer from `make` depends on a count that all its instances share.

    Classes and functions may have one, such as a count of steps in a module's dictionary: each worker would have its
    own. Raises ConfigError that names it.
    """

    def updated() -> torch.Tensor:
        with drawing_alike(0):
            return _updated(make, ("probe",), device)["probe"]

    first = updated()

    def same() -> bool:
        return torch.allclose(updated(), first, rtol=0.0, atol=0.0, equal_nan=True)

    optimizer = make({"probe": make_probe(device)})
    kind = type(optimizer).__name__
    if (counter := counter_of({kind: type(optimizer)}, same)) is not None:
        raise ConfigError(
            f"optimizer.optim: {kind} goes by {counter}, which changes with every step outside of `state`: "
            "workers would have their own each; keep it in the `state` of each parameter, or leave rates to lr_lambda"
        )


def _is_close(one: nn.Parameter, other: nn.Parameter, start: torch.Tensor) -> bool:
    return _are_near(one, other, size=(one.detach() - start).abs().max())


def _kept_outside(optimizer: torch.optim.Optimizer, probe: nn.Parameter) -> dict[str, object]:
    """Return what an optimizer keeps besides its parameter's state: its own attributes, and those of its groups."""
    kept = {f"self.{name}": _plain(value, probe) for name, value in vars(optimizer).items() if name not in _NO_OWN}
    for group in optimizer.param_groups:
        kept |= {
            f"param_groups[…]['{name}']": _plain(value, probe) for name, value in group.items() if name != "params"
        }
    others: Mapping[Any, object] = optimizer.state
    return kept | {f"state[{key!r}]": _plain(value, probe) for key, value in others.items() if key is not probe}


def _plain(value: object, probe: nn.Parameter, depth: int = 0) -> object:
    """Return a value in a form that can be compared with its later value; routines and classes never change."""
    if value is probe or depth > _DEEPEST or inspect.isroutine(value) or inspect.isclass(value):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.detach().reshape(-1).tolist())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # not-a-number equals itself only as text
    inner: Iterable[object] = vars(value).items() if hasattr(value, "__dict__") else ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = value
    return type(value).__name__, *(_plain(each, probe, depth + 1) for each in inner)


def initial_state(
    layout: StateLayout, parameter: nn.Parameter, values: Sequence[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step, or with these `values`, one for each entry."""
    if values is not None:
        state = {entry.name: value for entry, value in zip(layout.entries, values, strict=True)}
    else:
        state = {entry.name: entry.fresh(parameter) for entry in layout.entries}
    if layout.step_device is not None:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=layout.step_device)
    return state


def flat_tensors(
    layout: StateLayout, parameter: nn.Parameter, state: Mapping[str, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield a parameter's tensors that move with a layer: itself, and its state in the layout's order."""
    yield parameter.detach()
    for entry in layout.entries:
        yield state[entry.name]


def _entry(optimizer: torch.optim.Optimizer, name: str, value: object, before: object, own: torch.Tensor) -> StateEntry:
    kind = type(optimizer).__name__
    if not isinstance(value, torch.Tensor) or value.shape not in (own.shape, torch.Size()):
        raise ConfigError(
            f"optimizer.optim: {kind} keeps {name}, which is neither a number nor of the parameter's shape; layers "
            "cannot change hands with it. Choose another, as adamw or sgd"
        )
    initial: float | None = 0.0
    if isinstance(before, torch.Tensor):
        is_own = before.shape == own.shape and torch.equal(before, own)
        initial = None if is_own else float(before.reshape(-1)[0])
    return StateEntry(name=name, is_scalar=value.ndim == 0, initial=initial)


def _initialized(optimizer: torch.optim.Optimizer, probe: nn.Parameter) -> dict[str, object]:
    """Return copies of what the optimizer keeps before its first step."""
    # Most optimizers of torch have this method. State that is created in the first step itself starts from zero.
    start: Any = getattr(optimizer, "_init_group", None)
    if start is not None:
        lists: Sequence[list[object]] = [[] for _ in list(inspect.signature(start).parameters)[1:]]
        start(optimizer.param_groups[0], *lists)
    state = optimizer.state[probe]
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
