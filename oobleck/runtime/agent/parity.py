"""Parts of several ranks' states that are mixed in one slot, as they arrive: to a parity, or to the part that is lost.

Each part is XORed into the slot, and is in it as far as it has come: one that is sent again continues there.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from oobleck.control.protocol import Mix
from oobleck.errors import CorruptCheckpoint
from oobleck.storage import CHUNK_BYTES, Layout, MappedFiles, Slot, scripts
from oobleck.wire import decode_json

_TOO_LATE = "a newer state is mixed there"
_NO_SEQUENCE = 0  # no slot has it: nothing that comes is mixed there
_PIECE_BYTES = 256 << 10  # is XORed while it is in the processor's cache


class Refused(Exception):
    """A part is not taken in."""


@dataclass(slots=True, eq=False)
class _Mixture:
    note: scripts.PartNote
    """Any part's."""
    mix: Mix
    slot: Slot
    sequence: int
    """Of the slot since it was begun."""
    head: scripts.PartHead | None
    """The missing part's."""
    heads: dict[int, scripts.PartHead] = field(default_factory=dict)
    num_in: dict[int, int] = field(default_factory=dict)
    """How many chunks of each rank's part are in."""
    arriving: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_complete(self) -> bool:
        return all(
            rank in self.num_in and self.num_in[rank] == len(self.heads[rank].sums) // 4 for rank in self.mix.senders
        )


