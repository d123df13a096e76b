"""Layers that change hands: flat state sent from those who hold it to those who lack it, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from oobleck.planner import LayerTransfer, Place

from .groups import Group, GroupKey
from .signals import Signals

__all__ = ["exchange_layers", "transfer_key"]

_CHUNK_ELEMENTS = 4 << 20
"""Elements in one message: the largest buffer in flight for each part."""


@dataclass(frozen=True, slots=True)
class _Piece:
    transfer: LayerTransfer
    first: int
    stop: int
    tag: int


def transfer_key(transfers: Sequence[LayerTransfer], generation: int) -> GroupKey | None:
    """The group of all who send or receive; None when nothing moves."""
    members = {place for item in transfers for place in (item.source, item.target)}
    return GroupKey("transfer", generation, tuple(sorted(members))) if members else None


def exchange_layers(
    transfers: Sequence[LayerTransfer],
    *,
    place: Place,
    group: Group | None,
    state_of: Callable[[int], torch.Tensor],
    size_of: Callable[[int], int],
    dtype: torch.dtype,
    signals: Signals,
    interrupted: Callable[[], bool],
) -> dict[int, torch.Tensor]:
    """Send what others lack, receive what `place` lacks; return the received layers' flat states.

    `state_of(layer)` is the flat state of a layer held here, `size_of(layer)` the number of its elements.
    Raises Interrupted or PeerLost, with nothing of the own layers touched.
    """
    pieces = _cut(transfers, size_of)
    outgoing = [piece for piece in pieces if piece.transfer.source == place]
    incoming = [piece for piece in pieces if piece.transfer.target == place]
    if not outgoing and not incoming:
        return {}
    assert group is not None

    held = {layer: state_of(layer) for layer in sorted({piece.transfer.layer for piece in outgoing})}
    received = {
        layer: torch.empty(size_of(layer), dtype=dtype)
        for layer in sorted({piece.transfer.layer for piece in incoming})
    }

    def move() -> None:
        posted = [
            group.send(
                held[piece.transfer.layer][piece.first : piece.stop], group.rank_of(piece.transfer.target), piece.tag
            )
            for piece in outgoing
        ]
        for piece in incoming:
            target = received[piece.transfer.layer][piece.first : piece.stop]
            group.receive(target, group.rank_of(piece.transfer.source), piece.tag)
        for work in posted:
            work.wait()

    signals.call(move, interrupted)
    return received


def _cut(transfers: Sequence[LayerTransfer], size_of: Callable[[int], int]) -> list[_Piece]:
    """Number the messages in an order that source and target agree on."""
    sizes = {item.layer: size_of(item.layer) for item in transfers}
    pieces: list[_Piece] = []
    for item in transfers:
        size = sizes[item.layer]
        first, stop = size * item.part // item.num_parts, size * (item.part + 1) // item.num_parts
        for start in range(first, stop, _CHUNK_ELEMENTS):
            pieces.append(_Piece(item, start, min(start + _CHUNK_ELEMENTS, stop), len(pieces)))
    return pieces
