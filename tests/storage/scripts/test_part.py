"""Parts in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleck.errors import CorruptCheckpoint
from oobleck.storage import FlashMemory, Layout, TensorSpec
from oobleck.storage.scripts import (
    PartNote,
    find_parts,
    is_taken,
    note_of,
    note_taken,
    remove_old,
    state_name,
    write_part,
)
from oobleck.wire import encode_json

LAYOUT = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(8,))]}, metadata={})


def note(step: int, *, start: str = "a", rank: int = 0) -> PartNote:
    return PartNote(
        name=state_name(step, start),
        step=step,
        start=start,
        rank=rank,
        world_size=2,
        number=1,
        saved_at="",
        is_planned=True,
        shardings=(),
    )


def written(directory: Path, step: int, *, start: str = "a", rank: int = 0, is_planned: bool = True) -> None:
    data = memoryview(bytearray(bytes([step % 256] * 8).ljust(LAYOUT.size_bytes)))
    write_part(directory, note(step, start=start, rank=rank), LAYOUT, data, is_planned=is_planned)


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


def test_a_rank_that_is_far_ahead_leaves_the_newest_state_that_all_have(tmp_path: Path) -> None:
    """Ranks of a script that does not bring them together between its saves."""
    for step in (1, 2):
        written(tmp_path, step, rank=1)
    for step in range(1, 11):
        written(tmp_path, step)
        remove_old(tmp_path, start="a")
    assert steps(tmp_path) == ["1.a", "10.a", "2.a", "8.a", "9.a"]
    for step in range(3, 11):
        written(tmp_path, step, rank=1)
        remove_old(tmp_path, start="a")
        assert any(len(list(path.glob("*.json"))) == 2 for path in tmp_path.iterdir()), "one that all have"
    assert steps(tmp_path) == ["10.a", "8.a", "9.a"]


def test_a_rank_that_ends_far_behind_keeps_what_it_had(tmp_path: Path) -> None:
    for rank, step in ((0, 9), (0, 10), (1, 3), (1, 4)):
        written(tmp_path, step, rank=rank, is_planned=False)
        remove_old(tmp_path, start="a")
    assert steps(tmp_path) == ["10.a.end", "3.a.end", "4.a.end", "9.a.end"]


def test_states_of_a_start_before_stay_while_none_of_this_one_is_whole(tmp_path: Path) -> None:
    written(tmp_path, 100, start="s1-a")
    for step in (200, 300, 400):
        written(tmp_path, step, start="s2-b")
    written(tmp_path, 150, start="s2-b", rank=1)
    remove_old(tmp_path, start="s2-b")
    assert steps(tmp_path) == ["100.s1-a", "150.s2-b", "200.s2-b", "300.s2-b", "400.s2-b"]


def test_what_was_in_memory_is_old_by_its_start_and_not_by_its_name(tmp_path: Path) -> None:
    for start, step in (("s9-b", 500), ("s9-b", 501), ("s10-a", 300), ("s10-a", 301)):
        written(tmp_path, step, start=start, is_planned=False)
        remove_old(tmp_path, start=start)
    assert steps(tmp_path) == ["300.s10-a.end", "301.s10-a.end"]


def test_the_directory_of_a_newer_state_that_another_node_has_just_begun_stays(tmp_path: Path) -> None:
    for step in (7, 8):
        written(tmp_path, step, is_planned=False)
    for step in (6, 9):
        (tmp_path / f"{state_name(step, 'a')}.end").mkdir()
    remove_old(tmp_path, start="a")
    assert steps(tmp_path) == ["7.a.end", "8.a.end", "9.a.end"]


def test_a_part_is_written_though_its_directory_is_removed_meanwhile(tmp_path: Path, monkeypatch) -> None:
    """By another rank that is far ahead and finds the directory empty."""
    made = Path.mkdir

    def mkdir(self: Path, *arguments: object, **named: object) -> None:
        made(self, *arguments, **named)  # type: ignore[arg-type]
        if removals:
            removals.pop()
            self.rmdir()

    removals = [1]
    monkeypatch.setattr(Path, "mkdir", mkdir)
    written(tmp_path, 7)
    assert steps(tmp_path) == ["7.a"]