class Mixer:
    """Mixes what arrives for a node. Any thread may call it."""

    def __init__(self, files: MappedFiles, keeps: Callable[[], frozenset[str]]) -> None:
        """Parities go to `files`; the states that `keeps` names are not overwritten."""
        self._files = files
        self._keeps = keeps
        self._lock = threading.Lock()
        self._mixtures: dict[tuple[tuple[int, ...], str, int | None], _Mixture] = {}

    def begin(self, note: scripts.PartNote, head: scripts.PartHead, mix: Mix, num_bytes: int) -> tuple[_Mixture, int]:
        """Expect a part; return where it is mixed, and how many of its chunks are in already.

        Raises Refused, CorruptCheckpoint and OSError.
        """
        sums_bytes = 4 * -(-num_bytes // CHUNK_BYTES)
        if note.rank not in mix.senders or num_bytes > mix.num_bytes or len(head.sums) != sums_bytes:
            raise Refused(f"{num_bytes} bytes of rank {note.rank}, and {len(head.sums)} of checksums, are not of {mix}")
        with self._lock:
            mixture = self._mixture(note, mix)
        with mixture.lock:
            if note.rank in mixture.arriving:
                raise Refused("it is being received already")
            mixture.arriving.add(note.rank)
            mixture.heads[note.rank] = head
            return mixture, mixture.num_in.setdefault(note.rank, 0)

    def take(self, mixture: _Mixture, rank: int, chunk: memoryview) -> str:
        """Take in the next chunk of a part; return what is wrong. O(size)."""
        index = mixture.num_in[rank]
        (expected,) = struct.unpack_from("<I", mixture.heads[rank].sums, 4 * index)
        if zlib.crc32(chunk) != expected:
            return f"bytes {index * CHUNK_BYTES} to {index * CHUNK_BYTES + len(chunk)} differ from their checksum"
        start = index * CHUNK_BYTES
        with mixture.lock:
            if mixture.slot.sequence != mixture.sequence:
                return _TOO_LATE
            mixed = mixture.slot.data[start : start + len(chunk)]
            _xor(mixed, chunk[: len(mixed)])  # what is longer than the missing part is the others' alone
            mixture.num_in[rank] = index + 1
        return ""

    def end(self, mixture: _Mixture, rank: int) -> str:
        """End the arrival of a part, whole or not; return what is wrong with the mixture. O(size) for the last one."""
        with mixture.lock:
            mixture.arriving.discard(rank)
            if not mixture.is_complete or mixture.slot.sequence != mixture.sequence or mixture.slot.is_valid:
                return ""
            if mixture.head is None:
                note = mixture.note
                sealed = scripts.ParityNote(
                    name=note.name, step=note.step, start=note.start, ranks=mixture.mix.ranks,
                    world_size=note.world_size, heads="",
                )  # fmt: skip
                scripts.seal_parity(mixture.slot, sealed, mixture.heads)
                return ""
            return self._seal_missing(mixture, mixture.head)

    def _seal_missing(self, mixture: _Mixture, head: scripts.PartHead) -> str:
        slot = mixture.slot
        slot.store_sums(mixture.sequence, head.sums)
        sums = struct.iter_unpack("<I", head.sums)
        for start, (expected,) in zip(range(0, len(slot.data), CHUNK_BYTES), sums, strict=True):
            if zlib.crc32(slot.data[start : start + CHUNK_BYTES]) != expected:
                # Whatever is damaged, the parity or a part, would give the same once more.
                for parity, _ in self._parities(mixture.mix.ranks, mixture.note):
                    scripts.remove_copies(parity.memory.path)
                slot.memory.unlink()
                mixture.sequence = _NO_SEQUENCE
                return f"rank {mixture.mix.missing}'s part does not follow from the others: one of them is damaged"
        slot.seal(head.note)
        return ""

    def _mixture(self, note: scripts.PartNote, mix: Mix) -> _Mixture:
        key = mix.ranks, note.start, mix.missing
        # A removed file takes memory for as long as anything has it mapped.
        self._mixtures = {of: each for of, each in self._mixtures.items() if each.slot.memory.path.exists()}
        found = self._mixtures.get(key)
        if found is not None and found.slot.sequence == found.sequence:
            if found.note.name == note.name:
                return found
            if found.note.age > note.age and not found.slot.is_valid:
                raise Refused(_TOO_LATE)
        stem = (
            scripts.parity_stem(mix.ranks, note.start)
            if mix.missing is None
            else scripts.copy_stem(mix.missing, note.start)
        )
        rivals = [each for each in self._mixtures.values() if each.slot.memory.path.stem == stem]
        with ExitStack() as stack:
            # Their slot is begun again: a chunk of theirs is all in before that, or is refused after it.
            for rival in rivals:
                stack.enter_context(rival.lock)
            made = self._parity(note, mix, stem) if mix.missing is None else self._missing(note, mix, stem)
            for rival in rivals:
                rival.sequence = _NO_SEQUENCE
        self._mixtures[key] = made
        return made

    def _parity(self, note: scripts.PartNote, mix: Mix, stem: str) -> _Mixture:
        slot = self._slot(stem, scripts.parity_layout(mix.num_bytes))
        slot.begin()
        for start in range(0, len(slot.data), CHUNK_BYTES):
            piece = slot.data[start : start + CHUNK_BYTES]
            piece[:] = bytes(len(piece))
        return _Mixture(note, mix, slot, slot.sequence, head=None)

    def _missing(self, note: scripts.PartNote, mix: Mix, stem: str) -> _Mixture:
        assert mix.missing is not None
        for parity, sealed in self._parities(mix.ranks, note):
            head = scripts.head_of(parity, sealed, mix.missing)
            slot = self._slot(stem, Layout.from_json(head.layout))
            if decode_json(scripts.PartNote, head.note).name != note.name or len(head.sums) != slot.sums_bytes:
                raise CorruptCheckpoint(f"{parity.memory.path}: its heads are of another state")
            slot.begin()
            for start in range(0, len(slot.data), CHUNK_BYTES):
                slot.data[start : start + CHUNK_BYTES] = parity.data[start : min(start + CHUNK_BYTES, len(slot.data))]
            return _Mixture(note, mix, slot, slot.sequence, head)
        raise Refused(f"there is no parity of ranks {', '.join(map(str, mix.ranks))}")

    def _parities(self, ranks: tuple[int, ...], note: scripts.PartNote) -> list[tuple[Slot, scripts.ParityNote]]:
        """Return the parities of a state, the newest first."""
        slots = [
            slot for file in self._files.all(scripts.parity_stem(ranks, note.start)) for slot in file.valid_slots()
        ]
        noted = [(slot, scripts.parity_note_of(slot)) for slot in slots]
        return [(slot, sealed) for slot, sealed in noted if sealed is not None and sealed.name == note.name]

    def _slot(self, stem: str, layout: Layout) -> Slot:
        slot = scripts.slot_for(self._files, stem, layout, self._keeps())
        if slot is None:
            raise Refused("it has no room beside what it keeps")
        return slot


def _xor(target: memoryview, source: memoryview) -> None:
    import numpy as np  # loaded by agents that mix alone

    ours, theirs = (np.frombuffer(each, dtype=np.uint8) for each in (target, source))
    for start in range(0, len(ours), _PIECE_BYTES):
        piece = ours[start : start + _PIECE_BYTES]
        np.bitwise_xor(piece, theirs[start : start + _PIECE_BYTES], out=piece)
