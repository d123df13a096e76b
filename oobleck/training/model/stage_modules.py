"""What the model's own forward code reaches on a stage: the modules of the layers in place, and stand-ins elsewhere.

The hidden states that a stage receives replace the input of the first block in place. Where nothing else that the
model's code gives the blocks depends on the tokens, it runs only for a trace (`traced_forward.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oobleck.training.data import Batch
from oobleck.training.randomness import MicrobatchKey, derive_seed, seed_device

from .layered_model import SplittableModel
from .placeholders import Passthrough, replace_module, stand_in_before_blocks
from .structure import ModelStructure
from .traced_forward import TracedForward, trace_forward


class StageModules:
    """All modules of a model, of which one chunk of layers is in place at a time; none at first."""

    def __init__(self, model: SplittableModel, structure: ModelStructure, *, device: torch.device) -> None:
        self.by_name = dict(model.named_modules(remove_duplicate=False))
        self.chunk = range(0)
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
