"""The part of a model that one worker holds: any ranges of its layers, which may change at any time.

A stage keeps all modules of the model, without memory, and runs the model's own forward code. Layers held by
other workers are replaced: embeddings return zeros, all others are the identity; what came from the
layer before takes the place of the first own block's input. So masks and rotary tables are made on every
stage, and only hidden states travel. Where these do not depend on the tokens, stages after the first have them made
once (`traced_forward.py`). Of several chunks, one is in place at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.training.data import Batch
from oobleck.training.dropout import turn_off_dropout
from oobleck.training.randomness import MicrobatchKey, derive_seed, seed_device

from .buffers import StageBuffers
from .configuration import CAUSAL_LM_LOSS, CLASSIFICATION
from .forward_passes import compile_forward, recompute_activations
from .initialization import initialize_adapters, initialize_module, materialize_buffers, move_buffers, unset
from .layered_model import LayeredModel
from .live_model import LiveWeights
from .losses import Loss, causal_lm_loss, label_loss, loss_of_outputs, tried_at_first
from .placeholders import Passthrough, replace_module, stand_in_before_blocks
from .signature import arguments_of
from .structure import ModelStructure, Site
from .traced_forward import TracedForward, trace_forward
from .weights import WeightFiles


class _Scaled(torch.autograd.Function):
    """A value as it is, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


