"""The calls of a model's units, and what they hand on to each other: layers, and what travels over a cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value that a unit returns."""

    value: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a module returns: containers, and their leaves, which are values (`Ref`) or constants."""

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]

    def built(self, value_of: Callable[[int], torch.Tensor]) -> Any:
        leaves = [value_of(leaf.value) if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a unit returns."""

    call: int
    place: int
    """Its number among the leaves of what is returned; of an inner module's, after those."""
    name: str
    num_dimensions: int
    carries_gradient: bool
    is_changed: bool = False
    """Whether something changes it in place afterwards."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a unit."""

    module: str
    result: Result
    reads: frozenset[int]
    """The values that it, or what the model computes for it, depends on."""
    parameters: frozenset[str]
    """Parameters that it, or what the model computes for it, reads outside of its module."""
    echoes: tuple[tuple[str, Result], ...] = ()
    """Modules within it whose results are read outside by their hooks."""


@dataclass(frozen=True)
class Flow:
    """The calls of a model's units in their order, the loss last, as layers."""

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    loss_reads: frozenset[int]
    loss_parameters: frozenset[str]
    blocks: frozenset[str]
    """The units that are members of a list."""
    starts: tuple[int, ...]
    """The first call of each layer."""

    @property
    def num_layers(self) -> int:
        return len(self.starts)

    def calls_of(self, layer: int) -> range:
        stops = (*self.starts[1:], len(self.calls))
        return range(self.starts[layer], stops[layer])

    def roots_of(self, layer: int) -> tuple[str, ...]:
        """Return the units that a layer calls, each once."""
        return tuple(dict.fromkeys(self.calls[call].module for call in self.calls_of(layer)))

    def parameters_of(self, layer: int) -> frozenset[str]:
        """Return the parameters that a layer reads outside of its units."""
        read = [self.calls[call].parameters for call in self.calls_of(layer)]
        return frozenset[str]().union(*read, self.loss_parameters if layer == self.num_layers - 1 else ())

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for layer in range(self.num_layers):
            roots = self.roots_of(layer)
            name = next((root for root in roots if root in self.blocks), roots[0])
            number = 1 + sum(each.partition("#")[0] == name for each in names)
            names.append(name if number == 1 else f"{name}#{number}")
        return tuple(names)

    @cached_property
    def travelling(self) -> tuple[tuple[int, ...], ...]:
        """The values that travel to each layer from those before it: what it or a later one reads."""
        found: list[tuple[int, ...]] = []
        for start in self.starts:
            read = self.loss_reads.union(*(call.reads for call in self.calls[start:]))
            found.append(tuple(sorted(value for value in read if self.values[value].call < start)))
        return tuple(found)

    def carries(self, layer: int) -> tuple[bool, ...]:
        """Say of each value that travels to a layer whether its gradient travels back."""
        return tuple(self.values[each].carries_gradient for each in self.travelling[layer])

    def known_before(self, layer: int) -> tuple[int, ...]:
        """Return the values of all layers before one, of the given sizes."""
        return tuple(number for number, each in enumerate(self.values) if each.call < self.starts[layer])
