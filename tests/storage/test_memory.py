"""Slots: which is valid, which is newest, and what happens to broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import CorruptCheckpoint
from oobleck.storage import (
    FlashMemory,
    Layout,
    MappedFiles,
    Slot,
    TensorSpec,
    find_slots,
    memory_files,
    next_memory_file,
)
from oobleck.storage.layout import ALIGNMENT_BYTES, DTYPE_BYTES
from oobleck.storage.memory import CHUNK_BYTES

LAYOUT = Layout.of({3: [TensorSpec(name="w", dtype="F32", shape=(10, 3))]}, metadata={"config": "{}"})

specs = st.builds(
    TensorSpec,
    name=st.text(min_size=1, max_size=8),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
layouts = st.builds(
    Layout.of,
    st.dictionaries(st.integers(0, 9), st.lists(specs, max_size=4), max_size=4),
    metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2),
)


def fill(slot: Slot, byte: int, note: bytes = b"note") -> None:
    slot.begin()
    slot.data[:] = bytes([byte]) * len(slot.data)
    slot.seal(note)
    slot.sum()


@given(layouts)
def test_a_layout_survives_its_json(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout


@given(layouts)
def test_tensors_are_aligned_and_do_not_overlap(layout: Layout) -> None:
    stop = 0
    for entry in layout.entries:
        assert entry.offset % ALIGNMENT_BYTES == 0
        assert entry.offset >= stop
        stop = entry.stop
    assert stop <= layout.size_bytes
    assert [entry for layer in layout.layers for entry in layout.entries_of(layer)] == list(layout.entries)


@given(st.binary(max_size=60))
def test_nonsense_is_no_layout(raw: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        Layout.from_json(raw)


def test_another_process_reads_what_was_sealed(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "m.1", LAYOUT)
    assert FlashMemory.open(tmp_path / "m.1").valid_slots() == ()
    fill(memory.next_slot(), 7)
    (slot,) = FlashMemory.open(tmp_path / "m.1").valid_slots()
    slot.verify()
    assert (slot.note, slot.sequence, bytes(slot.data)) == (b"note", 1, b"\x07" * LAYOUT.size_bytes)
    assert slot.memory.layout == LAYOUT


def test_the_newest_valid_slot_is_never_written(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "m.1", LAYOUT)
    for count in range(1, 6):
        newest = memory.valid_slots()[:1]
        slot = memory.next_slot()
        assert slot.number not in [other.number for other in newest]
        slot.begin()
        slot.data[:] = b"x" * len(slot.data)
        assert [other.number for other in memory.valid_slots()[:1]] == [other.number for other in newest]
        slot.seal(str(count).encode())
        assert memory.valid_slots()[0].note == str(count).encode()


def test_a_slot_that_was_not_sealed_is_written_again(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "m.1", LAYOUT)
    fill(memory.next_slot(), 1)
    torn = memory.next_slot()
    torn.begin()
    assert not torn.is_valid
    assert memory.next_slot().number == torn.number


@given(position=st.integers(0, 2 * CHUNK_BYTES + 100), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_data_is_found(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "flip.1"
    if not path.exists():
        layout = Layout.of({0: [TensorSpec(name="w", dtype="U8", shape=(2 * CHUNK_BYTES + 101,))]}, metadata={})
        fill(FlashMemory.create(path, layout).next_slot(), 5)
    (slot,) = FlashMemory.open(path).valid_slots()
    slot.data[position] ^= 1 << bit
    try:
        with pytest.raises(CorruptCheckpoint, match="bytes"):
            slot.verify()
    finally:
        slot.data[position] ^= 1 << bit
    slot.verify()


@given(cut=st.integers(1, 5000))
def test_a_file_that_was_cut_off_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    directory = tmp_path_factory.mktemp("cut")
    fill(FlashMemory.create(directory / "m.1", LAYOUT).next_slot(), 1)
    whole = (directory / "m.1").read_bytes()
    (directory / "m.1").write_bytes(whole[:-cut])
    assert find_slots(directory, "m") == ()


@given(position=st.integers(0, 4096 + 200), byte=st.integers(1, 255))
def test_a_changed_head_is_never_misread(tmp_path_factory: pytest.TempPathFactory, position: int, byte: int) -> None:
    directory = tmp_path_factory.mktemp("head")
    fill(FlashMemory.create(directory / "m.1", LAYOUT).next_slot(), 1)
    raw = bytearray((directory / "m.1").read_bytes())
    raw[position] ^= byte
    (directory / "m.1").write_bytes(raw)
    for slot in find_slots(directory, "m"):
        assert slot.memory.layout == LAYOUT, "only bytes without a meaning were changed"
        slot.verify()


def test_slots_of_all_files_are_found_the_newest_file_first(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        path = next_memory_file(tmp_path, "m") if number < 10 else tmp_path / "m.10"
        fill(FlashMemory.create(path, LAYOUT).next_slot(), number, str(number).encode())
    (tmp_path / "m.3").write_bytes(b"nonsense")
    (tmp_path / "other.4").write_bytes(b"")
    assert [slot.note for slot in find_slots(tmp_path, "m")] == [b"10", b"2", b"1"]
    assert next_memory_file(tmp_path, "m").name == "m.11"
    assert memory_files(tmp_path / "nowhere", "m") == ()


def test_too_little_memory_is_said_at_once(tmp_path: Path) -> None:
    huge = Layout.of({0: [TensorSpec(name="w", dtype="F64", shape=(1 << 58,))]}, metadata={})
    with pytest.raises((OSError, OverflowError)):
        FlashMemory.create(tmp_path / "m.1", huge)
    assert memory_files(tmp_path, "m") == ()


def test_the_data_of_a_save_is_whole_before_its_sums_are_there(tmp_path: Path) -> None:
    slot = FlashMemory.create(tmp_path / "m.1", LAYOUT).next_slot()
    slot.begin()
    slot.data[:] = b"a" * len(slot.data)
    slot.seal(b"note")
    assert slot.is_valid
    assert slot.sums is None
    slot.verify()
    slot.sum()
    slot.data[3] ^= 1
    with pytest.raises(CorruptCheckpoint, match="bytes 0 to"):
        slot.verify()


def test_sums_of_older_data_are_not_taken_for_those_of_newer(tmp_path: Path) -> None:
    slot = FlashMemory.create(tmp_path / "m.1", LAYOUT, num_slots=1).next_slot()
    fill(slot, 1)
    old, sums = slot.sequence, slot.sums
    assert sums is not None
    slot.begin()
    slot.data[:] = b"b" * len(slot.data)
    slot.seal(b"newer")
    slot.store_sums(old, sums)  # by an agent that has read the data before
    assert slot.sums is None
    slot.verify()


def test_a_file_has_as_many_slots_as_it_was_made_with(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "m.1", LAYOUT, num_slots=4)
    for count in range(1, 8):
        fill(memory.next_slot(), count, str(count).encode())
        kept = [slot.note for slot in FlashMemory.open(memory.path).valid_slots()]
        assert kept == [str(each).encode() for each in range(count, max(0, count - 4), -1)]
    assert memory.path.stat().st_size == FlashMemory.bytes_for(LAYOUT, num_slots=4)


def test_a_slot_can_be_read_after_its_file_is_gone(tmp_path: Path) -> None:
    """A thread may be about to sum it when its writer has begun another file."""
    slot = FlashMemory.create(tmp_path / "rank0.1", LAYOUT, num_slots=2).next_slot()
    slot.begin()
    slot.seal(b"{}")
    files = MappedFiles(tmp_path)
    ((slot,),) = (memory.valid_slots() for memory in files.all("rank0"))
    (tmp_path / "rank0.1").unlink()
    assert files.all("rank0") == ()
    slot.sum()
    slot.verify()
