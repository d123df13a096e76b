"""A process's newest states in shared memory: slots, so that a kill at any byte leaves an older state whole.

The file is in a memory file system, so it outlives the worker and its agent, until the machine ends.

    page 0        magic, version, sizes, a checksum of them and of the layout
    layout        JSON, see `Layout`
    slot headers  state, sequence, the writer's note (JSON), a checksum of these; then the sequence that the sums belong
                  to, their checksum, and the sums: a checksum of every chunk of data
    slot data     for each slot the same size

A slot is EMPTY, WRITING or VALID. A save renames and moves nothing, so it costs only a copy: a slot is valid once its
data is whole, and any process may add the sums later. No reader trusts data that differs from its sums.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import CorruptCheckpoint

from .layout import Layout

CHUNK_BYTES = 4 << 20

_PAGE = 4096
_MAGIC = b"OOBLECK\x00"
_VERSION = 2
_HEAD = struct.Struct("<8sIIQII")  # magic, version, bytes of the layout, bytes of a slot's data, slots, checksum
_SLOT = struct.Struct("<QQII")  # state, sequence, bytes of the note, checksum
_SUMS = struct.Struct("<QI")  # the sequence of the data, a checksum of it and of the sums that follow
_NUM_SLOTS = 2
_MOST_SLOTS = 16
_WRITING, _VALID = 1, 2  # states of a slot; a new file's zeros are EMPTY
_MAX_NOTE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The offsets in a file, which follow from the sizes of its layout and its data."""

    layout_bytes: int
    data_bytes: int
    num_slots: int

    @property
    def num_chunks(self) -> int:
        return -(-self.data_bytes // CHUNK_BYTES)

    @property
    def slot_header_bytes(self) -> int:
        return _pages(_SLOT.size + _MAX_NOTE_BYTES + _SUMS.size + 4 * self.num_chunks)

    def header(self, slot: int) -> int:
        return _PAGE + _pages(self.layout_bytes) + slot * self.slot_header_bytes

    def data(self, slot: int) -> int:
        return self.header(self.num_slots) + slot * _pages(self.data_bytes)

    @property
    def total_bytes(self) -> int:
        return self.data(self.num_slots)


class FlashMemory:
    """A mapped file of slots. One process writes; any may read."""

    def __init__(self, path: Path, mapped: mmap.mmap, layout: Layout, sizes: _Sizes) -> None:
        self.path = path
        self.layout = layout
        self._map = mapped
        self._sizes = sizes

    @classmethod
    def create(cls, path: Path, layout: Layout, *, num_slots: int = _NUM_SLOTS) -> FlashMemory:
        """Create a file with empty slots; O(size), with the page faults. Raises OSError if memory is short."""
        raw = layout.to_json()
        sizes = _Sizes(len(raw), layout.size_bytes, num_slots)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Without this a later store would be killed by SIGBUS if memory is short.
            os.posix_fallocate(descriptor, 0, sizes.total_bytes)
            mapped = mmap.mmap(descriptor, sizes.total_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        # Touch every page, so that the first save meets no page fault; in pieces, so that other threads get their turn.
        for start in range(0, len(mapped), CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, len(mapped))
            mapped[start:stop:_PAGE] = bytes((stop - start) // _PAGE)
        mapped[_PAGE : _PAGE + len(raw)] = raw
        checksum = zlib.crc32(raw, zlib.crc32(_sizes_text(sizes)))
        # The head comes last: a file whose writer was killed before has no magic, and readers pass over it.
        mapped[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, len(raw), sizes.data_bytes, num_slots, checksum)
        return cls(path, mapped, layout, sizes)

    @staticmethod
    def bytes_for(layout: Layout, *, num_slots: int = _NUM_SLOTS) -> int:
        return _Sizes(len(layout.to_json()), layout.size_bytes, num_slots).total_bytes

    @classmethod
    def open(cls, path: Path) -> FlashMemory:
        """Map an existing file. Raises CorruptCheckpoint if it is not whole, OSError if there is none."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            if size < _PAGE:
                raise CorruptCheckpoint(f"{path}: {size} bytes are too few")
            mapped = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        try:
            layout, sizes = _read_head(path, mapped, size)
        except CorruptCheckpoint:
            mapped.close()
            raise
        return cls(path, mapped, layout, sizes)

    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(self, number) for number in range(self._sizes.num_slots))

    def valid_slots(self) -> tuple[Slot, ...]:
        """Return the slots with valid headers, the newest first; does not read their data."""
        return tuple(sorted((slot for slot in self.slots() if slot.is_valid), key=lambda slot: -slot.sequence))

    def next_slot(self) -> Slot:
        """Return the slot to write next: never the newest valid one."""
        return min(self.slots(), key=lambda slot: slot.sequence if slot.is_valid else 0)

    def close(self) -> None:
        with suppress(BufferError):  # views by tensors keep it mapped until they are gone
            self._map.close()

    def unlink(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()


class Slot:
    """One state."""

    def __init__(self, memory: FlashMemory, number: int) -> None:
        self.memory = memory
        self.number = number
        self._start = memory._sizes.header(number)

    @property
    def sequence(self) -> int:
        """Counts the saves of a file, from 1."""
        return int(_SLOT.unpack_from(self.memory._map, self._start)[1])

    @property
    def is_valid(self) -> bool:
        """Whether the slot is marked valid and its header is whole."""
        state, _, _, checksum = self._fields()
        return state == _VALID and self._checksum() == checksum

    @property
    def note(self) -> bytes:
        return bytes(memoryview(self.memory._map)[self._note_start : self._note_start + self._fields()[2]])

    def holds(self, name: str) -> bool:
        """Whether the writer's note names the state so."""
        return f'"{name}"'.encode() in self.note  # quoted, so that no longer name contains it

    @property
    def offset(self) -> int:
        """Where its data begins in the file."""
        return self.memory._sizes.data(self.number)

    @property
    def data(self) -> memoryview:
        return memoryview(self.memory._map)[self.offset : self.offset + self.memory._sizes.data_bytes]

    def begin(self) -> None:
        """Mark the slot as being written, before its first byte is."""
        # The sequence changes as well, by which a reader notices that the slot was overwritten under it.
        sequence = max(slot.sequence for slot in self.memory.slots()) + 1
        _SLOT.pack_into(self.memory._map, self._start, _WRITING, sequence, 0, 0)

    def seal(self, note: bytes) -> None:
        """Mark the slot valid, once its data is whole."""
        assert self._fields()[0] == _WRITING, self._fields()
        assert len(note) <= _MAX_NOTE_BYTES, len(note)
        mapped = self.memory._map
        mapped[self._note_start : self._note_start + len(note)] = note
        sequence = self.sequence
        # The length of the note is stored first, because `_checksum` reads it from the slot.
        _SLOT.pack_into(mapped, self._start, _WRITING, sequence, len(note), 0)
        _SLOT.pack_into(mapped, self._start, _WRITING, sequence, len(note), self._checksum())
        # The state comes last, once all that it vouches for is there. A kill preserves this order of stores.
        struct.pack_into("<Q", mapped, self._start, _VALID)

    def sum(self) -> None:
        """Store the data's checksums, unless the slot is written meanwhile; O(size), so not for a training thread."""
        sequence = self.sequence
        sums = []
        for chunk in _chunks(self.data):
            sums.append(zlib.crc32(chunk))
            if self.sequence != sequence:
                return
        self.store_sums(sequence, struct.pack(f"<{len(sums)}I", *sums))

    @property
    def sums_bytes(self) -> int:
        return 4 * self.memory._sizes.num_chunks

    @property
    def sums(self) -> bytes | None:
        """The checksums of the data's chunks; None if they are not there, or are those of older data."""
        sequence, checksum = _SUMS.unpack_from(self.memory._map, self._sums_start)
        start = self._sums_start + _SUMS.size
        sums = bytes(memoryview(self.memory._map)[start : start + self.sums_bytes])
        return sums if (sequence, checksum) == (self.sequence, _checksum_of_sums(sequence, sums)) else None

    def store_sums(self, sequence: int, sums: bytes) -> None:
        """Store the checksums of the data that has this sequence. Only one process may do so at a time."""
        mapped, start = self.memory._map, self._sums_start + _SUMS.size
        mapped[start : start + len(sums)] = sums
        # Their own sequence shows readers whether the slot was written meanwhile, and has other data.
        _SUMS.pack_into(mapped, self._sums_start, sequence, _checksum_of_sums(sequence, sums))

    def verify(self) -> None:
        """Compare the data with its checksums, if it has them; O(size). Raises CorruptCheckpoint."""
        if not self.is_valid:
            raise CorruptCheckpoint(f"{self.memory.path}: slot {self.number} is not valid")
        if (sums := self.sums) is None:
            return
        for index, (chunk, (expected,)) in enumerate(
            zip(_chunks(self.data), struct.iter_unpack("<I", sums), strict=True)
        ):
            if zlib.crc32(chunk) != expected:
                raise CorruptCheckpoint(
                    f"{self.memory.path}: slot {self.number} has changed within bytes "
                    f"{index * CHUNK_BYTES} to {index * CHUNK_BYTES + len(chunk)}"
                )

    @property
    def _note_start(self) -> int:
        return self._start + _SLOT.size

    @property
    def _sums_start(self) -> int:
        return self._note_start + _MAX_NOTE_BYTES

    def _fields(self) -> tuple[int, int, int, int]:
        # A slot that is not valid may have any number here, and must not send readers out of the map.
        state, sequence, note_bytes, checksum = _SLOT.unpack_from(self.memory._map, self._start)
        return state, sequence, min(note_bytes, _MAX_NOTE_BYTES), checksum

    def _checksum(self) -> int:
        # It covers the sequence and the note, but not the state, which changes after it.
        _, sequence, note_bytes, _ = self._fields()
        note = memoryview(self.memory._map)[self._note_start : self._note_start + note_bytes]
        return zlib.crc32(note, zlib.crc32(struct.pack("<QI", sequence, note_bytes)))


class MappedFiles:
    """The memory files of a directory, each mapped once: every new mapping costs a page fault for each page."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._mapped: dict[Path, FlashMemory] = {}

    def all(self, stem: str) -> tuple[FlashMemory, ...]:
        """Return the unbroken files `<stem>.<n>`, newest first. Any thread may call this."""
        with self._lock:
            for gone in [path for path in self._mapped if not path.exists()]:
                del self._mapped[gone]  # and not closed: a thread may be about to read it
            paths = memory_files(self.directory, stem)
            for path in paths:
                # Its writer may be creating it at this moment, and then the next look finds it.
                with suppress(CorruptCheckpoint, OSError):
                    self._mapped[path] = self._mapped.get(path) or FlashMemory.open(path)
            return tuple(self._mapped[path] for path in paths if path in self._mapped)

    def create(self, stem: str, layout: Layout, *, num_slots: int) -> FlashMemory:
        """Create the next file of a stem; O(size). Raises OSError if memory is short."""
        path = next_memory_file(self.directory, stem)
        memory = FlashMemory.create(path, layout, num_slots=num_slots)
        with self._lock:
            self._mapped[path] = memory  # this mapping, because all its pages are there
        return memory


def find_slots(directory: Path, stem: str) -> tuple[Slot, ...]:
    """Return all valid slots of the unbroken files `<stem>.<n>` in a directory, newest file first."""
    # A writer begins a new file when its layout changes, and the old one stays until the new one has a state.
    slots: list[Slot] = []
    for path in memory_files(directory, stem):
        with suppress(CorruptCheckpoint, OSError):
            slots.extend(FlashMemory.open(path).valid_slots())
    return tuple(slots)


def memory_files(directory: Path, stem: str) -> tuple[Path, ...]:
    """Return the files `<stem>.<n>` in a directory, which need not exist, newest first."""
    files = [path for path in directory.glob(f"{stem}.*") if path.suffix[1:].isdecimal()]
    return tuple(sorted(files, key=_number, reverse=True))


def next_memory_file(directory: Path, stem: str) -> Path:
    files = memory_files(directory, stem)
    return directory / f"{stem}.{_number(files[0]) + 1 if files else 1}"


def _number(path: Path) -> int:
    return int(path.suffix[1:])


def _read_head(path: Path, mapped: mmap.mmap, size: int) -> tuple[Layout, _Sizes]:
    magic, version, layout_bytes, data_bytes, num_slots, checksum = _HEAD.unpack_from(mapped, 0)
    sizes = _Sizes(layout_bytes, data_bytes, num_slots)
    is_known = magic == _MAGIC and version == _VERSION and 0 < num_slots <= _MOST_SLOTS
    if not is_known or sizes.total_bytes != size:
        raise CorruptCheckpoint(f"{path}: not a memory file of this version, or not whole")
    raw = mapped[_PAGE : _PAGE + layout_bytes]
    if zlib.crc32(raw, zlib.crc32(_sizes_text(sizes))) != checksum:
        raise CorruptCheckpoint(f"{path}: its layout has changed")
    return Layout.from_json(raw), sizes


def _sizes_text(sizes: _Sizes) -> bytes:
    return struct.pack("<QQI", sizes.layout_bytes, sizes.data_bytes, sizes.num_slots)


def _checksum_of_sums(sequence: int, sums: bytes) -> int:
    return zlib.crc32(sums, zlib.crc32(struct.pack("<Q", sequence)))


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
