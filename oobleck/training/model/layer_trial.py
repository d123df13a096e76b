"""What a model's layers compute, whoever wrote them: tried on made-up samples, one layer of each kind.

A batch is cut into microbatches over nodes, some of which run again after a failure, and gradients are divided by the
number of tokens that count when all are known. So a layer must compute each sample as if it was alone, the same when it
runs again, and gradients in proportion to those that it is given. One that does not would train differently with each
plan, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.training.counters import counter_of, numbers_of
from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey, drawing_alike, generator_states

from .loss_trial import CapturedHead, made_up_labels, made_up_weights
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _NUM_TOKENS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_LONGEST = 512
"""Tokens of a sample for layers that do not run on fewer than the model is made for."""
_FEWEST = 2
"""Tokens of a sample of a large layer."""
_ALL, _ONE = slice(0, 3), slice(0, 1)
"""Of three samples: a number that few other dimensions have."""
_SCALES = (2.0**-20, 2.0**20)
"""Of gradients: far apart, and powers of two, by which nothing is rounded differently."""
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_LINEAR, _ALIKE = 1e-5, 1e-4
"""By how much results may differ, as a share of the largest."""
_MOST_DIFFERENTIATED = 1 << 20
"""Elements of a parameter whose gradient is looked at; that of hidden states always is."""
_LARGE = 1 << 24
"""Elements of a layer that is worth more than one thread, and tried on fewer tokens."""


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
    # What is drawn is not seeded by the stage, so that it shows whether anything is.
    stage = captured.stage_of(replace(structure, drops=False, draws_at_random=False, weights=None))
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
        is_large = sum(each.numel() for each in stage.parameters.values()) > _LARGE
        lengths = {
            min(each, structure.sequence_length) for each in (_FEWEST if is_large else _LENGTH, _LENGTH, _LONGEST)
        }
        with nullcontext() if is_large else _one_thread():
            for length in sorted(lengths):
                if _is_tried(_Layer(stage, layer, captured, length)):
                    break


def _is_tried(layer: _Layer) -> bool:
    """Say whether a layer runs on made-up samples. Raises ConfigError for one with a fault."""
    try:
        before = numbers_of(layer.modules)
        fault = _fault_of(layer.run, layer.stage.evaluating)
        counter = None if fault or numbers_of(layer.modules) == before else _counter_of(layer)
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
def _one_thread() -> Iterator[None]:
    """Within the block torch computes in this thread alone: for small layers, others would cost more than they do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _traits(root: nn.Module) -> Iterator[object]:
    """What makes layers compute differently, beside their parameters; of numbers, whether they are zero."""
    for path, module in root.named_modules():
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        functions = [*(hook for kind in hooks for hook in kind.values()), *filter(callable, vars(module).values())]
        yield path, type(module), *(getattr(each, "__code__", type(each)) for each in functions)
        for name, value in vars(module).items():
            if isinstance(value, str | bool | float):
                yield name, value if isinstance(value, str) else bool(value)


# --- what is run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass: what came out, and what that depends on."""

    output: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    """What the gradient is taken of: hidden states first, if there are any."""
    rows: slice
    draws: bool
    """Whether it has drawn random numbers."""

    def gradients(self, scale: float) -> list[torch.Tensor]:
        """Return the gradients of the inputs, divided by the scale that they are computed at."""
        if not self.output.requires_grad or not self.inputs:
            return []
        generator = torch.Generator().manual_seed(3)
        given = torch.randn((_ALL.stop, *self.output.shape[1:]), generator=generator)[self.rows] * scale
        found = torch.autograd.grad(
            self.output, self.inputs, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [each / scale for each in found]


_Run = Callable[[slice], _Pass]
"""From which samples there are to a forward pass."""


class _Layer:
    """A layer of a stage that has no other, on made-up samples."""

    def __init__(self, stage: StageModel, layer: int, captured: CapturedHead, length: int) -> None:
        self.stage, self._layer, self._captured = stage, layer, captured
        generator, size = torch.Generator().manual_seed(1), (_ALL.stop, length)
        structure = stage.structure
        self._ids = torch.randint(min(_NUM_TOKENS, structure.config.vocab_size), size, generator=generator)
        self._hidden = torch.randn((*size, structure.hidden_size), generator=generator)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules that it runs with, by their names."""
        return dict(self.stage.model.named_modules())

    def run(self, rows: slice) -> _Pass:
        """Run the layer on some of the samples."""
        stage, ids = self.stage, self._ids[rows]
        hidden = None if self._layer == 0 else self._hidden[rows].clone().requires_grad_()
        batch = Batch(input_ids=ids, labels=made_up_labels(stage.structure.task, ids))
        with drawing_alike(0):
            before = generator_states()
            output = stage.forward(batch, hidden, num_items=ids.numel(), key=_KEY)
            draws = generator_states() != before
        if stage.is_last:
            output = self._captured.logits()
        inputs = [each for each in stage.parameters.values() if each.requires_grad]
        return _Pass(output, tuple(inputs if hidden is None else [hidden, *inputs]), rows, draws)

    def culprit(self, fault: _Fault) -> str:
        """Name the innermost module that has the fault by itself; the layer where none does."""
        model = self.stage.model
        names = {id(module): path for path, module in model.named_modules()}
        with _noting_calls(model) as calls:
            self.run(_ALL)
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

    def run(self, rows: slice) -> _Pass:
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
        with drawing_alike(0):
            before = generator_states()
            output = self.module(*arguments, **named)
            draws = generator_states() != before
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return _Pass(given, tuple(leaves), rows, draws)


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
    first = run(_ALL)
    small, large = (first.gradients(scale) for scale in _SCALES)
    if not all(each.isfinite().all() for each in (first.output, *small)):
        raise ArithmeticError("made-up values have no result")
    if not _are_near([run(_ALL).output], [first.output], _LINEAR):
        return _Fault.REPEATS
    if not _are_near(large, small, _LINEAR):
        return _Fault.SCALES
    if first.draws:  # in training, which depends on the number of samples
        with evaluating():
            first = run(_ALL)
            small = first.gradients(_SCALES[0])
    return None if first.draws else _fault_of_a_part(run, first, small)


def _fault_of_a_part(run: _Run, together: _Pass, gradients: Sequence[torch.Tensor]) -> _Fault | None:
    """Compare a sample beside others with the same one alone."""
    alone = run(_ONE)
    if (len(alone.output), len(together.output)) != (_ONE.stop, _ALL.stop):
        raise ValueError("its output is not by samples")
    if not _are_near([alone.output], [together.output[_ONE]], _ALIKE):
        return _Fault.MIXES
    by_samples = [
        (one, several[_ONE])
        for one, several in zip(alone.gradients(_SCALES[0]), gradients, strict=True)
        if one.shape != several.shape  # those of parameters are sums over samples
    ]
    return None if all(_are_near([one], [other], _ALIKE) for one, other in by_samples) else _Fault.MIXES


def _counter_of(layer: _Layer) -> str | None:
    """Name what counts forward passes, and changes what the layer computes sooner or later."""
    first = layer.run(_ALL)

    def same() -> bool:
        return _are_near([layer.run(_ALL).output], [first.output], _LINEAR)

    return counter_of(layer.modules, same)


def _are_near(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tolerance: float) -> bool:
    return all(
        bool((value - other).abs().max() <= tolerance * other.abs().max())
        for value, other in zip(values, others, strict=True)
        if other.numel()
    )
