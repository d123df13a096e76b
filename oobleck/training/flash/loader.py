"""Loads a state: all ranks report their readable parts, choose the same state, and exchange what others cannot read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from oobleck.errors import CorruptCheckpoint, StatesLost, UsageError
from oobleck.storage import TensorSpec, scripts
from oobleck.training.tensor_bytes import as_tensor
from oobleck.wire import decode_json, encode_json

from .tensors import Leaf, leaves, put_together


class Peers:
    """All ranks of this start. All of them call every method but `send` and `receive`, in the same order."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The default process group must exist if there are several ranks."""
        self.rank = rank
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None
        # Ranks exchange values in host memory, which NCCL does not carry.
        if world_size > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")

    def gather(self, text: bytes) -> list[bytes]:
        """Return the texts of all ranks, in the order of ranks."""
        if self.world_size == 1:
            return [text]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
        longest = max(int(size) for size in sizes)
        if not longest:
            return [b""] * self.world_size
        # A gather needs tensors of one size.
        padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self._group)
        return [text.numpy().tobytes()[: int(size)] for text, size in zip(texts, sizes, strict=True)]

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        """Begin to send a tensor on the CPU; return the request to wait for."""
        return dist.isend(_bytes_of(tensor), to, group=self._group)

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receive into a contiguous tensor."""
        dist.recv(_bytes_of(into), source, group=self._group)

    def close(self) -> None:
        """Wait for all ranks, and release the group."""
        self.gather(b"")
        if self._group is not None:
            dist.destroy_process_group(self._group)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_SAVED_AND_LOADED = {
    "PartFiles": ("oobleck.checkpoint.save_files", "oobleck.checkpoint.load_files"),
    "PartItems": ("oobleck.dcp.Writer", "oobleck.dcp.Reader"),
}
"""The calls that save and load a part, keyed by the class in its tree; all others are of the pair below."""
_SAVE, _LOAD = "oobleck.checkpoint.save", "oobleck.checkpoint.load"


def _calls_of(tree: scripts.TreeNode) -> tuple[str, str]:
    """Return the calls that save and load a part with this tree."""
    said: object = None
    with suppress(ValueError):
        said = json.loads(tree) if isinstance(tree, str) else None
    return _SAVED_AND_LOADED.get(str(said.get("@type")) if isinstance(said, dict) else "", (_SAVE, _LOAD))


def _check_call(call: str, calls: tuple[str, str]) -> None:
    saved, loaded = calls
    if call != loaded:
        raise UsageError(f"{call}: the newest state is one of {saved}; load it by {loaded}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holdings:
    parts: tuple[scripts.Holding, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    calls: tuple[tuple[str, str], ...]
    """Of the parts that a rank serves."""
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Damage:
    part: scripts.Part
    problem: str


def _damaged(parts: Iterable[scripts.Part]) -> tuple[_Damage, ...]:
    """Read parts, and return those whose bytes are not what was saved."""
    damaged = []
    for part in parts:
        try:
            part.read()
        except CorruptCheckpoint as error:
            damaged.append(_Damage(part, str(error)))
    return tuple(damaged)


class Loader:
    """Loads once, on all ranks together."""

    def __init__(self, peers: Peers, parts: Sequence[scripts.Part], problems: list[str]) -> None:
        """`parts` are readable by this rank; `problems` describe those that are not, and get those found damaged."""
        self._peers = peers
        # Of a step that was saved twice, the later save counts, as the last one here.
        self._parts = sorted(parts, key=lambda part: part.note.number)
        self._problems = problems

    def load(self) -> tuple[object, scripts.Chosen] | None:
        """Return the newest complete state. Raises StatesLost and UsageError, on all ranks alike."""
        while (chosen := self.choose()) is not None:
            exchange = _Exchange(self._peers, chosen, self._parts)
            has_read = exchange.has_read()
            if all(answer == b"1" for answer in self._peers.gather(b"1" if has_read else b"0")):
                tree = exchange.tree()
                calls = _calls_of(tree)
                state = exchange.state(tree) if calls[1] == _LOAD else None
                # From here on, other ranks may overwrite what this one has read.
                self._peers.close()
                _check_call(_LOAD, calls)
                return state, chosen
            # Some rank has found damage, and all choose again without the damaged parts.
            self._leave_out(exchange.damaged)
        self._peers.close()
        return None

    def find(self) -> Found | None:
        """Return the newest whole state, of which no part is damaged, unread. Raises as `load` does."""
        while (chosen := self.choose()) is not None:
            found = Found(self._peers, chosen, self._parts)
            damaged = _damaged(found.parts[saver] for saver in found.served)
            if all(answer == b"1" for answer in self._peers.gather(b"0" if damaged else b"1")):
                return found
            self._leave_out(damaged)
        self._peers.close()
        return None

    def _leave_out(self, damaged: Sequence[_Damage]) -> None:
        # Where no other state is left, they are why: then nothing begins from scratch.
        self._problems += [each.problem for each in damaged]
        self._parts = [part for part in self._parts if all(part is not each.part for each in damaged)]

    def choose(self) -> scripts.Chosen | None:
        mine = tuple(scripts.Holding(viewer=self._peers.rank, place=part.place, note=part.note) for part in self._parts)
        texts = self._peers.gather(encode_json(_Holdings(parts=mine, problems=tuple(self._problems))))
        reports = [decode_json(_Holdings, text) for text in texts]
        # All ranks decide from the same reports, so they choose the same state, or raise the same error.
        chosen = scripts.choose([holding for report in reports for holding in report.parts])
        problems = sorted({problem for report in reports for problem in report.problems})
        if isinstance(chosen, scripts.LostState):
            raise StatesLost("; ".join((chosen.problem, *problems)))
        if chosen is None and problems:
            raise StatesLost(f"no saved state can be read: {problems[0]}; remove what is there to begin again")
        return chosen


class Found:
    """A whole state, whose parts each have a rank that serves others with it."""

    def __init__(self, peers: Peers, chosen: scripts.Chosen, parts: Sequence[scripts.Part]) -> None:
        self.peers = peers
        self.chosen = chosen
        self.servers = {
            saver: saver if saver in viewers else viewers[saver % len(viewers)]
            for saver, viewers in chosen.viewers.items()
        }
        """The rank that reads each saver's part for others."""
        self.served = sorted(saver for saver, server in self.servers.items() if server == peers.rank)
        here = {part.note.rank: part for part in parts if part.note.name == chosen.name and part.place == chosen.place}
        # All are verified.
        self.parts = {saver: here[saver] for saver in self.served}
        self._on_close: list[Callable[[], None]] = []

    def on_close(self, function: Callable[[], None]) -> None:
        self._on_close.append(function)

    def texts(self, call: str) -> list[str]:
        """Return what each part says of itself.

        Raises UsageError, on all ranks alike, if the state is not one that this call loads.
        """
        mine = [json.loads(bytes(self.parts[saver].read()[scripts.TREE][1])) for saver in self.served]
        calls = sorted({_calls_of(tree) for tree in mine})
        texts = tuple(mine) if all(loaded == call for _, loaded in calls) else ()
        answers = self.peers.gather(encode_json(_Texts(calls=tuple(calls), texts=texts)))
        reports = [decode_json(_Texts, answer) for answer in answers]
        for other in sorted({each for report in reports for each in report.calls}):
            if other[1] != call:
                self.peers.close()
                _check_call(call, other)
        return [text for report in reports for text in report.texts]

    def close(self) -> None:
        """Note that this rank has read all, and wait for the others."""
        self.peers.close()
        for function in self._on_close:
            function()


