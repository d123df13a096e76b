"""An optimizer of torch.optim over the parameters that a worker currently holds.

A parameter's state is the parameter itself, the optimizer's tensors for it, and, in place of the count of steps, the
number of steps that the parameter has missed because it had no gradient. All of this travels between workers and goes
into checkpoints.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError, CorruptCheckpoint
from oobleck.job import OptimizerSpec
from oobleck.training.counters import changed_since, counter_of, states_of

from . import optimizer_state
from .learning_rate import rate_factor

OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer over torch's parameter groups, each with its `weight_decay`."""

MISSED = "missed"  # the number of missed steps in files, which lack it where it is 0
# These are abstract, evaluate the model again within a step, or need sparse gradients.
_UNFIT = ("Optimizer", "LBFGS", "SparseAdam")
_NUM_RATES_TRIED, _NUM_LATER_RATES = 16, 256
_OWN_RATES = "each worker calls its own, from the step that it joins in; compute the rate from the step's number alone"


class Optimizer:
    """The job's optimizer with its schedule.

    Arguments:
        spec: the job's optimizer and schedule.
        max_steps: the length of the schedule.
        factory: replaces the class that `spec` names.
        schedule: replaces the schedule of `spec`; maps a step's number to a factor of the learning rate.
        frozen: the canonical names of parameters without updates or state.
        decayed: the canonical names of parameters with weight decay; by default, those of two dimensions or more, so
            neither norms nor biases.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        *,
        max_steps: int,
        factory: OptimizerFactory | None = None,
        schedule: Callable[[int], float] | None = None,
        frozen: Collection[str] = (),
        decayed: Collection[str] | None = None,
        is_sharded: bool = False,
        is_tried: bool = False,
    ) -> None:
        """With `is_sharded`, it updates rows of parameters. With `is_tried`, another process has tried the script's
        optimizer: workers start without that.
        """
        self.spec = spec
        self._is_sharded = is_sharded
        self._is_tried = is_tried
        self._schedule = schedule or (lambda step: rate_factor(spec, step=step, max_steps=max_steps))
        self._peak = spec.learning_rate
        self._make = factory or _named(spec)
        self._frozen = frozenset(frozen)
        self._decayed = None if decayed is None else frozenset(decayed)
        self._layouts: dict[torch.device, optimizer_state.StateLayout] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._missed: dict[str, int] = {}
        self._optimizer: torch.optim.Optimizer | None = None

    def layout(self, device: torch.device | None = None) -> optimizer_state.StateLayout:
        """Return the layout of a parameter's state on `device`. Raises ConfigError for an unfit optimizer."""
        device = device or torch.device("cpu")
        if device not in self._layouts:

            def make(probes: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
                return self._make(self._groups(probes))

            self._peak = make({"probe": optimizer_state.make_probe(device)}).param_groups[0]["lr"]
            layout = optimizer_state.layout_of(make, device)
            if not self._is_tried:
                # Counts come first: more steps might pass the number on which results depend.
                optimizer_state.require_no_count(make, device)
                optimizer_state.require_independent(make, device)
                optimizer_state.require_state_alone(make, layout, device)
                if self._is_sharded:
                    optimizer_state.require_elementwise(make, device)
            self._layouts[device] = layout
        return self._layouts[device]

    @torch.no_grad()
    def adopt(
        self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, Sequence[torch.Tensor]] | None = None
    ) -> None:
        """Update these parameters, keyed by canonical name, from now on; release the state of all others.

        A known parameter object keeps its state; a new one has initial state. `states` comes from `split_layer`: a new
        parameter takes its tensors without a copy, and a known one takes their values.
        """
        before, self._optimizer = self._optimizer, None
        known = {id(parameter) for parameter in self._parameters.values()}
        missed = {name: count for name, count in self._missed.items() if id(parameters.get(name)) in known}
        self._parameters, self._missed = dict(parameters), missed
        if trained := self._trained():
            self._optimizer = self._make(self._groups(trained))
        for name, parameter in parameters.items():
            values = (states or {}).get(name)
            if self._optimizer is not None and name in trained:
                if before is not None and id(parameter) in known:
                    self._optimizer.state[parameter] = before.state[parameter]
                else:
                    layout = self.layout(parameter.device)
                    self._optimizer.state[parameter] = optimizer_state.initial_state(
                        layout, parameter, values[1 : 1 + len(layout.entries)] if values else None
                    )
            if values is not None:
                if self._layout_of(name, parameter.device).counts_steps:
                    self._missed[name] = int(values[-1])
                for own, value in zip(self._state([name]), values, strict=True):
                    # A new parameter has taken the received tensors themselves.
                    if own.data_ptr() != value.data_ptr():
                        own.copy_(value)

    def require_pure_schedule(self, *, max_steps: int) -> None:
        """Raise ConfigError for a schedule that returns another rate for a step when it is called again, or later."""
        schedule, owners = self._schedule, {"lr_lambda": self._schedule}
        before = states_of(owners)
        steps = range(1, min(max_steps, _NUM_RATES_TRIED) + 1)
        first = {step: schedule(step) for step in steps}
        with suppress(Exception):  # a run may end before these steps, for which a table may have no rate
            for step in range(len(steps) + 1, max_steps + 1, 1 + max_steps // _NUM_LATER_RATES):
                first[step] = schedule(step)
        # In reverse, as something that a late step sets changes the rates of those before.
        for step, rate in reversed(first.items()):
            if (again := schedule(step)) != rate:
                raise ConfigError(
                    f"lr_lambda: it returns {rate} for step {step}, and {again} when it is called again: {_OWN_RATES}"
                )
        # Most schedules keep nothing, and need no further calls.
        if not changed_since(owners, before):
            return
        if (counter := counter_of(owners, lambda: all(schedule(step) == first[step] for step in steps))) is not None:
            raise ConfigError(
                f"lr_lambda: it returns another rate for a step, sooner or later, as it goes by {counter}, which "
                f"changes with every call: {_OWN_RATES}"
            )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 1."""
        return self._peak * self._schedule(step)

    def step(
        self,
        step: int,
        gradients: Mapping[str, torch.Tensor],
        clip_coefficient: float = 1.0,
        *,
        num_skipped: int = 0,
    ) -> None:
        """Apply one step.

        Arguments:
            step: its number, from 1.
            gradients: keyed by canonical name, reduced over each parameter's owners. Clipping changes them in place. A
                trained parameter without one stays as it is, and so does its state.
            clip_coefficient: the factor of gradients.
            num_skipped: the number of earlier steps that were skipped.
        """
        trained = self._trained()
        assert gradients.keys() <= trained.keys(), "no other parameter has a gradient"
        if self._optimizer is None:
            return
        names = [name for name in trained if name in gradients]
        scaled = [gradients[name] for name in names]
        if scaled and clip_coefficient != 1.0:
            torch._foreach_mul_(scaled, clip_coefficient)
        for name, gradient in zip(names, scaled, strict=True):
            parameter = trained[name]
            parameter.grad = gradient.view_as(parameter)
            # The count of steps travels with no layer, since it follows from the step's number.
            if optimizer_state.STEP in (state := self._optimizer.state[parameter]):
                state[optimizer_state.STEP].fill_(step - 1 - num_skipped - self._missed.get(name, 0))
        for name in trained.keys() - gradients.keys():
            self._missed[name] = self._missed.get(name, 0) + 1
        factor = self._schedule(step)
        # A factory of the script's may have given its groups rates of their own.
        for group in self._optimizer.param_groups:
            group["lr"] = group.setdefault("peak_lr", group["lr"]) * factor
        self._optimizer.step()
        for parameter in trained.values():
            parameter.grad = None
        self._require_known_state(names)

    def _require_known_state(self, names: Sequence[str]) -> None:
        assert self._optimizer is not None
        for name in names:
            state, layout = self._optimizer.state[self._parameters[name]], self.layout(self._parameters[name].device)
            if len(state) <= len(layout.entries):
                continue
            # The trials have seen its first steps only.
            if (late := optimizer_state.unknown_state(state, layout)) is not None:
                raise ConfigError(optimizer_state.late_state(type(self._optimizer).__name__, late))

    def layer_tensors(self, names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        """Return each parameter, followed by its state (none if frozen) in the order of `layout`; not copies."""
        return tuple(self._state(names))

    def empty_layer(
        self, shapes: Mapping[str, torch.Size], *, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Allocate the tensors of parameters of these names and shapes, in the order of `layer_tensors`."""
        tensors: list[torch.Tensor] = []
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
            layout = self._layout_of(name, device)
            tensors += optimizer_state.flat_tensors(layout, parameter, optimizer_state.initial_state(layout, parameter))
            if layout.counts_steps:
                tensors.append(torch.empty((), dtype=dtype, device=device))
        return tuple(tensors)

    def split_layer(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return each parameter's part of a layer's tensors, which are in the order of `layer_tensors`."""
        rest = iter(tensors)
        split = {name: tuple(islice(rest, len(self._file_names(name)))) for name in names}
        assert next(rest, None) is None, "a layer's tensors are those of its parameters"
        return split

    def named_state(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the current tensors of these parameters, not copied, keyed by their names in files."""
        keys = [key for name in names for key in self._file_names(name)]
        never = {self._missed_name(name) for name in names if not self._missed.get(name)}
        return {key: value for key, value in zip(keys, self._state(names), strict=True) if key not in never}

    def flat_state(
        self,
        names: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        *,
        shapes: Mapping[str, torch.Size],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return a flat tensor in the order of `layer_tensors`, from tensors of any precision, as of `named_state`.

        Missing state has initial values. Raises CorruptCheckpoint for a parameter that is missing or has another shape.
        """
        flat: list[torch.Tensor] = []
        for name in names:
            if name not in tensors or tensors[name].shape != shapes[name]:
                found = list(tensors[name].shape) if name in tensors else "nothing"
                raise CorruptCheckpoint(
                    f"parameter {name} should have the shape {list(shapes[name])}; there is {found}"
                )
            flat.append(tensors[name].reshape(-1).to(dtype))
            # An optimizer of another kind may have saved the checkpoint.
            layout, parameter = self._layout_of(name), flat[-1]
            fresh = [entry.fresh(parameter).reshape(-1).to(dtype) for entry in layout.entries]
            if layout.counts_steps:
                fresh.append(torch.zeros(1, dtype=dtype))
            for key, initial in zip(self._file_names(name)[1:], fresh, strict=True):
                flat.append(tensors[key].reshape(-1).to(dtype) if key in tensors else initial)
        return torch.cat(flat)

    def _file_names(self, parameter: str) -> tuple[str, ...]:
        """Return the names in files of a parameter and its state, in the order of `_state`."""
        layout = self._layout_of(parameter)
        kept = [f"optimizer.{entry.name}.{parameter}" for entry in layout.entries]
        return (parameter, *kept, self._missed_name(parameter)) if layout.counts_steps else (parameter, *kept)

    def _missed_name(self, parameter: str) -> str:
        return f"optimizer.{MISSED}.{parameter}"

    def _state(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for name in names:
            parameter = self._parameters[name]
            state = {} if self._optimizer is None or name in self._frozen else self._optimizer.state[parameter]
            layout = self._layout_of(name, parameter.device)
            yield from optimizer_state.flat_tensors(layout, parameter, state)
            if layout.counts_steps:
                yield torch.tensor(self._missed.get(name, 0), dtype=parameter.dtype, device=parameter.device)

    def _groups(self, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Return torch's groups of parameters with and without weight decay, unless they are empty."""
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            is_decayed = parameter.ndim > 1 if self._decayed is None else name in self._decayed
            (decayed if is_decayed else others).append(parameter)
        groups = ({"params": decayed, "weight_decay": self.spec.weight_decay}, {"params": others, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self._parameters.items() if name not in self._frozen}

    def _layout_of(self, name: str, device: torch.device | None = None) -> optimizer_state.StateLayout:
        return optimizer_state.NO_STATE if name in self._frozen else self.layout(device)


def _named(spec: OptimizerSpec) -> OptimizerFactory:
    """Return a factory of the class of torch.optim that a specification names, fused where torch can."""
    # The names of `TrainingArguments.optim`: adamw_torch, adamw_torch_fused.
    name = spec.optim.removesuffix("_fused").removesuffix("_torch")
    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and name not in _UNFIT
    }
    if name not in classes:
        raise ConfigError(f"optimizer.optim: {spec.optim!r} is not known; it is one of {', '.join(classes)}")
    kind: Callable[..., torch.optim.Optimizer] = classes[name]
    takes = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {"lr": spec.learning_rate}
    if "betas" in takes:
        arguments |= {"betas": (spec.adam_beta1, spec.adam_beta2), "eps": spec.adam_epsilon}
    arguments |= spec.optim_args
    for key in spec.optim_args:
        if key not in takes or key in ("lr", "params"):
            raise ConfigError(f"optimizer.optim_args.{key}: {classes[name].__name__} takes no such argument")

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            if "fused" in takes and "fused" not in arguments:
                with suppress(RuntimeError):  # not fused on this device
                    return kind(groups, **arguments, fused=True)
            return kind(groups, **arguments)
        # Classes refuse their arguments with various errors.
        except Exception as error:
            raise ConfigError(f"optimizer: {classes[name].__name__} refuses its arguments: {error}") from error

    return make
