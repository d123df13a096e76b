"""What the model's own forward code reaches on a stage: the modules of the layers in place, and stand-ins elsewhere.

The hidden states that a stage receives replace the input of the first block in place. Where nothing else that the
model's code gives the blocks depends on the tokens, it runs only for a trace, made once for each shape of batches:
masks, rotary tables and positions depend on the shape of a batch. A trial runs the model's code over placeholders
alone, with different tokens each time, and records the blocks' arguments. If they are always equal, later forward
passes call the blocks with them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey, derive_seed, seed_device

from .layered_model import SplittableModel
from .placeholders import Passthrough, replace_module, stand_in_before_blocks
from .structure import ModelStructure


class StageModules:
    """All modules of a model, of which one chunk of layers is in place at a time; none at first."""

    def __init__(self, model: SplittableModel, structure: ModelStructure, *, device: torch.device) -> None:
        self.by_name = dict(model.named_modules(remove_duplicate=False))
        self.chunk = range(0)
        self.is_tried = False
        """Whether the model's code runs without a microbatch, to see what it does."""
        self._model = model
        self._structure = structure
        self._device = device
        # A whole model is in place for good: workers without it never run it.
        self._placeholders = (
            {}
            if structure.is_whole
            else {root: self._placeholder(root) for root in self._roots(range(structure.num_layers))}
        )
        self._received: torch.Tensor | None = None
        self._key: MicrobatchKey | None = None
        self._traces: dict[tuple[bool, torch.Size, range], TracedForward | None] = {}
        """Keyed by (training, the batch's shape, the chunk); None where the model's own code has to run."""
        self._hook_up()

    def of_layer(self, layer: int) -> tuple[nn.Module, ...]:
        """Return the modules that make up a layer, in place or not."""
        return tuple(self.by_name[root] for root in self._structure.layer_roots(layer))

    @property
    def is_first(self) -> bool:
        return self.chunk.start == 0

    @property
    def is_last(self) -> bool:
        return self.chunk.stop == self._structure.num_layers

    def put_in_place(self, chunk: range) -> None:
        """Have the model's code reach the modules of these layers, and stand-ins for all others."""
        before, self.chunk = self.chunk, chunk
        for layer in {*before} ^ {*chunk} if not self._structure.is_whole else ():
            self._place(layer)

    def forget_traces(self) -> None:
        # They hold masks and tables on the device.
        self._traces.clear()

    @contextmanager
    def running(self, batch: Batch, received: torch.Tensor | None, key: MicrobatchKey) -> Iterator[None]:
        """Within the block, the model's code runs the chunk in place on `received`, None for the first layers."""
        self._received, self._key = received, key
        try:
            if self.is_first and not self._structure.is_whole:
                self._seed_layer(0)
            trace = None if self._structure.is_whole else self._trace_of(batch)
            if trace is None:
                yield
            else:
                with self._following(trace):
                    yield
        finally:
            self._received = self._key = None

    # --- stand-ins -----------------------------------------------------------------------------------------

    def _roots(self, layers: Iterable[int]) -> Iterator[str]:
        for layer in layers:
            yield from self._structure.layer_roots(layer)

    def _placeholder(self, root: str) -> nn.Module:
        module, anatomy = self.by_name[root], self._structure.anatomy
        if root in anatomy.prelude:
            return stand_in_before_blocks(module, width=anatomy.widths.get(root), device=self._device)
        is_block = root.startswith(f"{anatomy.block_list}.")
        return Passthrough(module, returns_tuple=is_block and anatomy.blocks_return_tuples)

    def _place(self, layer: int) -> None:
        modules = self.by_name if layer in self.chunk else self._placeholders
        for root in self._structure.layer_roots(layer):
            replace_module(self._model, root, modules[root])

    def _hook_up(self) -> None:
        for layer in range(self._structure.num_layers) if not self._structure.is_whole else ():
            if layer > 0:
                root = self._structure.layer_roots(layer)[0]
                # Hooks stay, whichever of the two is in place. The first layer takes tokens, and `running` seeds it.
                for module in (self.by_name[root], self._placeholders[root]):
                    module.register_forward_pre_hook(self._before(layer), with_kwargs=True)
            self._place(layer)

    def _before(self, layer: int) -> Callable[..., Any]:
        """Make the hook that runs when the model's code reaches a layer, in place or not."""

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.is_tried:
                return None
            if layer in self.chunk:
                self._seed_layer(layer)
            # A chunk of the head alone receives hidden states at the last placeholder before it.
            if self.is_first or layer != min(self.chunk.start, self._structure.num_blocks):
                return None
            if args:
                return (self._received, *args[1:]), kwargs
            return (), {**kwargs, next(iter(kwargs)): self._received}

        return hook

    def _seed_layer(self, layer: int) -> None:
        if not self._structure.draws_at_random:
            return
        assert self._key is not None
        # The seed depends on neither stage nor attempt: another cut or a repeated microbatch draws the same numbers.
        seed = derive_seed(self._key.seed, "forward", self._key.step, self._key.microbatch, layer)
        seed_device(self._device, seed)

    # --- traces --------------------------------------------------------------------------------------------

    def _trace_of(self, batch: Batch) -> TracedForward | None:
        if batch.others:  # masks and positions belong to this batch alone
            return None
        key = (self._model.training, batch.input_ids.shape, self.chunk)
        if key not in self._traces:
            self._traces[key] = self._trace(batch.input_ids)
        return self._traces[key]

    def _trace(self, ids: torch.Tensor) -> TracedForward | None:
        """Find how the model's code calls the modules in place, if it does so in the same way whatever the tokens."""
        model = self._model
        # A trace starts from received hidden states, which the first stage has none of.
        if not isinstance(model, PreTrainedModel) or self.is_first or model.base_model is model:
            return None
        roots = self._trunk_roots()
        if len(roots) > sum(map(self._structure.is_block, self.chunk)) + 1:
            return None  # the model may compute something between several modules after the blocks
        for root in roots:
            replace_module(model, root, self._placeholders[root])
        try:
            return trace_forward(
                [self._placeholders[root] for root in roots],
                lambda tokens: model.base_model(input_ids=tokens, use_cache=False),
                # Arguments that are the same for these three depend on the shape of the batch alone.
                [ids, torch.zeros_like(ids), torch.full_like(ids, model.config.vocab_size - 1)],
            )
        finally:
            for root in roots:
                replace_module(model, root, self.by_name[root])

    def _trunk_roots(self) -> list[str]:
        trunk = f"{self._model.base_model_prefix}."
        return [root for root in self._roots(self.chunk) if root.startswith(trunk)]

    @contextmanager
    def _following(self, trace: TracedForward) -> Iterator[None]:
        """Within the block, the model without its head calls the modules in place directly."""
        trunk = self._model.base_model
        assert isinstance(trunk, nn.Module)
        untraced = trunk.forward
        modules = [self.by_name[root] for root in self._trunk_roots()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name != "input_ids"):
                return untraced(*args, **kwargs)  # the head passes something on, perhaps a mask
            assert self._received is not None
            return trace.follow(modules, self._received)

        # An attribute of the instance hides the method of its class, and hooks on the trunk still run.
        trunk.__dict__["forward"] = forward
        try:
            yield
        finally:
            del trunk.__dict__["forward"]


