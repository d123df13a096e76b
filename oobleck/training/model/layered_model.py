"""A user's own model, given as a list of layers: the first takes token ids, the last returns the input of the loss.

    [embedding, block, …, block, head]      ids [batch, length] -> hidden [batch, length, size] -> … -> output

If a layer's `forward` has further arguments, samples bring them under these names: masks, positions. Every module
between the first and the last takes and returns hidden states of the same shape, so the list may be cut anywhere. The
list is made without memory, and its values come from `reset_parameters`. Torch's own modules have that method, and
modules with parameters or buffers of their own need it (as for torch's FSDP). A list that has other values is made with
memory as well (`live_model.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from oobleck.errors import ConfigError

from .brought import shared_tensors
from .losses import causal_lm_loss
from .splitting import Anatomy

LossFunction = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Maps the last layer's output, the labels [batch, length] and the number of items in the step to a microbatch's share
of the loss: the sum over its tokens, divided by that number."""

_PLACE = "the script's model"


class LayeredModel(nn.Module):
    """A list of layers with the interface of a transformers model, so that a stage need not distinguish them."""

    loss_type = None

    def __init__(self, layers: Sequence[nn.Module], loss: LossFunction | None, *, vocab_size: int) -> None:
        super().__init__()
        _require_layers(layers)
        self.embedding = layers[0]
        self.blocks = nn.ModuleList(layers[1:-1])
        self.head = layers[-1]
        self.config = config_of_script(vocab_size)
        self.loss = loss
        self._taken = [_further_arguments(layer) for layer in layers]
        self.train()

    def base_model(self, *, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        """Run all layers but the last, as a transformers model without its head does."""
        return SimpleNamespace(last_hidden_state=self._hidden_states(input_ids, options))

    @property
    def takes(self) -> frozenset[str]:
        """The arguments that samples may bring, other than tokens and labels."""
        return frozenset[str]().union(*self._taken)

    def _hidden_states(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(input_ids, **self._options_of(0, options))
        for index, block in enumerate(self.blocks, 1):
            hidden = block(hidden, **self._options_of(index, options))
        return hidden

    def _options_of(self, layer: int, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options[name] for name in self._taken[layer] if name in options}

    def forward(
        self, *, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None, **options: Any
    ) -> SimpleNamespace:
        output = self.head(self._hidden_states(input_ids, options), **self._options_of(-1, options))
        num_items = labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch
        if self.loss is not None:
            return SimpleNamespace(loss=self.loss(output, labels, num_items))
        return SimpleNamespace(loss=causal_lm_loss(output, labels, output.shape[-1], num_items))

    def _init_weights(self, module: nn.Module) -> None:
        # Some of torch's modules (MultiheadAttention, Transformer) have the name with the underscore.
        reset: object = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False))):
            raise ConfigError(
                f"{_PLACE}: {type(module).__name__} has parameters or buffers of its own and no reset_parameters() "
                "that gives them their initial values; write one"
            )


SplittableModel = PreTrainedModel | LayeredModel


def anatomy_of_layers(model: LayeredModel, *, sequence_length: int) -> Anatomy:
    """Run a model made of fake tensors. Raises ConfigError that names a layer which does not fit the others."""
    shape: torch.Size | None = None
    value: Any = torch.zeros((1, sequence_length), dtype=torch.int64)
    for index, layer in enumerate((model.embedding, *model.blocks, model.head)):
        is_last = index == len(model.blocks) + 1
        try:
            value = layer(value)
        # A layer is the user's code, and may fail in any way.
        except Exception as error:
            raise ConfigError(f"{_PLACE}: layer {index} does not run: {' '.join(str(error).split())}") from error
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            raise ConfigError(f"{_PLACE}: layer {index} returns no tensor of hidden states")
        if not is_last:
            _require_hidden(value, shape, index, sequence_length)
            shape = value.shape
    assert shape is not None
    return Anatomy(
        block_list="blocks",
        num_blocks=len(model.blocks),
        prelude=("embedding",),
        postlude=("head",),
        blocks_return_tuples=False,
        tied=shared_tensors(model, {}),
        hidden_size=shape[-1],
    )


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments, without `*args` and `**kwargs`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds)


def _further_arguments(layer: nn.Module) -> frozenset[str]:
    first = next(iter(inspect.signature(layer.forward).parameters), "")
    return arguments_of(layer.forward) - {first}


def config_of_script(vocab_size: int) -> PreTrainedConfig:
    """Return a stand-in for the configuration of a transformers model."""
    config = PreTrainedConfig()
    config.model_type = "script"  # type: ignore[misc]  # this is no class of configurations, just the one
    config.vocab_size = vocab_size
    return config


def _require_layers(layers: object) -> None:
    if not isinstance(layers, Sequence) or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ConfigError(f"{_PLACE}: it is neither a transformers model nor a list of torch modules")
    if len(layers) < 2:
        raise ConfigError(f"{_PLACE}: a list of {len(layers)} layers cannot be split; it needs at least two")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ConfigError(f"{_PLACE}: a module is in its list twice; share parameters between modules instead")


def _require_hidden(value: torch.Tensor, shape: torch.Size | None, index: int, sequence_length: int) -> None:
    if value.ndim != 3 or value.shape[:2] != (1, sequence_length):
        raise ConfigError(
            f"{_PLACE}: layer {index} returns the shape {tuple(value.shape)} for one sample of {sequence_length} "
            "tokens; it must be [batch, length, size]"
        )
    if shape is not None and value.shape != shape:
        raise ConfigError(
            f"{_PLACE}: layer {index} returns the shape {tuple(value.shape)}, and those before it {tuple(shape)}; "
            "hidden states keep their shape"
        )
