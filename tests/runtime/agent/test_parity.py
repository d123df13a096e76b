"""Parts of several ranks that are mixed on another node, over real sockets, and one that is lost is made again."""

from __future__ import annotations

import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from oobleck.control.protocol import CopyDoor, Mix
from oobleck.runtime.agent.copies import CopyPort, NotCopied, Pace, send_part
from oobleck.runtime.agent.parity import Mixer
from oobleck.storage import FlashMemory, Layout, MappedFiles, Slot, TensorSpec, find_slots, memory_files
from oobleck.storage.memory import CHUNK_BYTES
from oobleck.storage.scripts import (
    ANY_PARITY,
    PartHead,
    PartNote,
    find_parts,
    parity_note_of,
    remove_copies,
    state_name,
)
from oobleck.wire import encode_json
from tests.runtime.agent.test_copies import opened

FAST = Pace(1e12)
SIZES = (2 * CHUNK_BYTES + 1000, 64, CHUNK_BYTES)
"""Of the parts of ranks 0, 1 and 2."""
LARGEST = -(-max(SIZES) // 64) * 64
PARITY = Mix(ranks=(0, 1, 2), num_bytes=LARGEST)


class Rank:
    def __init__(self, rank: int, directory: Path) -> None:
        self.rank = rank
        layout = Layout.of({0: [TensorSpec(name=f"weight{rank}", dtype="U8", shape=(SIZES[rank],))]}, metadata={})
        self.memory = FlashMemory.create(directory / f"rank{rank}.1", layout)

    def save(self, step: int) -> Slot:
        slot = self.memory.next_slot()
        slot.begin()
        slot.data[:] = self.data(step)
        slot.seal(encode_json(self.note(step)))
        return slot

    def data(self, step: int) -> bytes:
        pattern = bytes((index * (self.rank + 3) + step) % 251 for index in range(1009))
        return (pattern * (len(self.memory.slots()[0].data) // len(pattern) + 1))[: len(self.memory.slots()[0].data)]

    def note(self, step: int) -> PartNote:
        return PartNote(
            name=state_name(step, "s1-a"), step=step, start="s1-a", rank=self.rank, world_size=4, number=step,
            saved_at="", is_planned=False, shardings=(),
        )  # fmt: skip


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    (tmp_path / "target").mkdir()
    return [Rank(rank, tmp_path) for rank in range(3)]


@pytest.fixture
def kept() -> set[str]:
    return set()


@pytest.fixture
def port(tmp_path: Path, kept: set[str]) -> CopyPort:
    return CopyPort(MappedFiles(tmp_path / "target"), lambda: frozenset(kept))


async def send(slot: Slot, door: CopyDoor, mix: Mix, pace: Pace = FAST) -> None:
    await trio.to_thread.run_sync(send_part, slot, door, pace, mix)


async def mix_all(slots: list[Slot], door: CopyDoor, mix: Mix = PARITY) -> None:
    async with trio.open_nursery() as nursery:
        for slot in slots:
            nursery.start_soon(send, slot, door, mix)


def parities(directory: Path) -> list[int]:
    """The steps whose parities are whole."""
    slots = [slot for path in memory_files(directory, ANY_PARITY) for slot in FlashMemory.open(path).valid_slots()]
    return sorted(note.step for slot in slots if (note := parity_note_of(slot)) is not None)


def copied(directory: Path) -> dict[tuple[int, int], bytes]:
    """The data of each part in memory, verified, keyed by rank and step."""
    return {
        (part.note.rank, part.note.step): b"".join(bytes(view) for _, view in part.read().values())
        for part in find_parts(directory, directory / "none")
    }


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_any_part_follows_from_the_parity_and_the_others(
    ranks: list[Rank], port: CopyPort, tmp_path: Path, lost: int
) -> None:
    async with opened(port) as door:
        for step in (1, 2, 3):
            await mix_all([rank.save(step) for rank in ranks], door)
            assert parities(tmp_path / "target")[-1] == step
        assert parities(tmp_path / "target") == [2, 3], "the oldest gave way"
        others = [rank.memory.valid_slots()[0] for rank in ranks if rank.rank != lost]
        await mix_all(others, door, replace(PARITY, missing=lost))
    found = copied(tmp_path / "target")
    assert found == {(lost, 3): ranks[lost].data(3)[: SIZES[lost]]}
    (part,) = find_parts(tmp_path / "target", tmp_path / "none")
    assert part.note == ranks[lost].note(3)


async def test_parities_take_the_memory_of_two_files_however_often_sizes_change(
    ranks: list[Rank], port: CopyPort, kept: set[str], tmp_path: Path
) -> None:
    async with opened(port) as door:
        for step in range(1, 6):
            mix = replace(PARITY, num_bytes=LARGEST + 4096 * step)
            await mix_all([rank.save(step) for rank in ranks], door, mix)
            assert parities(tmp_path / "target") == [each for each in (step - 1, step) if each]
            kept.clear()
            kept.add(state_name(step, "s1-a"))
    assert len(list((tmp_path / "target").iterdir())) == 4, "two parities, and the heads of each"


@pytest.mark.parametrize("seed", range(3))
def test_a_newer_state_takes_the_place_of_one_that_is_being_mixed(tmp_path: Path, seed: int) -> None:
    """Its sender comes while a chunk of the older one is mixed, in a thread of its own."""
    random = Random(seed)
    mix = Mix(ranks=(0, 1), num_bytes=CHUNK_BYTES)
    layout = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(CHUNK_BYTES,))]}, metadata={})
    mixer = Mixer(MappedFiles(tmp_path), frozenset)
    data = [random.randbytes(CHUNK_BYTES) for _ in range(2)]
    expected = bytes(one ^ other for one, other in zip(*data, strict=True))

    def begin(rank: int, step: int) -> Any:
        note = PartNote(
            name=state_name(step, "s1-a"), step=step, start="s1-a", rank=rank, world_size=2, number=step,
            saved_at="", is_planned=False, shardings=(),
        )  # fmt: skip
        sums = struct.pack("<I", zlib.crc32(data[rank]))
        return mixer.begin(note, PartHead(encode_json(note), layout.to_json(), sums), mix, CHUNK_BYTES)[0]

    def add(mixture: Any, rank: int) -> str:
        return mixer.take(mixture, rank, memoryview(data[rank])) or mixer.end(mixture, rank)

    with ThreadPoolExecutor(1) as pool:
        for step in range(1, 60, 2):
            older = begin(0, step)
            late = pool.submit(add, older, 0)
            time.sleep(random.uniform(0.0, 0.004))
            newer = begin(0, step + 1)
            assert late.result() in ("", "a newer state is mixed there")
            assert add(newer, 0) == add(begin(1, step + 1), 1) == ""
            (slot, *_) = find_slots(tmp_path, ANY_PARITY)
            assert bytes(slot.data[:CHUNK_BYTES]) == expected, f"the parity of step {step + 1}"


