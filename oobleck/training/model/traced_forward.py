"""The way through a stage, found out once: what a model's own code hands to the blocks beside the hidden states.

Masks, rotary tables and positions depend on the shape of a batch, not on its tokens. A stage that is not the first
need not have the model make them again for every microbatch, nor walk through the placeholders of what it does not
hold. So the model's code is run a few times over placeholders alone, with different tokens, and what it hands over is
noted. Only where that is the same each time, the blocks are called with it directly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.utils.generic import ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a module is called with beside the hidden states."""

    hidden_name: str | None
    """The keyword of the hidden states; None where they come first by position."""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Call the module and return the hidden states that it gives."""
        if self.hidden_name is None:
            output = module(hidden, *self.arguments, **self.keywords)
        else:
            output = module(**{self.hidden_name: hidden}, **self.keywords)
        given: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedForward:
    """How a stage's modules are called one after the other, and what the model wraps the outcome in."""

    calls: tuple[Call, ...]
    output_type: type[ModelOutput]

    def follow(self, modules: Sequence[nn.Module], hidden: torch.Tensor) -> ModelOutput:
        """Take hidden states through the modules, one for each call."""
        for call, module in zip(self.calls, modules, strict=True):
            hidden = call(module, hidden)
        return self.output_type(last_hidden_state=hidden)


def trace_forward(
    probes: Sequence[nn.Module], run: Callable[[torch.Tensor], object], tokens: Iterable[torch.Tensor]
) -> TracedForward | None:
    """Note how `run` calls each of the probes, for each of some tokens; it returns the model's output.

    Returns None where a probe is not called once and in turn, or in another way for other tokens, or with something
    that carries a gradient or is not understood, and where the model gives out more than hidden states.
    """
    traces = [_trace(probes, run, ids) for ids in tokens]
    first = traces[0]
    if first is None or not all(_is_plain(call.arguments) and _is_plain(call.keywords) for call in first.calls):
        return None
    return first if all(traced is not None and _agree(first, traced) for traced in traces) else None


def _trace(
    probes: Sequence[nn.Module], run: Callable[[torch.Tensor], object], ids: torch.Tensor
) -> TracedForward | None:
    found: list[tuple[int, Call]] = []
    with _noting(probes, found), torch.no_grad():
        output = run(ids)
    in_turn = [index for index, _ in found] == list(range(len(probes)))
    if not in_turn or not isinstance(output, ModelOutput) or list(output) != ["last_hidden_state"]:
        return None
    return TracedForward(calls=tuple(call for _, call in found), output_type=type(output))


@contextmanager
def _noting(probes: Sequence[nn.Module], found: list[tuple[int, Call]]) -> Iterator[None]:
    handles = [
        probe.register_forward_pre_hook(_note(index, found), prepend=True, with_kwargs=True)
        for index, probe in enumerate(probes)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(index: int, found: list[tuple[int, Call]]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def hook(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        name = None if arguments else next(iter(keywords))
        others = {key: value for key, value in keywords.items() if key != name}
        found.append((index, Call(hidden_name=name, arguments=arguments[1:], keywords=others)))

    return hook


def _agree(one: TracedForward, other: TracedForward) -> bool:
    return one.output_type is other.output_type and all(
        a.hidden_name == b.hidden_name and _equal(a.arguments, b.arguments) and _equal(a.keywords, b.keywords)
        for a, b in zip(one.calls, other.calls, strict=True)
    )


def _is_plain(value: Any) -> bool:
    """Return whether a value can be kept and compared; one that changes by itself (a cache) cannot."""
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
