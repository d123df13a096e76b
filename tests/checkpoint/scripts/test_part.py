"""Parts in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.checkpoint import FlashMemory, Layout, TensorSpec
from oobleck.checkpoint.scripts import (
    PartNote,
    find_parts,
    is_taken,
    note_of,
    note_taken,
    remove_old,
    state_name,
    write_part,
)
from oobleck.errors import CorruptCheckpoint
from oobleck.wire import encode_json

LAYOUT = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(8,))]}, metadata={})


def note(step: int, *, start: str = "a", rank: int = 0) -> PartNote:
    return PartNote(
        name=state_name(step, start),
        step=step,
        start=start,
        rank=rank,
        world_size=1,
        number=1,
        saved_at=f"{step}",
        is_planned=True,
        shardings=(),
    )


def written(directory: Path, step: int, *, start: str = "a", is_planned: bool = True) -> None:
    data = memoryview(bytearray(bytes([step % 256] * 8).ljust(LAYOUT.size_bytes)))
    write_part(directory, note(step, start=start), LAYOUT, data, is_planned=is_planned)


def test_what_is_written_is_found_with_its_bytes(tmp_path: Path) -> None:
    written(tmp_path, 7)
    (part,) = find_parts(None, tmp_path)
    assert (part.place, part.note) == ("disk", note(7))
    assert bytes(part.read()["weight"][1]) == bytes([7] * 8)


def test_a_file_without_its_note_is_no_part_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    written(tmp_path, 7)
    (said,) = tmp_path.rglob("*.json")
    (file,) = tmp_path.rglob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    (part,) = find_parts(None, tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"rank-00000\.safetensors: changed"):
        part.read()
    file.write_bytes(raw[:-1])
    assert list(find_parts(None, tmp_path)) == [], "cut short"
    written(tmp_path, 7)
    said.unlink()
    assert list(find_parts(None, tmp_path)) == []


def test_a_slot_that_is_being_written_is_no_part_and_the_one_before_is(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "rank0.1", LAYOUT)
    for step in (1, 2):
        slot = memory.next_slot()
        slot.begin()
        slot.data[:8] = bytes([step] * 8)
        slot.seal(encode_json(note(step)))
    memory.next_slot().begin()  # and is killed
    (part,) = find_parts(tmp_path, tmp_path / "none")
    assert (part.place, part.note.step) == ("memory", 2)
    assert bytes(part.read()["weight"][1]) == bytes([2] * 8)


def test_a_slot_may_be_used_again_once_it_is_taken(tmp_path: Path) -> None:
    memory = FlashMemory.create(tmp_path / "rank0.1", LAYOUT)
    slot = memory.next_slot()
    slot.begin()
    slot.seal(encode_json(note(1)))
    assert note_of(slot) == note(1)
    assert not is_taken(slot)
    note_taken(slot)
    assert is_taken(slot)
    later = memory.next_slot()
    later.begin()
    later.seal(encode_json(note(2)))
    assert not is_taken(later)


def steps(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix("step-").lstrip("0") for path in directory.iterdir())


def test_three_planned_states_are_kept_and_others_until_a_start_has_as_many(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        written(tmp_path, step)
    for step in (200, 300):
        written(tmp_path, step, start="b")
        remove_old(tmp_path, start="b")
    assert steps(tmp_path) == ["100.a", "200.a", "200.b", "300.a", "300.b"], "of none of these is it known"
    written(tmp_path, 400, start="b")
    remove_old(tmp_path, start="b")
    assert steps(tmp_path) == ["200.b", "300.b", "400.b"]
    written(tmp_path, 500, start="b")
    remove_old(tmp_path, start="b")
    assert steps(tmp_path) == ["300.b", "400.b", "500.b"]


def test_of_what_was_in_memory_at_an_end_two_steps_are_kept(tmp_path: Path) -> None:
    written(tmp_path, 100)
    for step in (110, 111, 120, 121):
        written(tmp_path, step, is_planned=False)
        remove_old(tmp_path, start="a")
    assert steps(tmp_path) == ["100.a", "120.a.end", "121.a.end"]
