"""What a model's layers compute, whoever wrote them: tried on made-up samples, one layer of each kind.

A batch is cut into microbatches over nodes, some of which run again after a failure, and gradients are divided by the
number of tokens that count when all are known. So a layer must compute each sample as if it was alone, the same when it
runs again, and gradients in proportion to those that it is given. One that does not would train differently with each
plan, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey, drawing_alike

from .counters import counter_of
from .loss_trial import CapturedHead, made_up_labels, made_up_weights
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _NUM_TOKENS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_LONGEST = 512
"""Tokens of a sample for layers that do not run on fewer than the model is made for."""
_ALL, _PARTS = slice(0, 3), (slice(0, 1), slice(1, 3))
"""Of three samples: a number that few other dimensions have."""
_SCALES = (2.0**-20, 2.0**20)
"""Of gradients: powers of two, by which nothing is rounded differently."""
_LINEAR, _ALIKE = 1e-5, 1e-4
"""By how much results may differ, as a share of the largest."""
_MOST_DIFFERENTIATED = 1 << 20
"""Elements of a parameter whose gradient is looked at; that of hidden states always is."""
_MOST_OF_ONE_THREAD = 1 << 24
"""Elements of a layer."""


class _Fault(Enum):
    """What is wrong with a layer, and what to do about it."""

    REPEATS = (
        "returns something else when it runs again on the same samples, and microbatches are spread over nodes and run "
        "again after a failure; leave out what depends on earlier forward passes (a count, a memory), and draw random "
        "numbers from torch's own generator (torch.rand)"
    )
    MIXES = (
        "computes a sample with the others of its batch, and batches are cut into microbatches over nodes; have it "
        "compute each sample by itself, as LayerNorm and GroupNorm do"
    )
    SCALES = (
        "computes gradients that are not in proportion to those that it is given, which are not those of the script "
        "(losses are divided by all tokens first, and by those that count afterwards); leave out hooks and autograd "
        "functions that clip gradients or go by their size, or give max_grad_norm"
    )


def try_layers(structure: ModelStructure) -> None:
    """Raise ConfigError that names a module which would train differently in other microbatches.

    A layer that does not run on made-up samples is taken as it is. Takes as long as building the model without memory,
    and a dozen passes of a few tokens for each kind of layer; memory for one layer.
    """
    captured = CapturedHead()
    stage = captured.stage_of(replace(structure, drops=False, weights=None))
    lengths = sorted({min(each, structure.sequence_length) for each in (_LENGTH, _LONGEST)})
    tried: set[object] = set()
    for layer in range(structure.num_layers):
        modules = stage.modules_of(layer)
        kind = (layer == 0, structure.layer_kind(layer), *(each for root in modules for each in _traits(root)))
        if kind in tried:
            continue
        tried.add(kind)
        stage.adopt(layer, layer + 1, made_up_weights(structure, layer))
        stage.start_buffers([layer])
        for parameter in stage.trained_parameters.values():
            parameter.requires_grad_(parameter.numel() <= _MOST_DIFFERENTIATED)
        with _in_one_thread(stage):
            for length in lengths:
                if _is_tried(_Layer(stage, layer, captured, length)):
                    break


def _is_tried(layer: _Layer) -> bool:
    """Say whether a layer runs on made-up samples. Raises ConfigError for one with a fault."""
    try:
        fault = _fault_of(layer.run, layer.stage.evaluating)
        counter = None if fault else _counter_of(layer)
    except ConfigError:
        raise
    # It is somebody else's code, and may fail in any way.
    except Exception:  # noqa: BLE001
        return False
    if fault is not None:
        raise ConfigError(f"model: {layer.culprit(fault)} {fault.value}")
    if counter is not None:
        raise ConfigError(f"model: {counter} counts forward passes, and its module {_Fault.REPEATS.value}")
    return True


@contextmanager
def _in_one_thread(stage: StageModel) -> Iterator[None]:
    """Within the block small layers are computed by one thread: others would cost more than they do."""
    before = torch.get_num_threads()
    if sum(each.numel() for each in stage.parameters.values()) <= _MOST_OF_ONE_THREAD:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _traits(root: nn.Module) -> Iterator[object]:
    """What makes layers compute differently, beside their parameters."""
    for path, module in root.named_modules():
        plain = [(key, value) for key, value in vars(module).items() if isinstance(value, bool | str)]
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        functions = [*(hook for kind in hooks for hook in kind.values()), *filter(callable, vars(module).values())]
        yield path, type(module), *plain, *(getattr(each, "__code__", type(each)) for each in functions)


# --- what is run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass: what came out, and what that depends on."""

    output: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    """What the gradient is taken of: hidden states first, if there are any."""
    rows: slice

    def gradients(self, scale: float = 1.0) -> list[torch.Tensor]:
        """Return the gradients of the inputs, divided by the scale that they are computed at."""
        if not self.output.requires_grad or not self.inputs:
            return []
        generator = torch.Generator().manual_seed(3)
        given = torch.randn((_ALL.stop, *self.output.shape[1:]), generator=generator)[self.rows] * scale
        found = torch.autograd.grad(
            self.output, self.inputs, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [each / scale for each in found]


_Run = Callable[[slice, int], _Pass]
"""From which samples there are, and a seed of what is drawn, to a forward pass."""


class _Layer:
    """A layer of a stage that has no other, on made-up samples."""

    def __init__(self, stage: StageModel, layer: int, captured: CapturedHead, length: int) -> None:
        self.stage, self._layer, self._captured = stage, layer, captured
        generator, size = torch.Generator().manual_seed(1), (_ALL.stop, length)
        structure = stage.structure
        self._ids = torch.randint(min(_NUM_TOKENS, structure.config.vocab_size), size, generator=generator)
        self._hidden = torch.randn((*size, structure.hidden_size), generator=generator)

    def run(self, rows: slice, seed: int) -> _Pass:
        """Run the layer on some of the samples."""
        stage, ids = self.stage, self._ids[rows]
        hidden = None if self._layer == 0 else self._hidden[rows].clone().requires_grad_()
        batch = Batch(input_ids=ids, labels=made_up_labels(stage.structure.task, ids))
        key = MicrobatchKey(seed=seed, step=1, microbatch=0)
        with drawing_alike(seed):
            output = stage.forward(batch, hidden, num_items=ids.numel(), key=key)
        if stage.is_last:
            output = self._captured.logits()
        inputs = [each for each in stage.parameters.values() if each.requires_grad]
        return _Pass(output, tuple(inputs if hidden is None else [hidden, *inputs]), rows)

    def culprit(self, fault: _Fault) -> str:
        """Name the innermost module that has the fault by itself; the layer where none does."""
        model = self.stage.model
        names = {id(module): path for path, module in model.named_modules()}
        with _noting_calls(model) as calls:
            self.run(_ALL, 0)
        for call in calls:
            with suppress(Exception):  # as above
                if _fault_of(call.run, self.stage.evaluating) is fault:
                    return f"{names[id(call.module)]} ({type(call.module).__name__})"
        modules = self.stage.modules_of(self._layer)
        if len(modules) == 1:
            return f"{names[id(modules[0])]} ({type(modules[0]).__name__})"
        return f"{self.stage.structure.layer_names[self._layer]} of {type(model).__name__}"


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module, as its model makes it."""

    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def run(self, rows: slice, seed: int) -> _Pass:
        """Call the module again with some of the samples."""
        leaves: list[torch.Tensor] = []

        def of_rows(value: Any) -> Any:
            match value:
                case torch.Tensor():
                    taken = (value[rows] if value.ndim and len(value) == _ALL.stop else value).detach().clone()
                    if taken.is_floating_point() and value.requires_grad:
                        leaves.append(taken.requires_grad_())
                    return taken
                case tuple() | list() if type(value) in (tuple, list):
                    return type(value)(map(of_rows, value))
            return value

        arguments, named = of_rows(self.arguments), {name: of_rows(value) for name, value in self.named.items()}
        with drawing_alike(seed):
            output = self.module(*arguments, **named)
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return _Pass(given, tuple(leaves), rows)


@contextmanager
def _noting_calls(model: nn.Module) -> Iterator[list[_Call]]:
    """Within the block calls of modules are noted, those that a module makes before its own."""
    calls: list[_Call] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _output: object) -> None:
        calls.append(_Call(module, arguments, named))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# --- what is found ---------------------------------------------------------------------------------------------


def _fault_of(run: _Run, evaluating: Callable[[], AbstractContextManager[object]]) -> _Fault | None:
    """Find what is wrong with what is run, by its results alone. Raises what it raises."""
    first = run(_ALL, 0)
    gradients = first.gradients()
    if not all(each.isfinite().all() for each in (first.output, *gradients)):
        raise ArithmeticError("made-up values have no result")
    if not _are_near([run(_ALL, 0).output], [first.output], _LINEAR):
        return _Fault.REPEATS
    if not all(_are_near(first.gradients(scale), gradients, _LINEAR) for scale in _SCALES):
        return _Fault.SCALES
    if _draws_nothing(run, first):
        return _fault_of_parts(run, first)
    with evaluating():  # what is drawn in training differs with the number of samples
        first = run(_ALL, 0)
        return _fault_of_parts(run, first) if _draws_nothing(run, first) else None


def _counter_of(layer: _Layer) -> str | None:
    """Name what counts forward passes, and changes what the layer computes sooner or later."""
    first = layer.run(_ALL, 0)

    def same() -> bool:
        return _are_near([layer.run(_ALL, 0).output], [first.output], _LINEAR)

    return counter_of(dict(layer.stage.model.named_modules()), same)


def _draws_nothing(run: _Run, first: _Pass) -> bool:
    return _are_near([run(_ALL, 1).output], [first.output], _LINEAR)


def _fault_of_parts(run: _Run, together: _Pass) -> _Fault | None:
    """Compare samples together with the same ones in two parts."""
    one, other = (run(rows, 0) for rows in _PARTS)
    output = torch.cat([one.output, other.output])
    if output.shape != together.output.shape:
        raise ValueError("its output is not by samples")
    if not _are_near([output], [together.output], _ALIKE):
        return _Fault.MIXES
    gradients = [
        first + second if first.shape == whole.shape else torch.cat([first, second])
        for first, second, whole in zip(one.gradients(), other.gradients(), together.gradients(), strict=True)
    ]
    return None if _are_near(_as_one(gradients), _as_one(together.gradients()), _ALIKE) else _Fault.MIXES


def _as_one(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is rounded in the sums of some parameters' gradients may be as large as these: so all count together."""
    return [torch.cat([each.flatten() for each in gradients])] if gradients else []


def _are_near(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tolerance: float) -> bool:
    return all(
        bool((value - other).abs().max() <= tolerance * other.abs().max())
        for value, other in zip(values, others, strict=True)
        if other.numel()
    )
