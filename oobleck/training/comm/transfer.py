"""Transfers of layers: their state travels in chunks from the workers that hold it to those that lack it.

A layer's state is a sequence of tensors, equal on all sides, treated as one row of elements. Beyond the layers that it
receives, a worker needs memory for `WINDOW_BYTES` in each direction. A worker knows its own transfers only, in the
global order of all.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, zip_longest

import torch

from oobleck.planner import LayerTransfer, WorkerId

from .devices import blaming_peers
from .group import Group
from .staging import Pending
from .waiter import Waiter

CHUNK_BYTES = 16 << 20  # the size of one message
WINDOW_BYTES = 64 << 20  # what one worker sends, or receives, at a time
_PROGRESS_INTERVAL_S = 0.5

LayerState = tuple[torch.Tensor, ...]
"""The tensors of a layer, in an order that depends on the layer alone."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One message: elements [first, stop) of a layer's state."""

    transfer: LayerTransfer
    first: int
    stop: int
    tag: int  # its number among those from its source to its target


def exchange_layers(
    transfers: Sequence[LayerTransfer],
    *,
    worker_id: WorkerId,
    group_of: Callable[[LayerTransfer], Group],
    waiter: Waiter,
    state_of: Callable[[int], LayerState],
    empty_state: Callable[[int], LayerState],
    size_of: Callable[[int], int],
    element_bytes: int,
    on_progress: Callable[[int, int], None],
    interrupted: Callable[[], bool],
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[int, LayerState]:
    """Send the layers that others lack, receive those that this worker lacks, and return the received states.

    `transfers` contains at least this worker's, in the same order everywhere; `group_of(transfer)` is its pair's group.
    `state_of(layer)` is the state of a layer held here, `empty_state(layer)` allocates one that is not, and
    `size_of(layer)` is the number of elements of either. A helper thread calls `on_progress(received, total)` with
    bytes every half second. Raises Interrupted or PeerLost, and leaves this worker's own layers untouched.
    """
    chunks = cut_into_chunks(transfers, size_of, chunk_bytes // element_bytes)
    outgoing = [chunk for chunk in chunks if chunk.transfer.source == worker_id]
    incoming = [chunk for chunk in chunks if chunk.transfer.target == worker_id]
    if not outgoing and not incoming:
        return {}
    held = {layer: _Row(state_of(layer)) for layer in _layers_of(outgoing)}
    received = {layer: empty_state(layer) for layer in _layers_of(incoming)}
    rows = {layer: _Row(state) for layer, state in received.items()}
    # Both directions run at once: two workers that send to each other first would each wait for the other to receive.
    waiter.call_all(
        [
            lambda: _send(group_of, outgoing, held),
            lambda: _receive(group_of, incoming, rows, element_bytes, on_progress),
        ],
        interrupted,
        {chunk.transfer.source for chunk in incoming} | {chunk.transfer.target for chunk in outgoing},
    )
    return received


def fill_state(state: LayerState, row: torch.Tensor) -> LayerState:
    """Fill a layer's tensors from one row of all their elements, and return them."""
    for tensor, values in zip(state, torch.split(row, [tensor.numel() for tensor in state]), strict=True):
        tensor.copy_(values.view(tensor.shape))
    return state


def cut_into_chunks(
    transfers: Sequence[LayerTransfer], size_of: Callable[[int], int], max_elements: int
) -> list[Chunk]:
    """Cut and number the messages of an exchange, taking one from each transfer in turn."""
    pieces: list[list[tuple[LayerTransfer, int, int]]] = []
    for item in transfers:
        size = size_of(item.layer)
        start, end = size * item.part // item.num_parts, size * (item.part + 1) // item.num_parts
        firsts = range(start, end, max_elements)
        pieces.append([(item, first, min(first + max_elements, end)) for first in firsts])
    chunks: list[Chunk] = []
    # A pair of workers is a group and numbers its own chunks, so both find the tags from their own transfers alone.
    sent: Counter[tuple[WorkerId, WorkerId]] = Counter()
    # All workers send and receive in this order, so the lowest outstanding chunk is always in progress, whatever the
    # windows are.
    for item, first, stop in filter(None, chain.from_iterable(zip_longest(*pieces))):
        chunks.append(Chunk(item, first, stop, sent[item.source, item.target]))
        sent[item.source, item.target] += 1
    return chunks


def _layers_of(chunks: Sequence[Chunk]) -> list[int]:
    return sorted({chunk.transfer.layer for chunk in chunks})


class _Row:
    """The tensors of a layer as one row of elements."""

    def __init__(self, state: LayerState) -> None:
        self._tensors = [tensor.view(-1) for tensor in state]
        self._starts = list(accumulate((tensor.numel() for tensor in self._tensors), initial=0))
        self._dtype = reduce(torch.promote_types, (tensor.dtype for tensor in state))

    def read(self, first: int, stop: int) -> torch.Tensor:
        """Return elements [first, stop): a view if they are of one tensor, else a copy."""
        pieces = self._pieces(first, stop)
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.to(self._dtype) for piece in pieces])

    def room_for(self, first: int, stop: int) -> torch.Tensor:
        """Return a buffer for receiving elements [first, stop): in place if they are of one tensor."""
        pieces = self._pieces(first, stop)
        if len(pieces) == 1:
            return pieces[0]
        return torch.empty(stop - first, dtype=self._dtype, device=pieces[0].device)

    def put(self, first: int, stop: int, received: torch.Tensor) -> None:
        """Store the elements received in the buffer of `room_for`."""
        pieces = self._pieces(first, stop)
        if len(pieces) > 1:
            for piece, values in zip(pieces, torch.split(received, [piece.numel() for piece in pieces]), strict=True):
                piece.copy_(values)

    def _pieces(self, first: int, stop: int) -> list[torch.Tensor]:
        index = bisect_right(self._starts, first) - 1
        pieces = []
        while first < stop:
            start = self._starts[index]
            piece = self._tensors[index][first - start : stop - start]
            pieces.append(piece)
            first += piece.numel()
            index += 1
        return pieces


