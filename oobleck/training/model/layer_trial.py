"""Trials of a model's layers, a library's and a script's: run on made-up samples, one layer of each kind.

A layer must compute each sample as if it was alone, the same when it runs again, and gradients in proportion to those
that it is given. One that does not would train differently with each plan, and no error would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.training.counters import changed_since, counter_of, states_of
from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey, drawing_alike, generator_states

from .loss_trial import BatchSizes, CapturedHead, made_up_labels, made_up_weights
from .models import StageModel
from .structure import ModelStructure

_LENGTH, _NUM_TOKENS = 6, 16
"""Tokens of a sample, and how many different ones there are."""
_LONGEST = 512
"""Tokens of a sample for layers that do not run on fewer than the model is made for."""
_FEWEST = 2
"""Tokens of a sample of a large layer."""
# Tensors of samples are recognized by this number of rows, so it is one that few other dimensions have.
_ROWS = 3
# Factors of gradients. Powers of two change no rounding, so results differ only where they are not in proportion.
_SCALES = (2.0**-20, 2.0**20)
_KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
_LINEAR, _ALIKE = 1e-5, 1e-4
"""By how much results may differ, as a share of the largest."""
_MOST_DIFFERENTIATED = 1 << 20
"""Elements of a parameter whose gradient is looked at; that of hidden states always is."""
_LARGE = 1 << 24
"""Elements of a layer that is worth more than one thread, and tried on fewer tokens."""
_FILLED_IN_PLACE = frozenset({"bernoulli_", "uniform_", "normal_", "exponential_", "random_"})
_MADE = frozenset({"rand", "randn", "rand_like", "randn_like"})
"""Torch's functions that draw by the shape of their first argument alone."""


class _Fault(Enum):
    # After a failure, microbatches run again, perhaps on other nodes.
    REPEATS = (
        "returns something else when it runs again on the same samples{by}, and microbatches are spread over nodes and "
        "run again after a failure; leave out what depends on earlier forward passes (a count, a memory), and draw "
        "random numbers from torch's own generator (torch.rand)"
    )
    MIXES = (
        "computes a sample with the others of its batch{by}, and batches are cut into microbatches over nodes; have it "
        "compute each sample by itself, as LayerNorm and GroupNorm do"
    )
    DRAWS = (
        "draws random numbers for all samples of its batch at once{by}, and batches are cut into microbatches over "
        "nodes, each of which would draw its own; have it draw numbers for each sample (torch.rand(len(x), 1, 1))"
    )
    # Gradients are divided by the number of tokens that count once that is known, after the microbatches.
    SCALES = (
        "computes gradients that are not in proportion to those that it is given{by}, which are not those of the "
        "script (losses are divided by all tokens first, and by those that count afterwards); leave out hooks and "
        "autograd functions that clip gradients or go by their size, or give max_grad_norm"
    )


def try_layers(structure: ModelStructure, sizes: BatchSizes | None = None) -> None:
    """Raise ConfigError that names a module which would train differently in other microbatches.

    With `sizes`, a batch of a job's own size is compared with a microbatch too. A layer that does not run on made-up
    samples is taken as it is. Takes as long as building the model without memory, a dozen passes of a few tokens for
    each kind of layer, and one of the batch, up to a bound; memory for one layer.
    """
    captured = CapturedHead()
    # What is drawn is not seeded by the stage, so that it shows whether anything is.
    stage = captured.stage_of(replace(structure, drops=False, draws_at_random=False, weights=None))
    tried: set[object] = set()
    for layer in range(structure.num_layers):
        modules = stage.modules_of(layer)
        # A model may have a hundred equal blocks. One of each kind is enough, and keeps the trial short.
        kind = (layer == 0, structure.layer_kind(layer), *(each for root in modules for each in _traits(root)))
        if kind in tried:
            continue
        tried.add(kind)
        stage.adopt(layer, layer + 1, made_up_weights(structure, layer))
        stage.start_buffers([layer])
        for parameter in stage.trained_parameters.values():
            parameter.requires_grad_(parameter.numel() <= _MOST_DIFFERENTIATED)
        num_elements = sum(each.numel() for each in stage.parameters.values())
        is_large = num_elements > _LARGE
        lengths = {
            min(each, structure.sequence_length) for each in (_FEWEST if is_large else _LENGTH, _LENGTH, _LONGEST)
        }
        with nullcontext() if is_large else _one_thread():
            # Short samples cost less, but some layers run only on the length that their model is made for.
            for length in sorted(lengths):
                if _is_tried(_Layer(stage, layer, captured, length=length), _fault_of):
                    break
            if sizes is not None and (own := sizes.bounded(num_elements)).is_cut:
                batch = _Layer(stage, layer, captured, length=own.length, rows=own.batch, part=own.microbatch)
                _is_tried(batch, _fault_of_a_part)