# --- traces ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A module's arguments other than the hidden states."""

    hidden_name: str | None
    """The keyword of the hidden states; None if they are the first positional argument."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Call the module and return its hidden states."""
        if self.hidden_name is None:
            output = module(hidden, *self.arguments, **self.keywords)
        else:
            output = module(**{self.hidden_name: hidden}, **self.keywords)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForward:
    """The calls of a stage's modules in their order, and the type of the model's output."""

    calls: tuple[Call, ...]
    output_type: type[ModelOutput]

    def follow(self, modules: Sequence[nn.Module], hidden: torch.Tensor) -> ModelOutput:
        """Pass hidden states through the modules, one for each call."""
        for call, module in zip(self.calls, modules, strict=True):
            hidden = call(module, hidden)
        return self.output_type(last_hidden_state=hidden)


def trace_forward(
    probes: Sequence[nn.Module], run: Callable[[torch.Tensor], object], tokens: Iterable[torch.Tensor]
) -> TracedForward | None:
    """Record how `run`, which returns the model's output, calls the probes; run it for each of `tokens`.

    Returns None unless each probe is called once and in turn, with the same plain arguments without gradients for all
    tokens, and the model returns only hidden states.
    """
    traces = [_trace(probes, run, ids) for ids in tokens]
    first = traces[0]
    if first is None or not all(_is_plain(call.arguments) and _is_plain(call.keywords) for call in first.calls):
        return None
    return first if all(traced is not None and _agree(first, traced) for traced in traces) else None


def _trace(
    probes: Sequence[nn.Module], run: Callable[[torch.Tensor], object], ids: torch.Tensor
) -> TracedForward | None:
    called: list[nn.Module] = []
    calls: list[Call] = []

    def record(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        name = None if arguments else next(iter(keywords))
        others = {key: value for key, value in keywords.items() if key != name}
        called.append(module)
        calls.append(Call(hidden_name=name, arguments=arguments[1:], keywords=others))

    handles = [probe.register_forward_pre_hook(record, prepend=True, with_kwargs=True) for probe in probes]
    try:
        with torch.no_grad():
            output = run(ids)
    finally:
        for handle in handles:
            handle.remove()
    # `follow` calls each module once, in this order, and returns hidden states alone; other models need their own code.
    if called != list(probes) or not isinstance(output, ModelOutput) or list(output) != ["last_hidden_state"]:
        return None
    return TracedForward(calls=tuple(calls), output_type=type(output))


def _agree(one: TracedForward, other: TracedForward) -> bool:
    return one.output_type is other.output_type and all(
        a.hidden_name == b.hidden_name and _equal(a.arguments, b.arguments) and _equal(a.keywords, b.keywords)
        for a, b in zip(one.calls, other.calls, strict=True)
    )


def _is_plain(value: Any) -> bool:
    # Objects with changing state, such as a cache, can be neither kept nor compared.
    match value:
        case torch.Tensor():
            return not value.requires_grad
        case tuple() | list():
            return all(_is_plain(item) for item in value)
        case dict():
            return all(_is_plain(item) for item in value.values())
        case _:
            return value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return one.dtype == other.dtype and torch.equal(one, other)
        case tuple() | list():
            return len(one) == len(other) and all(map(_equal, one, other))
        case dict():
            return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
        case _:
            return bool(one == other)