def _send(group_of: Callable[[LayerTransfer], Group], chunks: Sequence[Chunk], rows: Mapping[int, _Row]) -> None:
    posted: deque[tuple[Pending, torch.Tensor]] = deque()
    for chunk in chunks:
        # The window bounds the memory of copies, which must live until their receivers have them.
        if len(posted) >= WINDOW_BYTES // CHUNK_BYTES:
            _wait(posted.popleft()[0])
        tensor = rows[chunk.transfer.layer].read(chunk.first, chunk.stop)
        group = group_of(chunk.transfer)
        posted.append((group.send(tensor, group.rank_of(chunk.transfer.target), chunk.tag), tensor))
    while posted:
        _wait(posted.popleft()[0])


def _receive(
    group_of: Callable[[LayerTransfer], Group],
    chunks: Sequence[Chunk],
    rows: Mapping[int, _Row],
    element_bytes: int,
    on_progress: Callable[[int, int], None],
) -> None:
    posted: deque[tuple[Chunk, Pending, torch.Tensor]] = deque()
    total = element_bytes * sum(chunk.stop - chunk.first for chunk in chunks)
    received = 0
    reported_s = time.monotonic()

    def take_oldest() -> None:
        nonlocal received, reported_s
        chunk, work, tensor = posted.popleft()
        _wait(work)
        rows[chunk.transfer.layer].put(chunk.first, chunk.stop, tensor)
        received += tensor.numel() * element_bytes
        if time.monotonic() - reported_s >= _PROGRESS_INTERVAL_S:
            reported_s = time.monotonic()
            on_progress(received, total)

    for chunk in chunks:
        if len(posted) >= WINDOW_BYTES // CHUNK_BYTES:
            take_oldest()
        room = rows[chunk.transfer.layer].room_for(chunk.first, chunk.stop)
        group = group_of(chunk.transfer)
        posted.append((chunk, group.post_receive(room, group.rank_of(chunk.transfer.source), chunk.tag), room))
    while posted:
        take_oldest()


def _wait(work: Pending) -> None:
    with blaming_peers("transfer"):
        work.wait()
