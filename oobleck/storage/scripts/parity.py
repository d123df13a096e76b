"""Parities of parts: what a slot has that holds one, and the heads of its parts, which are in a file of their own."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.storage.layer_file import write_file
from oobleck.storage.layout import Layout, TensorSpec
from oobleck.storage.memory import FlashMemory, MappedFiles, Slot
from oobleck.wire import decode_json, encode_json

from .part import PARITY, check_numbers

_HEAD = struct.Struct("<IIII")  # the rank, and the bytes of the note, the layout and the checksums

_NUM_SLOTS = 2  # one that is whole, and one that is being received

ANY_PARITY = f"{PARITY}*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityNote:
    name: str
    """The name of the state."""
    step: int
    start: str
    ranks: tuple[int, ...]
    world_size: int
    heads: str
    """The SHA-256 of the heads."""

    def __post_init__(self) -> None:
        check_numbers(self.step, world_size=self.world_size)
        if not all(0 <= rank < self.world_size for rank in self.ranks):
            raise CorruptCheckpoint(f"a parity of other ranks than those of {self.world_size}")


@dataclass(frozen=True, slots=True)
class PartHead:
    """All that a slot has of a part, except its data."""

    note: bytes
    layout: bytes
    sums: bytes


def parity_stem(ranks: tuple[int, ...], start: str) -> str:
    """Return the stem of the files for the parity of ranks' parts, which these have saved since a start."""
    return f"{PARITY}{'_'.join(map(str, ranks))}-{start}"


def parity_layout(num_bytes: int) -> Layout:
    return Layout.of({0: [TensorSpec(name=PARITY, dtype="U8", shape=(num_bytes,))]}, metadata={})


def parity_note_of(slot: Slot) -> ParityNote | None:
    """Return the note of the parity in a slot; None if it is not one."""
    try:
        return decode_json(ParityNote, slot.note)
    except PeerError:
        return None


def seal_parity(slot: Slot, note: ParityNote, heads: Mapping[int, PartHead]) -> None:
    """Make a slot with the parity of these parts valid. Raises OSError."""
    raw = b"".join(
        _HEAD.pack(rank, len(head.note), len(head.layout), len(head.sums)) + head.note + head.layout + head.sums
        for rank, head in sorted(heads.items())
    )
    _, digest = write_file(_heads_of(slot), [memoryview(raw)])
    sealed = ParityNote(
        name=note.name, step=note.step, start=note.start, ranks=note.ranks, world_size=note.world_size, heads=digest
    )
    slot.seal(encode_json(sealed))


def head_of(slot: Slot, note: ParityNote, rank: int) -> PartHead:
    """Return the head of one of a parity's parts. Raises CorruptCheckpoint."""
    path = _heads_of(slot)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error.strerror}") from error
    if hashlib.sha256(raw).hexdigest() != note.heads:
        raise CorruptCheckpoint(f"{path}: changed: its SHA-256 is not {note.heads}")
    start = 0
    while start < len(raw):
        of, *sizes = _HEAD.unpack_from(raw, start)
        start += _HEAD.size
        fields = []
        for size in sizes:
            fields.append(raw[start : start + size])
            start += size
        if of == rank:
            return PartHead(*fields)
    raise CorruptCheckpoint(f"{path}: rank {rank} is not among its parts")


def slot_for(files: MappedFiles, stem: str, layout: Layout, kept: Collection[str]) -> Slot | None:
    """Return where to store the next copy or parity, in a new file if the layout is; None if all states are kept.

    O(size) for a new file. Raises OSError if memory is short.
    """
    newest, *older = files.all(stem) or (None,)
    if newest is not None and newest.layout == layout:
        slots = [slot for slot in newest.slots() if not any(slot.holds(name) for name in kept)]
        return min(slots, key=lambda slot: slot.sequence if slot.is_valid else 0, default=None)
    _remove_unneeded(older, kept)
    made = files.create(stem, layout, num_slots=_NUM_SLOTS)
    # It goes last, so that no other file ever has its name, by which its states are known.
    _remove_unneeded([] if newest is None else [newest], kept)
    return made.next_slot()


def _remove_unneeded(files: Iterable[FlashMemory], kept: Collection[str]) -> None:
    for file in files:
        if not any(slot.holds(name) for slot in file.valid_slots() for name in kept):
            remove_copies(file.path)


def remove_copies(path: Path) -> None:
    """Remove a file of copies or parities."""
    for each in path.parent.glob(f"{path.name}.*.heads"):
        each.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _heads_of(slot: Slot) -> Path:
    return slot.memory.path.with_name(f"{slot.memory.path.name}.{slot.number}.heads")