class _Exchange:
    def __init__(self, peers: Peers, chosen: scripts.Chosen, parts: Sequence[scripts.Part]) -> None:
        """Raises UsageError if the state cannot be laid out on the present number of ranks."""
        self._peers = peers
        self._chosen = chosen
        self._now = tuple(scripts.resharded(each, peers.world_size) for each in chosen.note.shardings)
        self._parts = {
            part.note.rank: part for part in parts if part.note.name == chosen.name and part.place == chosen.place
        }
        self._wants = [
            scripts.sources(chosen, rank=rank, world_size=peers.world_size) for rank in range(peers.world_size)
        ]
        self.damaged: tuple[_Damage, ...] = ()
        """What `has_read` has found damaged."""

    def has_read(self) -> bool:
        """Read all parts that this rank reads, for itself or for others; return whether all are intact."""
        savers = sorted({source.saver for source in self._all_sources() if source.reader == self._peers.rank})
        self.damaged = _damaged(self._parts[saver] for saver in savers)
        return not self.damaged

    def _all_sources(self) -> list[scripts.Source]:
        sources = []
        for rank, (values, pieces) in enumerate(self._wants):
            sources.append(values)
            for (number, piece), source in pieces.items():
                before, now = self._chosen.note.shardings[number], self._now[number]
                # Unless the sharding changes, a rank needs its own piece alone.
                if before != now or before.piece(rank) == piece:
                    sources.append(source)
        return sources

    def state(self, tree: scripts.TreeNode) -> object:
        """Exchange all tensors with other ranks, and return the state."""
        tensors = {leaf.entry: self._exchange(leaf) for leaf in leaves(tree)}
        return put_together(tree, tensors, self._now)

    # --- values that all ranks have alike ----------------------------------------------------------------------------

    def tree(self) -> scripts.TreeNode:
        """Exchange the values with other ranks, and return their tree."""
        mine = self._wants[self._peers.rank][0]
        # A receiver has to allocate the text. Whoever sends one may receive its own from a third rank.
        sizes = [
            self._peers.send(torch.tensor([self._entry(values.saver, scripts.TREE).numel()]), rank)
            for rank, values in self._served()
        ]
        requests = self._send_values(scripts.TREE)
        if mine.reader == self._peers.rank:
            text = self._entry(mine.saver, scripts.TREE)
        else:
            size = torch.zeros(1, dtype=torch.int64)
            self._peers.receive(size, mine.reader)
            text = torch.empty(int(size), dtype=torch.uint8)
            self._peers.receive(text, mine.reader)
        _wait([*sizes, *requests])
        try:
            tree: scripts.TreeNode = json.loads(bytes(text.numpy()))
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{self._chosen.name}: its values cannot be read ({error})") from error
        return tree

    def _send_values(self, name: str) -> list[Any]:
        """Send an entry to the ranks for which this one reads values."""
        return [self._peers.send(self._entry(values.saver, name), rank) for rank, values in self._served()]

    def _served(self) -> list[tuple[int, scripts.Source]]:
        """Return the other ranks for which this one reads values, with their sources."""
        return [
            (rank, values) for rank, (values, _) in enumerate(self._wants) if values.reader == self._peers.rank != rank
        ]

    def _exchange(self, leaf: Leaf) -> torch.Tensor:
        """Return a tensor of this rank, whole, or its box of a sharded one."""
        if leaf.sharding is not None:
            return self._exchange_pieces(leaf, leaf.sharding)
        requests = self._send_values(leaf.entry) if math.prod(leaf.shape) else []  # empty tensors are not sent
        mine = self._wants[self._peers.rank][0]
        if mine.reader == self._peers.rank:
            tensor = self._entry(mine.saver, leaf.entry).clone()
        else:
            tensor = _empty(leaf.dtype, leaf.shape)
            if tensor.numel():
                self._peers.receive(tensor, mine.reader)
        _wait(requests)
        return tensor

    def _entry(self, saver: int, name: str) -> torch.Tensor:
        try:
            spec, data = self._parts[saver].read()[name]
        except KeyError:
            raise CorruptCheckpoint(f"{self._chosen.name}: rank {saver}'s part has no {name}") from None
        return as_tensor(spec, data)

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _exchange_pieces(self, leaf: Leaf, number: int) -> torch.Tensor:
        """Send other ranks the pieces that they lack, and fill this rank's box."""
        before, now = self._chosen.note.shardings[number], self._now[number]
        requests = []
        for rank in range(self._peers.world_size):
            if rank != self._peers.rank:
                requests += self._send_pieces(leaf, number, before, now, to=rank)
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
        _wait(requests)
        return tensor

    def _send_pieces(
        self, leaf: Leaf, number: int, before: scripts.Sharding, now: scripts.Sharding, *, to: int
    ) -> list[Any]:
        requests = []
        box = now.box(to, leaf.shape)
        for source in self._sources_of(to, number):
            piece = before.box(source.saver, leaf.shape)
            shared = scripts.overlap(piece, box)
            if source.reader == self._peers.rank and shared is not None:
                requests.append(self._peers.send(self._entry(source.saver, leaf.entry)[shared.within(piece)], to))
        return requests

    def _sources_of(self, rank: int, number: int) -> list[scripts.Source]:
        """Return a rank's sources of a sharding's pieces, in the same order on all ranks."""
        # Messages have no tags: a receiver knows them by their order.
        _, pieces = self._wants[rank]
        return [source for (of, _), source in sorted(pieces.items()) if of == number]


def _empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    spec = TensorSpec(name="", dtype=dtype, shape=shape)
    return as_tensor(spec, memoryview(bytearray(spec.size_bytes)))


def _wait(requests: Sequence[Any]) -> None:
    for each in requests:
        each.wait()