class StageModel:
    """Some layers of a model, in chunks of consecutive ones; none before the first `adopt`.

    Not safe for use by two threads at once. Takes the generator of its device for itself.
    """

    loss_scale: float = 1.0
    """What gradients are multiplied with where they begin, at the loss; it itself is returned as it is."""
    compute_loss: Loss | None
    """What takes the place of the model's own loss."""

    def __init__(
        self,
        structure: ModelStructure,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        autocast: torch.dtype | None = None,
        activation_checkpointing: bool = False,
        compiles: bool = False,
    ) -> None:
        self.structure = structure
        self.dtype = dtype
        self.autocast = autocast
        self.device = torch.device(device)
        self.chunks: tuple[range, ...] = ()
        """The layers of each chunk."""
        self._chunk = range(0)
        """The layers that are in place; hidden states enter before them, and leave after."""
        self._parameters: dict[str, nn.Parameter] = {}
        self.model = structure.build(dtype=dtype)
        """All modules of the model; those of layers that are elsewhere are without memory, and stood in for."""
        self.compute_loss = self._script_loss()
        has_own_loss = "_loss_function" in vars(self.model)
        if dtype == torch.float64 and self.model.loss_type == CAUSAL_LM_LOSS and not has_own_loss:
            # The models' own loss takes the logits to float32, which would throw away half of the digits.
            self.model.loss_function = causal_lm_loss
        if not structure.drops:
            turn_off_dropout(self.model)
        self._vacant = dict(self.model.named_parameters(remove_duplicate=False))
        self._trunk_takes = structure.takes
        if isinstance(self.model, PreTrainedModel):
            self._trunk_takes &= arguments_of(type(self.model.base_model).forward)
        if structure.keeps_buffers:
            move_buffers(self.model, device=self.device)
        else:
            materialize_buffers(self.model, device=self.device)
        self._modules = dict(self.model.named_modules(remove_duplicate=False))
        self._buffers = StageBuffers(self.model, self._modules, structure)
        for layer in filter(structure.is_block, range(structure.num_layers)):
            for module in self.modules_of(layer):
                if compiles:
                    compile_forward(module)
                if activation_checkpointing:
                    recompute_activations(module, draws_at_random=structure.draws_at_random)
        self._placeholders = {root: self._placeholder(root) for root in self._roots(range(structure.num_layers))}
        self._hook_up()
        self._received: torch.Tensor | None = None
        self._key: MicrobatchKey | None = None
        self._traced: dict[tuple[bool, torch.Size, range], TracedForward | None] = {}
        """How modules are called, by (training, the batch's shape, the chunk); None: as the model's code does it."""

    # --- what it holds -------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters held, by canonical name, in the order of layers; a tied one once."""
        return dict(self._parameters)

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the parameters held that are not frozen."""
        return {name: parameter for name, parameter in self._parameters.items() if parameter.requires_grad}

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of the hidden states that it receives and returns, and so of their gradients: what is computed in."""
        return self.autocast or self.dtype

    def modules_of(self, layer: int) -> tuple[nn.Module, ...]:
        """Return the modules that make up a layer: one for a block."""
        return tuple(self._modules[root] for root in self.structure.layer_roots(layer))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers held, in their order."""
        return tuple(chain.from_iterable(self.chunks))

    @property
    def is_first(self) -> bool:
        """Whether the chunk in place has the first layer."""
        return self._chunk.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the chunk in place has the last layer."""
        return self._chunk.stop == self.structure.num_layers

    def adopt(self, first_layer: int, stop_layer: int, state: Mapping[str, torch.Tensor]) -> None:
        """Hold layers [first_layer, stop_layer) from now on, as `adopt_chunks` does; none if they are equal."""
        self.adopt_chunks((range(first_layer, stop_layer),), state)

    def adopt_chunks(self, chunks: Sequence[range], state: Mapping[str, torch.Tensor]) -> None:
        """Hold the layers of these chunks from now on, which are in their order. Copies nothing on the device.

        Parameters that are held already stay what they are, the objects and their gradients included. New
        ones become the tensors that `state` has under their names (other names in it are ignored), or
        not-a-number until somebody sets them. Those of no layer any more are let go. O(layers), no forward
        pass may be in progress. Raises CorruptCheckpoint for a buffer of all stages that has another value there.
        """
        before, self.chunks = self.layers, tuple(chunk for chunk in chunks if chunk)
        ends = [0, *(end for chunk in self.chunks for end in (chunk.start, chunk.stop)), self.structure.num_layers]
        assert ends == sorted(ends), f"layers in the order of the model, each once: {chunks}"
        self._traced.clear()
        for layer in before:
            self._unplug(self.structure.sites[layer])
        held: dict[str, nn.Parameter] = {}
        for layer in self.layers:
            for name in self.structure.layer_parameters(layer):
                if name not in held:
                    kept = self._parameters.get(name)
                    held[name] = self._new_parameter(name, state.get(name)) if kept is None else kept
        self._buffers.require_known(state)
        self._parameters = held
        for layer in self.layers:
            self._plug(self.structure.sites[layer], held)
        self._put_in_place(self.chunks[0] if self.chunks else range(0))

    def initialize(self, layers: Iterable[int], *, seed: int) -> None:
        """Set the parameters of held layers to their initial values.

        Those of a directory of weights, if the model starts from one. Else, as those of a head that classifies and is
        not in the directory, they depend on (seed, their names) alone, follow the model's own distributions, and are
        the same bits for any cut and on any device.
        """
        for layer in layers:
            assert layer in self.layers, f"layer {layer} is not held: {self.layers}"
            self.start_buffers([layer])
            if self.structure.weights is None or self._may_lack(layer):
                self._initialize_layer(layer, seed=seed)
            elif self.structure.adapters is not None and not self.structure.weights.is_whole:
                for root in self.structure.layer_roots(layer):
                    initialize_adapters(self.model, self._modules[root], root, seed=seed)
            if self.structure.weights is not None:
                self._read_layer(layer, self.structure.weights)
            for name in self.structure.layer_parameters(layer):
                if self._parameters[name].isnan().any():
                    raise ConfigError(f"model: its own rules for initialization leave {name} without a value")

    def start_buffers(self, layers: Iterable[int]) -> None:
        """Set the persistent buffers of held layers to the values that they begin with."""
        for layer in layers:
            self._buffers.begin(self.structure.sites[layer], self._parameters)

    # --- what it computes ----------------------------------------------------------------------------------

    def forward(
        self, batch: Batch, hidden: torch.Tensor | None, *, num_items: int, key: MicrobatchKey, chunk: int = 0
    ) -> torch.Tensor:
        """Run the layers of a chunk on one microbatch.

        Arguments:
            batch: on this stage's device. The same on all stages: each makes its masks of it.
            hidden: what the chunk before returned, [batch, length, hidden]; None for the first layers.
            num_items: by how much the sum of the token losses is divided.
            key: what dropout and other randomness depends on, together with each layer's number.
            chunk: which of the held chunks.

        Returns:
            Hidden states [batch, length, hidden]; of the last layers the loss, a scalar.
        """
        self._put_in_place(self.chunks[chunk])
        assert (hidden is None) == self.is_first, "hidden states come from the stage before, if there is one"
        # Within a stage hidden states are added up as precisely as if the model was not cut.
        self._received, self._key = None if hidden is None else hidden.to(self.dtype), key
        try:
            if self.is_first:
                self._seed_layer(0)
            with self._buffers.in_use(), self._computing(), self._as_traced(batch):
                return self._loss(batch, num_items) if self.is_last else self._hidden(batch)
        finally:
            self._received = self._key = None

    def casting_once(self) -> AbstractContextManager[object]:
        """Within the block, in which weights must not change, autocast casts each of them once, for all forward passes.

        Torch forgets what it has cast when the outermost autocast ends, and a microbatch in flight keeps its own
        copies. The outermost is here one that does nothing, so that backward passes run as they do without it.
        """
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, enabled=False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block nothing is dropped, whichever chunk is in place."""
        modules = (self.model, *(module for layer in self.layers for module in self.modules_of(layer)))
        try:
            for module in modules:
                module.eval()
            yield
        finally:
            for module in modules:
                module.train()

    def _hidden(self, batch: Batch) -> torch.Tensor:
        others = {name: value for name, value in self._others(batch).items() if name in self._trunk_takes}
        output = self.model.base_model(input_ids=batch.input_ids, use_cache=False, **others)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.to(self.hidden_dtype)

    def _loss(self, batch: Batch, num_items: int) -> torch.Tensor:
        loss: torch.Tensor
        # With a cache, models overlook where documents begin.
        given = {"input_ids": batch.input_ids, "use_cache": False, **self._others(batch)}
        if self.compute_loss is not None:
            loss = self.compute_loss(self.model(**given), batch.labels, num_items)
        elif self.structure.task == "causal_lm":
            outputs = self.model(labels=batch.labels, num_items_in_batch=num_items, **given)
            loss = self._share_of_mean(outputs, batch, num_items) if self.structure.loss_rule.is_mean else outputs.loss
        else:
            logits = self.model(**given).logits
            loss = label_loss(logits if self.dtype == torch.float64 else logits.float(), batch.labels, num_items)
        return loss if self.loss_scale == 1.0 else _Scaled.apply(loss, self.loss_scale)  # type: ignore[no-untyped-call]

    def _script_loss(self) -> Loss | None:
        """What takes the place of the model's own loss. What made-up outputs do not suit is tried when it is first run.

        A list of layers calls its loss itself.
        """
        structure, model = self.structure, self.model
        if isinstance(model, LayeredModel):
            if model.loss is not None and not structure.has_tried_loss:
                model.loss = tried_at_first(model.loss, model.loss, argument="num_items")
            return None
        if (given := structure.compute_loss) is None:
            return None
        loss = loss_of_outputs(given)
        return loss if structure.has_tried_loss else tried_at_first(loss, given)

    def _share_of_mean(self, outputs: Any, batch: Batch, num_items: int) -> torch.Tensor:
        """What a microbatch adds to the mean over a step, of the mean over its own labels."""
        loss: torch.Tensor
        if not batch.num_items:  # a mean over nothing is no number, and neither is its gradient
            loss = outputs.logits.sum() * 0.0
            return loss
        loss = outputs.loss * (batch.num_items / num_items)
        return loss

    def _others(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What a batch brings beside tokens and labels, numbers in the precision of this stage."""
        return {
            name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.others.items()
        }

    def _computing(self) -> AbstractContextManager[object]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, dtype=self.autocast)

    # --- the short way -------------------------------------------------------------------------------------

    @contextmanager
    def _as_traced(self, batch: Batch) -> Iterator[None]:
        """Within the block the model without its head calls the held modules at once, where that does the same."""
        if batch.others:  # masks and positions are of this batch alone
            yield
            return
        key = (self.model.training, batch.input_ids.shape, self._chunk)
        if key not in self._traced:
            self._traced[key] = self._trace_forward(batch)
        if (traced := self._traced[key]) is None:
            yield
            return
        trunk = self.model.base_model
        assert isinstance(trunk, nn.Module)
        untraced = trunk.forward
        modules = [self._modules[root] for root in self._trunk_roots()]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(value, torch.Tensor) for name, value in kwargs.items() if name != "input_ids"):
                return untraced(*args, **kwargs)  # the head brings something along, a mask perhaps
            assert self._received is not None
            return traced.follow(modules, self._received)

        trunk.__dict__["forward"] = forward
        try:
            yield
        finally:
            del trunk.__dict__["forward"]

    def _trace_forward(self, batch: Batch) -> TracedForward | None:
        """Find how the model's code calls the held modules, if it does so in the same way whatever the tokens."""
        model = self.model
        if not isinstance(model, PreTrainedModel) or self._received is None or model.base_model is model:
            return None
        roots = self._trunk_roots()
        if len(roots) > sum(map(self.structure.is_block, self._chunk)) + 1:
            return None  # of several modules after the blocks it is not known what is between them
        ids = batch.input_ids
        for root in roots:
            replace_module(model, root, self._placeholders[root])
        try:
            return trace_forward(
                [self._placeholders[root] for root in roots],
                lambda tokens: model.base_model(input_ids=tokens, use_cache=False),
                [ids, torch.zeros_like(ids), torch.full_like(ids, model.config.vocab_size - 1)],
            )
        finally:
            for root in roots:
                replace_module(model, root, self._modules[root])

    def _trunk_roots(self) -> list[str]:
        """The modules in place that are part of the model without its head."""
        trunk = f"{self.model.base_model_prefix}."
        return [root for root in self._roots(self._chunk) if root.startswith(trunk)]

    # --- modules and their placeholders -----------------------------------------------------------------------

    def _roots(self, layers: Iterable[int]) -> Iterator[str]:
        for layer in layers:
            yield from self.structure.layer_roots(layer)

    def _placeholder(self, root: str) -> nn.Module:
        module, anatomy = self._modules[root], self.structure.anatomy
        if root in anatomy.prelude:
            return stand_in_before_blocks(module, width=anatomy.widths.get(root), device=self.device)
        is_block = root.startswith(f"{anatomy.block_list}.")
        return Passthrough(module, returns_tuple=is_block and anatomy.blocks_return_tuples)

    def _hook_up(self) -> None:
        for layer in range(1, self.structure.num_layers):
            root = self.structure.layer_roots(layer)[0]
            is_block = layer < self.structure.num_layers - 1
            for module in (self._modules[root], self._placeholders[root]):
                module.register_forward_pre_hook(self._before(layer, is_block=is_block), with_kwargs=True)
        for layer in range(self.structure.num_layers):
            self._place(layer)

    def _before(self, layer: int, *, is_block: bool) -> Callable[..., Any]:
        """Make the hook that runs when the model's code reaches a layer, held or not."""

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if layer in self._chunk:
                self._seed_layer(layer)
            if not is_block or layer != self._entry:
                return None
            if args:
                return (self._received, *args[1:]), kwargs
            return (), {**kwargs, next(iter(kwargs)): self._received}

        return hook

    @property
    def _entry(self) -> int | None:
        """The block at which what was received takes the place of the hidden states."""
        if self.is_first:
            return None
        # A chunk that has the head alone lets it in at the last placeholder before it.
        return min(self._chunk.start, self.structure.num_blocks)

    def _seed_layer(self, layer: int) -> None:
        if not self.structure.draws_at_random:
            return
        assert self._key is not None
        key = self._key
        seed_device(self.device, derive_seed(key.seed, "forward", key.step, key.microbatch, layer))

    def _put_in_place(self, chunk: range) -> None:
        """Have the model's code reach the modules of these layers, and stand-ins for all others."""
        before, self._chunk = self._chunk, chunk
        for layer in {*before} ^ {*chunk}:
            self._place(layer)

    def _place(self, layer: int) -> None:
        modules = self._modules if layer in self._chunk else self._placeholders
        for root in self.structure.layer_roots(layer):
            replace_module(self.model, root, modules[root])

    # --- parameters ----------------------------------------------------------------------------------------

    def _new_parameter(self, name: str, value: torch.Tensor | None) -> nn.Parameter:
        shape = self.structure.shapes[name]
        if value is None:
            value = unset(shape, dtype=self.dtype, device=self.device)
        assert value.shape == shape, f"{name} has the shape {tuple(shape)}, not {tuple(value.shape)}"
        is_trained = name not in self.structure.frozen
        made = nn.Parameter(value.detach().to(device=self.device, dtype=self.dtype), requires_grad=is_trained)
        if name in self._vacant:  # it is no buffer
            vars(made).update(vars(self._vacant[name]))
        for hook in self.structure.hooks.get(name, ()):
            made.register_hook(hook)  # type: ignore[no-untyped-call]
        return made

    def _plug(self, sites: Iterable[Site], parameters: Mapping[str, nn.Parameter]) -> None:
        for site in sites:
            if site.is_buffer:
                self._buffers.plug(site, parameters[site.parameter])
            else:
                self._modules[site.module]._parameters[site.attribute] = parameters[site.parameter]

    def _unplug(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.is_buffer:
                self._buffers.unplug(site)
            else:
                self._modules[site.module]._parameters[site.attribute] = self._vacant[site.name]

    def _may_lack(self, layer: int) -> bool:
        """Whether a directory of weights need not have all of a layer: it may be of a language model."""
        weights = self.structure.weights
        is_head = self.structure.task in CLASSIFICATION and layer == self.structure.num_layers - 1
        return is_head and not (weights is not None and weights.is_whole)

    @torch.no_grad()
    def _read_layer(self, layer: int, weights: WeightFiles | LiveWeights) -> None:
        model: Any = self.model  # files that transformers has written are those of its own models alone
        in_files = weights.names_in_files(self.structure.layer_parameters(layer))
        wanted = set(in_files.values())
        if self._may_lack(layer):
            wanted = set(weights.known(wanted, model))
        else:
            # As transformers does: buffers that files lack have the values that the model's rules give them.
            buffers = wanted & self.structure.buffers.keys()
            wanted -= buffers - set(weights.known(buffers, model, renamed=True))
        shapes = {known: self.structure.shapes[name] for name, known in in_files.items()}
        values = weights.read(sorted(wanted), model, shapes)
        for name, known in in_files.items():
            if known in values:
                self._parameters[name].copy_(values[known])

    def _initialize_layer(self, layer: int, *, seed: int) -> None:
        # A tied parameter takes the value that it has at its home, so it is kept from the rules of this layer.
        borrowed = [site for site in self.structure.sites[layer] if site.name != site.parameter]
        self._unplug(borrowed)
        for root in self.structure.layer_roots(layer):
            initialize_module(self.model, self._modules[root], root, seed=seed)
        for name in sorted({site.parameter for site in borrowed}):
            home_layer, home = self._home_of(name)
            if home_layer == layer:
                continue  # it has its value, with the rest of this layer
            self._plug([home], self._parameters)
            initialize_module(self.model, self._modules[home.module], home.module, seed=seed)
            if home_layer not in self.layers:
                self._unplug([home])
        self._plug(borrowed, self._parameters)

    def _home_of(self, parameter: str) -> tuple[int, Site]:
        """Find the layer and the place that a tied parameter is named for."""
        return next(
            (layer, site)
            for layer in self.structure.layers_with(parameter)
            for site in self.structure.sites[layer]
            if site.name == parameter
        )
