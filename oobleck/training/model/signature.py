"""The arguments of a model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

_OURS = frozenset(
    {
        "self",
        "input_ids",
        "inputs_embeds",
        "labels",
        "past_key_values",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
        "num_items_in_batch",
    }
)
"""Arguments that no sample may bring: every batch has them, another model computes them, or they choose the output."""


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments, without `*args` and `**kwargs`."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds)


def names_taken(model: nn.Module) -> frozenset[str]:
    """Return the arguments of a transformers model that a sample may bring, other than tokens and labels."""
    return arguments_of(type(model).forward) - _OURS
