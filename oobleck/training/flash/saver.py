"""Saves a rank's parts into slots of shared memory, or directly to disk where no agent keeps such memory."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from oobleck import storage
from oobleck.errors import CorruptCheckpoint
from oobleck.storage import scripts
from oobleck.training.tensor_bytes import DTYPE_NAMES, as_tensor, no_room
from oobleck.wire import encode_json

from .tensors import Flat

_LOOK_S = 0.001
_LEAST_TREE_BYTES = 1024
_NUM_SLOTS = 2


class MemorySaver:
    """Saves into memory files `<directory>/<stem>.<n>`, which the agent keeps and writes to disk."""

    def __init__(self, directory: Path, local_rank: int, *, num_local: int, room: float) -> None:
        """`num_local` ranks share the directory, each with room for `room` other ranks' states, of sharded ones."""
        self._directory = directory
        self._local_rank = local_rank
        self._num_local = num_local
        self._stem = scripts.memory_stem(local_rank)
        self._room = room
        self._most_slots = scripts.SLOTS_TO_COPY if room else _NUM_SLOTS
        self._memory: storage.FlashMemory | None = None
        self._newest: str | None = None

    def protect(self, name: str) -> None:
        """Keep a state, which all ranks have, until another one is saved."""
        self._newest = name

    def save(self, note: scripts.PartNote, flat: Flat) -> None:
        """Copy a part, and mark it valid. O(size). Raises OSError if there is no memory for it."""
        tree = json.dumps(flat.tree, separators=(",", ":")).encode()
        # A rank that was started again continues in the newest file of the one before.
        if self._memory is None:
            with suppress(StopIteration, CorruptCheckpoint, OSError):
                self._memory = storage.FlashMemory.open(next(iter(storage.memory_files(self._directory, self._stem))))
        kept = scripts.kept_in(self._directory) if self._room else scripts.Kept()
        if self._newest is not None:
            self._forget_others((self._newest, *kept.names))
        memory = self._memory_for(_layout(flat, len(tree), note.rank, self._memory), is_sharded=bool(note.shardings))
        slot = self._slot_of(memory, note, kept)
        _wait_for_agent([slot])
        slot.begin()
        _fill(memory.layout, slot.data, tree, flat)
        slot.seal(encode_json(note))
        self._newest = note.name

    def _memory_for(self, layout: storage.Layout, *, is_sharded: bool) -> storage.FlashMemory:
        wanted = self._most_slots if is_sharded else _NUM_SLOTS
        memory = self._memory
        has = len(memory.slots()) if memory is not None and memory.layout == layout else 0
        if memory is not None and has >= wanted:
            return memory
        for num_slots in dict.fromkeys((wanted, _NUM_SLOTS)):
            if num_slots <= has:
                break
            if num_slots > _NUM_SLOTS and not self._has_room(layout, num_slots):
                continue
            path = storage.next_memory_file(self._directory, self._stem)
            try:
                memory = storage.FlashMemory.create(path, layout, num_slots=num_slots)
                scripts.make_room_for_taken(memory)
                break
            except OSError as error:
                if num_slots == _NUM_SLOTS:
                    raise OSError(error.errno, no_room(self._directory, layout, error, num_slots=num_slots)) from error
        assert memory is not None
        self._memory = memory
        if num_slots < wanted:
            self._most_slots = num_slots
            self._tell_fewer(layout)
        return memory

    def _has_room(self, layout: storage.Layout, num_slots: int) -> bool:
        """Whether all ranks of the node can have this number of slots beside the copies of other nodes' parts."""
        room = shutil.disk_usage(self._directory).free
        for path in storage.memory_files(self._directory, "rank*"):
            with suppress(OSError):  # it is removed
                room += path.stat().st_size if path.stem != self._stem else 0
        own, copied = (storage.FlashMemory.bytes_for(layout, num_slots=each) for each in (num_slots, _NUM_SLOTS))
        return self._num_local * (own + self._room * copied) <= room

    def _tell_fewer(self, layout: storage.Layout) -> None:
        if self._local_rank:
            return
        mib = storage.FlashMemory.bytes_for(layout, num_slots=1) / 2**20
        free = shutil.disk_usage(self._directory).free / 2**20
        sys.stderr.write(
            f"oobleck: sharded states have no copies on other nodes: {self._directory} has no room for "
            f"{scripts.SLOTS_TO_COPY} states of {mib:,.1f} MiB for each rank of this node ({self._num_local}), and for "
            f"copies ({free:,.1f} MiB are free); a container gets more by --shm-size\n"
        )

    def _slot_of(self, memory: storage.FlashMemory, new: scripts.PartNote, kept: scripts.Kept) -> storage.Slot:
        """Choose the slot whose state is needed least."""
        start = new.start
        notes = {slot.number: note for slot in memory.valid_slots() if (note := scripts.note_of(slot)) is not None}
        # Other ranks may not have saved this step once yet: the one before must stay.
        again = next((slot for slot in memory.valid_slots() if slot.holds(new.name)), None)
        if again is not None:
            return again
        own_steps = [note.step for note in notes.values() if note.start == start]
        wanted: int | None = None
        # An order of an earlier generation must not have a state kept that nobody copies.
        if kept.from_step is not None and start.endswith(kept.start):
            wanted = min((step for step in own_steps if step >= kept.from_step), default=None)

        def need(slot: storage.Slot) -> tuple[bool, bool, bool, int]:
            if (note := notes.get(slot.number)) is None:
                return False, False, False, 0
            is_wanted = note.name in kept.names or (note.start == start and note.step == wanted)
            # Never the last state that all ranks may have: another rank may fail before it saves this one.
            return note.name == self._newest, note.name in kept.names[:1], is_wanted, slot.sequence

        return min(memory.slots(), key=need)

    def _forget_others(self, names: Sequence[str]) -> None:
        """Remove all files but the newest, and those that hold the named states."""
        # All ranks have begun the step after the last of these, so no rank needs an older one. As this runs before the
        # next state is written, there are two files after each save (three after the first), however often shapes
        # change.
        for path in storage.memory_files(self._directory, self._stem):
            if self._memory is not None and path == self._memory.path:
                continue
            # A file that cannot be read is of no use.
            with suppress(CorruptCheckpoint, OSError):
                memory = storage.FlashMemory.open(path)
                slots = memory.valid_slots()
                is_needed = any(slot.holds(name) for slot in slots for name in names)
                if not is_needed:
                    _wait_for_agent(slots)
                memory.close()
                if is_needed:
                    continue
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}.taken").unlink(missing_ok=True)