def _is_tried(layer: _Layer, find: Callable[[_Tried], _Fault | None]) -> bool:
    """Say whether a layer runs on made-up samples. Raises ConfigError for one with a fault."""
    try:
        before = states_of(layer.modules)
        fault = find(layer)
        counts = find is _fault_of and fault is None and changed_since(layer.modules, before)
        counter = _counter_of(layer) if counts else None
    except ConfigError:
        raise
    # The layers are the user's code, and may fail on made-up tokens in any way; such layers are not tried.
    except Exception:  # noqa: BLE001
        return False
    if fault is not None:
        where, memory = layer.culprit(lambda call: find(call) is fault)
        by = f", as it goes by {memory}" if memory is not None and fault is _Fault.REPEATS else ""
        raise ConfigError(f"model: {where} {fault.value.format(by=by)}")
    if counter is not None:
        where, _ = layer.culprit(lambda call: counter in layer.changed_by(call))
        by = f", sooner or later, as it goes by {counter}"
        raise ConfigError(f"model: {where} {_Fault.REPEATS.value.format(by=by)}")
    return True


@contextmanager
def _one_thread() -> Iterator[None]:
    # For a small layer, other threads cost more than they save.
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


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Within the block, all samples draw the same random numbers, however many there are."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._rows = rows
        self.shapes: list[tuple[int, ...]] = []
        self.can_be_alike = True

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name, others = func.__name__.partition(".")[0], args[1:]
        first = next((each for each in args if isinstance(each, torch.Tensor | list | tuple)), ())
        shape = tuple(first.shape if isinstance(first, torch.Tensor) else first)
        # A draw's number is its seed, so passes of more and of fewer samples begin each draw alike.
        torch.default_generator.manual_seed(len(self.shapes))
        before = torch.default_generator.get_state()
        by_shape = name in _FILLED_IN_PLACE | _MADE and not any(isinstance(each, torch.Tensor) for each in others)
        if by_shape and shape and shape[0] == self._rows:
            one = func(first[:1] if isinstance(first, torch.Tensor) else [1, *shape[1:]], *others, **kwargs)
            alike = one.expand(shape).clone()
            result = args[0].copy_(alike) if name in _FILLED_IN_PLACE else alike
        else:
            result = func(*args, **kwargs)
        if not torch.equal(torch.default_generator.get_state(), before):  # attention without dropout draws nothing
            self.shapes.append((*shape, *(each for each in args if type(each) is int)))
            self.can_be_alike &= by_shape
        return result


