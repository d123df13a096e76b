"""Loads a state: all ranks say what they can read, choose the same one, and give each other what they cannot read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from oobleck.errors import CorruptCheckpoint
from oobleck.storage import TensorSpec, scripts
from oobleck.training.tensor_bytes import as_tensor
from oobleck.wire import decode_json, encode_json

from .peers import Peers
from .tensors import Leaf, leaves, put_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A state, and what is known of it."""

    state: object
    note: scripts.PartNote
    num_savers: int
    place: Literal["memory", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holdings:
    """What one rank says."""

    parts: tuple[scripts.Holding, ...]
    problems: tuple[str, ...]
    """Notes that it cannot read."""


class Loader:
    """Loads once, on all ranks together."""

    def __init__(self, peers: Peers, parts: Sequence[scripts.Part], problems: Sequence[str]) -> None:
        """`parts` are those that this rank can read, and `problems` what is wrong with others."""
        self._peers = peers
        self._parts = list(parts)
        self._problems = tuple(problems)

    def load(self) -> Loaded | None:
        """Return the newest whole state. Raises CorruptCheckpoint and UsageError, on all ranks alike."""
        while (chosen := self._choose()) is not None:
            exchange = _Exchange(self._peers, chosen, self._parts)
            if self._peers.all_agree(exchange.has_read()):
                loaded = Loaded(
                    state=exchange.state(), note=chosen.note, num_savers=len(chosen.notes), place=chosen.place
                )
                self._peers.close()  # from here on, others may save over what has been read
                return loaded
            self._parts = [part for part in self._parts if not exchange.is_damaged(part)]
        self._peers.close()
        return None

    def _choose(self) -> scripts.Chosen | None:
        mine = tuple(scripts.Holding(viewer=self._peers.rank, place=part.place, note=part.note) for part in self._parts)
        said = self._peers.gather(encode_json(_Holdings(parts=mine, problems=self._problems)))
        all_said = [decode_json(_Holdings, each) for each in said]
        chosen = scripts.choose([holding for each in all_said for holding in each.parts])
        problems = sorted({problem for each in all_said for problem in each.problems})
        if isinstance(chosen, scripts.LostState):
            raise CorruptCheckpoint("; ".join((chosen.problem, *problems)))
        if chosen is None and problems:
            raise CorruptCheckpoint(f"no saved state can be read: {problems[0]}; remove what is there to begin again")
        return chosen


class _Exchange:
    """One state, on its way to all ranks."""

    def __init__(self, peers: Peers, chosen: scripts.Chosen, parts: Sequence[scripts.Part]) -> None:
        """Raises UsageError where it cannot be laid out on so many ranks."""
        self._peers = peers
        self._chosen = chosen
        self._now = tuple(scripts.resharded(each, peers.world_size) for each in chosen.note.shardings)
        self._parts = {
            part.note.rank: part for part in parts if part.note.name == chosen.name and part.place == chosen.place
        }
        self._wants = [
            scripts.sources(chosen, rank=rank, world_size=peers.world_size) for rank in range(peers.world_size)
        ]
        self._damaged: set[int] = set()

    def has_read(self) -> bool:
        """Read all parts that this rank is to read, for itself or for others; returns whether all are whole."""
        for saver in sorted({source.saver for source in self._all_sources() if source.reader == self._peers.rank}):
            try:
                self._parts[saver].read()
            except CorruptCheckpoint:
                self._damaged.add(saver)
        return not self._damaged

    def is_damaged(self, part: scripts.Part) -> bool:
        """Whether it is one that was found damaged."""
        return any(part is self._parts[saver] for saver in self._damaged)

    def _all_sources(self) -> list[scripts.Source]:
        """Whatever anybody reads; of pieces, those that one's own box has no use for are not asked for."""
        found = []
        for rank, (values, pieces) in enumerate(self._wants):
            found.append(values)
            found += [source for (number, piece), source in pieces.items() if self._is_wanted(rank, number, piece)]
        return found

    def _is_wanted(self, rank: int, number: int, piece: tuple[int, ...]) -> bool:
        before, now = self._chosen.note.shardings[number], self._now[number]
        return before != now or before.piece(rank) == piece

    def state(self) -> object:
        """Give, take, and put together."""
        tree = self._exchange_tree()
        tensors = {leaf.entry: self._exchange(leaf) for leaf in leaves(tree)}
        return put_together(tree, tensors, self._now)

    # --- values that all ranks have alike ----------------------------------------------------------------------------

    def _exchange_tree(self) -> scripts.TreeNode:
        mine = self._wants[self._peers.rank][0]
        text = torch.zeros(0, dtype=torch.uint8)
        if mine.reader == self._peers.rank:
            text = self._entry(mine.saver, scripts.TREE)
        sizes = self._peers.gather(str(text.numel()).encode())
        waiting = self._give_values(lambda saver: self._entry(saver, scripts.TREE))
        if mine.reader != self._peers.rank:
            text = torch.empty(int(sizes[mine.reader]), dtype=torch.uint8)
            self._peers.receive(text, mine.reader)
        _wait(waiting)
        try:
            tree: scripts.TreeNode = json.loads(bytes(text.numpy()))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{self._chosen.name}: its values cannot be read ({error})") from error
        return tree

    def _give_values(self, tensor_of: Any) -> list[Any]:
        """Send what others need of the values that this rank reads."""
        return [
            self._peers.send(tensor_of(values.saver), rank)
            for rank, (values, _) in enumerate(self._wants)
            if values.reader == self._peers.rank != rank
        ]

    def _exchange(self, leaf: Leaf) -> torch.Tensor:
        """A tensor of this rank, as it is or as its box of a sharded one is."""
        if leaf.sharding is not None:
            return self._exchange_pieces(leaf, leaf.sharding)
        waiting = self._give_values(lambda saver: self._entry(saver, leaf.entry)) if math.prod(leaf.shape) else []
        mine = self._wants[self._peers.rank][0]
        if mine.reader == self._peers.rank:
            tensor = self._entry(mine.saver, leaf.entry).clone()
        else:
            tensor = _empty(leaf.dtype, leaf.shape)
            if tensor.numel():
                self._peers.receive(tensor, mine.reader)
        _wait(waiting)
        return tensor

    def _entry(self, saver: int, name: str) -> torch.Tensor:
        try:
            spec, data = self._parts[saver].read()[name]
        except KeyError:
            raise CorruptCheckpoint(f"{self._chosen.name}: rank {saver}'s part has no {name}") from None
        return as_tensor(spec, data)

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _exchange_pieces(self, leaf: Leaf, number: int) -> torch.Tensor:
        """Fill this rank's box from the pieces that overlap with it; give others what they lack."""
        before, now = self._chosen.note.shardings[number], self._now[number]
        waiting = []
        for rank in range(self._peers.world_size):
            if rank != self._peers.rank:
                waiting += self._give_pieces(leaf, number, before, now, to=rank)
        box = now.box(self._peers.rank, leaf.shape)
        tensor = _empty(leaf.dtype, box.sizes)
        for source in self._sources_of(self._peers.rank, number):
            piece = before.box(source.saver, leaf.shape)
            if (shared := scripts.overlap(piece, box)) is None:
                continue
            target = tensor[shared.within(box)]
            if source.reader == self._peers.rank:
                target.copy_(self._entry(source.saver, leaf.entry)[shared.within(piece)])
            else:
                received = torch.empty(shared.sizes, dtype=tensor.dtype)
                self._peers.receive(received, source.reader)
                target.copy_(received)
        _wait(waiting)
        return tensor

    def _give_pieces(
        self, leaf: Leaf, number: int, before: scripts.Sharding, now: scripts.Sharding, *, to: int
    ) -> list[Any]:
        waiting = []
        box = now.box(to, leaf.shape)
        for source in self._sources_of(to, number):
            piece = before.box(source.saver, leaf.shape)
            shared = scripts.overlap(piece, box)
            if source.reader == self._peers.rank and shared is not None:
                waiting.append(self._peers.send(self._entry(source.saver, leaf.entry)[shared.within(piece)], to))
        return waiting

    def _sources_of(self, rank: int, number: int) -> list[scripts.Source]:
        """Where a rank gets the pieces of a sharding from, in an order that all know."""
        _, pieces = self._wants[rank]
        return [source for (of, _), source in sorted(pieces.items()) if of == number]


def _empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    spec = TensorSpec(name="", dtype=dtype, shape=shape)
    return as_tensor(spec, memoryview(bytearray(spec.size_bytes)))


def _wait(waiting: Sequence[Any]) -> None:
    for each in waiting:
        each.wait()
