"""Finds numbers that change with every call of a script's code, and on which its results depend, at once or later.

A warm-up over a thousand steps shows in the first two calls; an effect that begins with the thousandth does not. So
each counter is set to much higher values, and the code is called again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LATER = (1_000, 1_000_000)
"""What is added to a counter before each further call."""


@dataclass(frozen=True, slots=True)
class _Number:
    """A variable, attribute or buffer that may hold a number."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]

    def value(self) -> float | None:
        """Return the number; None where there is none at the moment."""
        found = self.read()
        if isinstance(found, torch.Tensor):
            return None if found.numel() != 1 or found.is_meta else float(found)
        return float(found) if type(found) in (int, float) else None

    def set(self, value: float) -> None:
        found = self.read()
        if isinstance(found, torch.Tensor):
            found.fill_(value)
        else:
            self.write(type(found)(value))


def counter_of(owners: Mapping[str, object], same: Callable[[], bool]) -> str | None:
    """Name a number that results depend on, among those that change with every call.

    `owners` are modules or functions by their names. `same` calls the code that uses them, and returns whether its
    result is the same as before. A number with which the code fails does not count.
    """
    seen: list[dict[str, float | None]] = []
    for _ in range(3):
        same()
        seen.append(numbers_of(owners))
    first, second, third = seen
    for number in _all_numbers(owners):
        value = third.get(number.name)
        if value is None or len({first.get(number.name), second.get(number.name), value}) < len(seen):
            continue
        for later in _LATER:
            number.set(value + later)
            with suppress(Exception):  # the user's code may fail in any way
                if not same():
                    return number.name
        number.set(value)
    return None


def numbers_of(owners: Mapping[str, object]) -> dict[str, float | None]:
    """Return all numbers that modules or functions keep, keyed by name."""
    return {number.name: number.value() for number in _all_numbers(owners)}


def _all_numbers(owners: Mapping[str, object]) -> Iterator[_Number]:
    for name, owner in owners.items():
        while isinstance(owner, functools.partial):
            owner = owner.func
        if isinstance(owner, types.MethodType):
            owner = owner.__self__
        if isinstance(owner, types.FunctionType):
            yield from _in(f"{name}.", owner.__globals__, owner.__code__.co_names)
            for variable, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
                read = functools.partial(_content, cell)
                yield _Number(f"{name}.{variable}", read, functools.partial(setattr, cell, "cell_contents"))
            continue
        prefix = f"{name}." if name else ""
        if isinstance(owner, nn.Module):
            yield from _in(prefix, owner._buffers, owner._buffers)
        if hasattr(owner, "__dict__"):
            yield from _in(prefix, vars(owner), vars(owner))


def _in(prefix: str, values: dict[str, Any], names: Iterable[str]) -> Iterator[_Number]:
    for name in list(names):
        if name in values:
            read, write = functools.partial(values.get, name), functools.partial(values.__setitem__, name)
            yield _Number(prefix + name, read, write)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
