"""One's own model, given as a list of layers: the first takes token ids, the last gives what the loss is taken of.

    [embedding, block, …, block, head]      ids [batch, length] -> hidden [batch, length, size] -> … -> output

A layer whose `forward` has further arguments gets what the samples bring under these names: masks, positions. Every
module between the first and the last takes the hidden states and returns hidden states of the same shape,
so the list may be cut anywhere. The list is made without memory, and its values come from `reset_parameters`, which
torch's own modules have, and which modules with parameters or buffers of their own should have (torch's FSDP wants the
same). A list that has other values is made with memory as well (`live_model.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from oobleck.errors import ConfigError

from .brought import shared_tensors
from .losses import causal_lm_loss
from .signature import arguments_of
from .splitting import Anatomy

LossFunction = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From the last layer's output, the labels [batch, length] and a number, the same for all microbatches of a step, to
this microbatch's share of the loss: a sum over its tokens, divided by that number."""

_PLACE = "the script's model"


@dataclass(frozen=True, slots=True)
class _Trunk:
    """All layers but the last, called as a transformers model without its head is."""

    model: LayeredModel

    def __call__(self, *, input_ids: torch.Tensor, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.model.hidden_states(input_ids, options))


class LayeredModel(nn.Module):
    """A list of layers that is called as transformers models are, so that a stage need not distinguish them."""

    loss_type = None

    def __init__(self, layers: Sequence[nn.Module], loss: LossFunction | None, *, vocab_size: int) -> None:
        super().__init__()
        _require_layers(layers)
        self.embedding = layers[0]
        self.blocks = nn.ModuleList(layers[1:-1])
        self.head = layers[-1]
        self.config = _config(vocab_size)
        self.loss = loss
        self._taken = [_further_arguments(layer) for layer in layers]
        """By layer."""
        self.train()

    @property
    def base_model(self) -> _Trunk:
        return _Trunk(self)

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """Parameters and buffers that are one object with an earlier one, and that one's name."""
        return shared_tensors(self, {})

    @property
    def takes(self) -> frozenset[str]:
        """What samples may bring beside tokens and labels."""
        return frozenset[str]().union(*self._taken)

    def hidden_states(self, input_ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(input_ids, **self._options_of(0, options))
        for index, block in enumerate(self.blocks, 1):
            hidden = block(hidden, **self._options_of(index, options))
        return hidden

    def _options_of(self, layer: int, options: Mapping[str, Any]) -> dict[str, Any]:
        return {name: options[name] for name in self._taken[layer] if name in options}

    def forward(
        self, *, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None, **options: Any
    ) -> SimpleNamespace:
        output = self.head(self.hidden_states(input_ids, options), **self._options_of(-1, options))
        num_items = labels[:, 1:].numel() if num_items_in_batch is None else num_items_in_batch
        if self.loss is not None:
            return SimpleNamespace(loss=self.loss(output, labels, num_items))
        return SimpleNamespace(loss=causal_lm_loss(output, labels, output.shape[-1], num_items))

    def _init_weights(self, module: nn.Module) -> None:
        reset: object = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif _has_values(module):
            raise ConfigError(
                f"{_PLACE}: {type(module).__name__} has parameters or buffers of its own and no reset_parameters() "
                "that gives them their initial values; write one"
            )


def anatomy_of_layers(model: LayeredModel, *, sequence_length: int) -> Anatomy:
    """Run a model made of fake tensors, and see that its layers fit one another.

    Raises ConfigError that names the layer which does not.
    """
    shape: torch.Size | None = None
    value: Any = torch.zeros((1, sequence_length), dtype=torch.int64)
    for index, layer in enumerate(_layers(model)):
        is_last = index == len(model.blocks) + 1
        try:
            value = layer(value)
        # A layer is somebody else's code, and may fail in any way.
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
        tied=model.all_tied_weights_keys,
        hidden_size=shape[-1],
    )


def _further_arguments(layer: nn.Module) -> frozenset[str]:
    """What a layer takes beside its input, which comes first."""
    first = next(iter(inspect.signature(layer.forward).parameters), "")
    return arguments_of(layer.forward) - {first}


def _config(vocab_size: int) -> PreTrainedConfig:
    """What stands where transformers models have their configuration."""
    config = PreTrainedConfig()
    config.model_type = "script"  # type: ignore[misc]  # this is no class of configurations, just the one
    config.vocab_size = vocab_size
    return config


def _layers(model: LayeredModel) -> Iterator[nn.Module]:
    yield model.embedding
    yield from model.blocks
    yield model.head


def _require_layers(layers: object) -> None:
    if not isinstance(layers, Sequence) or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ConfigError(f"{_PLACE}: it is no transformers model and no list of torch modules")
    if len(layers) < 2:
        raise ConfigError(f"{_PLACE}: a list of {len(layers)} layers cannot be split; it needs at least two")
    if len({id(layer) for layer in layers}) < len(layers):
        raise ConfigError(f"{_PLACE}: a module is in its list twice; share parameters instead, which is understood")


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


def _has_values(module: nn.Module) -> bool:
    values = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(values)