async def test_a_part_that_came_half_way_continues_there(ranks: list[Rank], port: CopyPort, tmp_path: Path) -> None:
    first, *others = (rank.save(1) for rank in ranks)
    async with opened(port) as door:
        await mix_all(others, door)
        with trio.move_on_after(0.5), pytest.raises(NotCopied):
            await trio.to_thread.run_sync(send_part, first, door, Breaking(CHUNK_BYTES), PARITY, abandon_on_cancel=True)
        assert parities(tmp_path / "target") == []
        await send(first, door, PARITY)
        assert parities(tmp_path / "target") == [1]
        await send(first, door, PARITY)  # asked for once more, it changes nothing
        await mix_all([first, others[0]], door, replace(PARITY, missing=2))
    assert copied(tmp_path / "target") == {(2, 1): ranks[2].data(1)}


class Breaking(Pace):
    """Ends the sender after some bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(1e12)
        self.left = num_bytes

    def wait(self, num_bytes: int) -> None:
        if self.left <= 0:
            raise OSError("the link is down")
        self.left -= num_bytes


async def test_a_newer_state_takes_the_place_of_an_unfinished_one(
    ranks: list[Rank], port: CopyPort, tmp_path: Path
) -> None:
    old = [rank.save(1) for rank in ranks]
    async with opened(port) as door:
        await mix_all(old[:2], door)
        new = [rank.save(2) for rank in ranks]
        await mix_all(new[:1], door)
        with pytest.raises(NotCopied, match="a newer state is mixed there"):
            await send(old[2], door, PARITY)
        await mix_all(new[1:], door)
        assert parities(tmp_path / "target") == [2]
        await mix_all(new[1:], door, replace(PARITY, missing=0))
    assert copied(tmp_path / "target") == {(0, 2): ranks[0].data(2)[: SIZES[0]]}


async def test_what_is_damaged_makes_no_part(ranks: list[Rank], port: CopyPort, tmp_path: Path) -> None:
    slots = [rank.save(1) for rank in ranks]
    async with opened(port) as door:
        await mix_all(slots, door)
        (path,) = memory_files(tmp_path / "target", ANY_PARITY)
        FlashMemory.open(path).valid_slots()[0].data[CHUNK_BYTES + 7] ^= 1
        await send(slots[1], door, replace(PARITY, missing=0))
        with pytest.raises(NotCopied, match="one of them is damaged"):
            await send(slots[2], door, replace(PARITY, missing=0))
        assert copied(tmp_path / "target") == {}
        assert parities(tmp_path / "target") == [], "it would give the same once more"
        with pytest.raises(NotCopied, match="there is no parity"):
            await send(slots[2], door, replace(PARITY, missing=0))
    assert list((tmp_path / "target").iterdir()) == []


async def test_a_part_that_changed_on_its_way_is_not_mixed(ranks: list[Rank], port: CopyPort, tmp_path: Path) -> None:
    slots = [rank.save(1) for rank in ranks]
    slots[0].sum()
    slots[0].data[2 * CHUNK_BYTES + 5] ^= 1
    async with opened(port) as door:
        await mix_all(slots[1:], door)
        with pytest.raises(NotCopied, match="differ from their checksum"):
            await send(slots[0], door, PARITY)
        slots[0].data[2 * CHUNK_BYTES + 5] ^= 1
        await send(slots[0], door, PARITY)
        await mix_all(slots[1:], door, replace(PARITY, missing=0))
    assert copied(tmp_path / "target") == {(0, 1): ranks[0].data(1)[: SIZES[0]]}


async def test_what_is_kept_is_not_overwritten(
    ranks: list[Rank], port: CopyPort, kept: set[str], tmp_path: Path
) -> None:
    async with opened(port) as door:
        for step in (1, 2):
            await mix_all([rank.save(step) for rank in ranks], door)
        kept |= {state_name(1, "s1-a"), state_name(2, "s1-a")}
        with pytest.raises(NotCopied, match="it has no room beside what it keeps"):
            await send(ranks[0].save(3), door, PARITY)
        kept.discard(state_name(1, "s1-a"))
        await mix_all([rank.save(3) for rank in ranks], door)
    assert parities(tmp_path / "target") == [2, 3]


async def test_a_parity_that_was_removed_is_made_again(ranks: list[Rank], port: CopyPort, tmp_path: Path) -> None:
    slots = [rank.save(1) for rank in ranks]
    async with opened(port) as door:
        await mix_all(slots, door)
        (path,) = memory_files(tmp_path / "target", ANY_PARITY)
        remove_copies(path)
        assert list((tmp_path / "target").iterdir()) == []
        await mix_all(slots, door)
        assert parities(tmp_path / "target") == [1]


async def test_what_is_of_no_group_is_refused(ranks: list[Rank], port: CopyPort) -> None:
    slot = ranks[0].save(1)
    async with opened(port) as door:
        for mix in (replace(PARITY, ranks=(1, 2)), replace(PARITY, missing=0), replace(PARITY, num_bytes=64)):
            with pytest.raises(NotCopied, match="are not of"):
                await send(slot, door, mix)
