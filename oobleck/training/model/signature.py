"""What a model's forward can be given, by the names of its arguments."""

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
"""Not for a sample to bring: what every batch has, what other models compute, and how to answer."""


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments, without those that are collected (`**kwargs`)."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds)


def names_taken(model: nn.Module) -> frozenset[str]:
    """Return what samples of a transformers model may bring beside tokens and labels."""
    return arguments_of(type(model).forward) - _OURS