@dataclass(frozen=True, slots=True)
class _Pass:
    """A forward pass: what came out, and what that depends on."""

    output: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    """What depends on samples of what it was given, hidden states first, if there are any."""
    weights: tuple[torch.Tensor, ...]
    of: int
    """How many samples there are, of which these are the first."""
    draws: bool
    """Whether it has drawn random numbers."""

    def gradients(self, inputs: Sequence[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
        """Return the gradients of inputs, divided by the scale that they are computed at."""
        if not self.output.requires_grad or not inputs:
            return []
        generator = torch.Generator().manual_seed(3)
        # Drawn for all samples, then cut: the first ones have the same gradients in a pass of fewer.
        given = torch.randn((self.of, *self.output.shape[1:]), generator=generator)[: len(self.output)] * scale
        found = torch.autograd.grad(
            self.output, inputs, given, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [each / scale for each in found]


class _Layer:
    """A layer of a stage that has no other, on made-up samples."""

    def __init__(
        self, stage: StageModel, layer: int, captured: CapturedHead, *, length: int, rows: int = _ROWS, part: int = 1
    ) -> None:
        """There are `rows` samples; the first `part` of them must be computed alike by themselves."""
        self.rows, self.part = rows, part
        self._stage, self._layer, self._captured = stage, layer, captured
        generator, size = torch.Generator().manual_seed(1), (rows, length)
        structure = stage.structure
        self._ids = torch.randint(min(_NUM_TOKENS, structure.config.vocab_size), size, generator=generator)
        self._hidden = torch.randn((*size, structure.hidden_size), generator=generator)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All modules that it runs with, by their names."""
        return dict(self._stage.model.named_modules())

    def run(self, rows: int, draws: _Draws | None = None) -> _Pass:
        """Run it on the first samples, which draw random numbers by `draws` if that is given."""
        stage, ids = self._stage, self._ids[:rows]
        hidden = None if self._layer == 0 else self._hidden[:rows].clone().requires_grad_()
        batch = Batch(input_ids=ids, labels=made_up_labels(stage.structure.task, ids))
        with drawing_alike(0), draws or nullcontext():
            before = generator_states()
            output = stage.forward(batch, hidden, num_items=ids.numel(), key=_KEY)
            has_drawn = generator_states() != before
        if stage.is_last:
            output = self._captured.logits()
        weights = tuple(each for each in stage.parameters.values() if each.requires_grad)
        return _Pass(output, () if hidden is None else (hidden,), weights, self.rows, has_drawn)

    def evaluating(self) -> AbstractContextManager[object]:
        return self._stage.evaluating()

    def culprit(self, is_one: Callable[[_Call], bool]) -> tuple[str, str | None]:
        """Name the innermost module that `is_one` is true of, the layer where there is none, and what that changes."""
        model = self._stage.model
        names = {id(module): path for path, module in model.named_modules()}
        with _noting_calls(self) as calls:
            self.run(self.rows)
        # A forward hook runs when its module returns, so inner modules precede those that call them.
        for call in calls:
            with suppress(Exception):  # as above
                if is_one(call):
                    where = f"{names[id(call.module)]} ({type(call.module).__name__})"
                    return where, next(iter(self.changed_by(call)), None)
        memory = next(iter(self.changed_by(self)), None)
        modules = self._stage.modules_of(self._layer)
        if len(modules) == 1:
            return f"{names[id(modules[0])]} ({type(modules[0]).__name__})", memory
        return f"{self._stage.structure.layer_names[self._layer]} of {type(model).__name__}", memory

    def changed_by(self, tried: _Tried) -> list[str]:
        """Name what is kept in modules, or reached by them, that a run changes."""
        before = states_of(self.modules)
        changed: list[str] = []
        for rows in (self.rows, self.part):  # what is kept of the same samples may be the same again
            tried.run(rows)
            changed = changed or changed_since(self.modules, before)
        return changed


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a module, as its model makes it."""

    layer: _Layer
    module: nn.Module
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def rows(self) -> int:
        return self.layer.rows

    @property
    def part(self) -> int:
        return self.layer.part

    def evaluating(self) -> AbstractContextManager[object]:
        return self.layer.evaluating()

    def run(self, rows: int, draws: _Draws | None = None) -> _Pass:
        leaves: list[torch.Tensor] = []

        def of_rows(value: Any) -> Any:
            match value:
                case torch.Tensor():
                    taken = (value[:rows] if value.ndim and len(value) == self.rows else value).detach().clone()
                    if taken.is_floating_point() and value.requires_grad:
                        leaves.append(taken.requires_grad_())
                    return taken
                case tuple() | list() if type(value) in (tuple, list):
                    return type(value)(map(of_rows, value))
            return value

        arguments, named = of_rows(self.arguments), {name: of_rows(value) for name, value in self.named.items()}
        with drawing_alike(0), draws or nullcontext():
            before = generator_states()
            output = self.module(*arguments, **named)
            has_drawn = generator_states() != before
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return _Pass(given, tuple(leaves), (), self.rows, has_drawn)


_Tried = _Layer | _Call


@contextmanager
def _noting_calls(layer: _Layer) -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _output: object) -> None:
        calls.append(_Call(layer, module, arguments, named))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in layer.modules.values()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


# --- what is found ---------------------------------------------------------------------------------------------


def _fault_of(tried: _Tried) -> _Fault | None:
    """Find what is wrong with what is run, by its results alone. Raises what it raises."""
    first = tried.run(tried.rows)
    # Both come from one forward pass, so they differ only by the scale of the gradients.
    small, large = (first.gradients((*first.inputs, *first.weights), scale) for scale in _SCALES)
    if not all(each.isfinite().all() for each in (first.output, *small)):
        raise ArithmeticError("made-up values have no result")
    if not _are_near([tried.run(tried.rows).output], [first.output], _LINEAR):
        return _Fault.REPEATS
    if not _are_near(large, small, _LINEAR):
        return _Fault.SCALES
    return _fault_of_a_part(tried)


def _fault_of_a_part(tried: _Tried) -> _Fault | None:
    """Compare samples beside others with the same ones alone, which draw the same random numbers, if any."""
    if not tried.run(tried.rows).draws:
        return _difference(tried, None, None)
    together, alone = _Draws(tried.rows), _Draws(tried.part)
    fault = _difference(tried, together, alone)
    # A draw with the same shape for a part of the samples as for all is shared by the samples of a batch.
    if any(shape == other for shape, other in zip(together.shapes, alone.shapes, strict=False)):
        return _Fault.DRAWS
    if together.shapes and together.can_be_alike and alone.can_be_alike:
        return fault
    with tried.evaluating():  # where its numbers depend on more than the shape
        return None if tried.run(tried.rows).draws else _difference(tried, None, None)


def _difference(tried: _Tried, draws: _Draws | None, alone_draws: _Draws | None) -> _Fault | None:
    together, alone = tried.run(tried.rows, draws), tried.run(tried.part, alone_draws)
    if (len(alone.output), len(together.output)) != (tried.part, tried.rows):
        raise ValueError("its output is not by samples")
    by_samples = [
        (one, several[: tried.part])
        for one, several in zip(alone.gradients(alone.inputs), together.gradients(together.inputs), strict=True)
        if one.shape != several.shape  # others are not of samples
    ]
    pairs = [(alone.output, together.output[: tried.part]), *by_samples]
    if all(_are_near([one], [other], _ALIKE) for one, other in pairs):
        return None
    # A layer that differs even from its own earlier pass does not mix samples: it keeps something between passes.
    again = tried.run(tried.rows, None if draws is None else _Draws(tried.rows))
    return _Fault.MIXES if _are_near([again.output], [together.output], _LINEAR) else _Fault.REPEATS


def _counter_of(layer: _Layer) -> str | None:
    """Name what counts passes, and changes what the layer computes, or its gradients, sooner or later."""

    def results() -> list[torch.Tensor]:
        # Hooks and functions for the backward pass count as well.
        tried = layer.run(layer.rows)
        return [tried.output, *tried.gradients((*tried.inputs, *tried.weights))]

    first = results()
    # Of made-up values there may be no numbers, which are near to none.
    if not all(bool(each.isfinite().all()) for each in first):
        return None
    return counter_of(layer.modules, lambda: _are_near(results(), first, _LINEAR))


def _are_near(values: Sequence[torch.Tensor], others: Sequence[torch.Tensor], tolerance: float) -> bool:
    return all(
        bool((value - other).abs().max() <= tolerance * other.abs().max())
        for value, other in zip(values, others, strict=True)
        if other.numel()
    )


# --- documents ----------------------------------------------------------------------------------------------

_POSITIONS = ((0, 1, 2, 0, 1, 2, 3),)
_LENGTH, _SECOND = 7, 3
"""The number of tokens, and the index of the second document's first."""


def separates_documents(structure: ModelStructure) -> bool:
    """Return whether tokens attend only to their own document. Takes about as long as building the model."""
    # A document begins where positions start again. Most models of transformers derive block-diagonal masks from
    # positions; in the others, tokens would silently attend to other documents.
    if "position_ids" not in structure.takes:
        return False
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    if not isinstance(stage.model, PreTrainedModel):
        return False
    arguments_of_blocks: list[list[Any]] = []
    blocks = stage.model.get_submodule(structure.anatomy.block_list)
    for block in blocks.children():
        block.register_forward_pre_hook(
            lambda _module, args, kwargs: arguments_of_blocks.append([*args[1:], *kwargs.values()]), with_kwargs=True
        )
    ids, positions = torch.zeros((1, _LENGTH), dtype=torch.int64), torch.tensor(_POSITIONS)
    with torch.no_grad():
        stage.model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    has_run = len(arguments_of_blocks) == structure.num_blocks
    return has_run and all(any(map(_hides_the_first, arguments)) for arguments in arguments_of_blocks)


def _hides_the_first(value: Any) -> bool:
    """Return whether a value is a mask [batch, heads, queries, keys] that hides the first document from the second."""
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or value.shape[-2:] != (_LENGTH, _LENGTH):
        return False
    hidden = ~value if value.dtype == torch.bool else value < -1e4
    return bool(hidden[..., _SECOND:, :_SECOND].all()) and not bool(hidden.diagonal(dim1=-2, dim2=-1).any())
