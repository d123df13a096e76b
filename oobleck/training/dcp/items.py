"""What a rank's part says of its items, on the wire between ranks and in the part's tree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor's piece, or the bytes of a value, as DCP's planner has planned to write it."""

    entry: str
    """Its name among the part's tensors."""
    name: str
    """Its fully qualified name in the state."""
    dtype: str
    """Empty for bytes."""
    size: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """Of the piece; the number of bytes where it is a value."""
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartItems:
    """All items of a rank's part."""

    saver: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A box of an item that a rank lacks."""

    saver: int
    entry: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    wants: tuple[Want, ...]