class DiskSaver:
    """Writes every state to the directory before it returns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def protect(self, name: str) -> None:
        """Do nothing, since no save overwrites files."""

    def save(self, note: scripts.PartNote, flat: Flat) -> None:
        """Write a part. O(size). Raises OSError."""
        tree = json.dumps(flat.tree, separators=(",", ":")).encode()
        layout = _layout(flat, len(tree), note.rank, None)
        data = memoryview(bytearray(layout.size_bytes))
        _fill(layout, data, tree, flat)
        scripts.write_part(self._directory, note, layout, data, is_planned=True)
        scripts.remove_old(self._directory, start=note.start)


def _layout(flat: Flat, tree_bytes: int, rank: int, last: storage.FlashMemory | None) -> storage.Layout:
    # The tree gets a reserve, since its numbers become longer, and another layout would need another file.
    room = last.layout.entries[0].spec.size_bytes if last is not None else 0
    if room < tree_bytes:
        room = 1 << max(_LEAST_TREE_BYTES, tree_bytes * 5 // 4).bit_length()
    specs = [storage.TensorSpec(name=scripts.TREE, dtype="U8", shape=(room,))]
    for name, tensor in flat.tensors.items():
        specs.append(storage.TensorSpec(name=name, dtype=DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape)))
    return storage.Layout.of({rank: specs}, metadata={})


def _fill(layout: storage.Layout, data: memoryview, tree: bytes, flat: Flat) -> None:
    first, *entries = layout.entries
    data[: first.stop] = tree.ljust(first.stop)
    with torch.no_grad():
        for entry, tensor in zip(entries, flat.tensors.values(), strict=True):
            if tensor.numel():
                as_tensor(entry.spec, data[entry.offset : entry.stop]).copy_(tensor)


def _wait_for_agent(slots: Iterable[storage.Slot]) -> None:
    """Wait until the agent has copied the states that go to disk."""
    for slot in slots:
        while _is_awaited(slot):
            time.sleep(_LOOK_S)


def _is_awaited(slot: storage.Slot) -> bool:
    """Return whether the agent still has to copy a slot's state."""
    if not slot.is_valid:
        return False
    note = scripts.note_of(slot)
    return note is not None and note.is_planned and not scripts.is_taken(slot)
