"""Indices of arrays whose number of axes is that of the kinds."""

from __future__ import annotations


def at(*parts: int | slice) -> tuple[int | slice, ...]:
    """Return an index of its parts: `array[at(0, *counts)]`."""
    return parts
