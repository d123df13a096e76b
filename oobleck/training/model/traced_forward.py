"""A trace of how a model's own code calls its blocks, made once for each shape of batches.

Masks, rotary tables and positions depend on the shape of a batch, not on its tokens. So a trial runs the model's code
over placeholders alone, with different tokens each time, and records the blocks' arguments. If they are always equal,
later forward passes call the blocks with them directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput


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
