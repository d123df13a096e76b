"""Parts of states from one node's memory to another's, over real sockets."""

from __future__ import annotations

import gc
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.protocol import CopyDoor
from oobleck.errors import CorruptCheckpoint
from oobleck.runtime.agent.copies import MOST_SENDERS, CopyPort, NotCopied, Pace, send_part
from oobleck.storage import FlashMemory, Layout, MappedFiles, Slot, TensorSpec, find_slots
from oobleck.storage.memory import CHUNK_BYTES
from oobleck.storage.scripts import PartNote, find_parts, state_name
from oobleck.wire import encode_json
from tests.examples import examples

FAST = Pace(1e12)
SIZE = CHUNK_BYTES + 1000


def layout(size: int) -> Layout:
    return Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(size,))]}, metadata={})


def note(step: int, rank: int = 3) -> PartNote:
    return PartNote(
        name=state_name(step, "s1-a"), step=step, start="s1-a", rank=rank, world_size=4, number=step, saved_at="",
        is_planned=False, shardings=(),
    )  # fmt: skip


def save(memory: FlashMemory, step: int, *, rank: int = 3) -> Slot:
    slot = memory.next_slot()
    slot.begin()
    slot.data[:] = bytes([step]) * len(slot.data)
    slot.seal(encode_json(note(step, rank)))
    return slot


@pytest.fixture
def source(tmp_path: Path) -> FlashMemory:
    (tmp_path / "target").mkdir()
    return FlashMemory.create(tmp_path / "rank0.1", layout(SIZE))


@asynccontextmanager
async def receiving(directory: Path, *kept: str) -> AsyncIterator[CopyDoor]:
    async with opened(CopyPort(MappedFiles(directory), lambda: frozenset(kept))) as door:
        yield door


@asynccontextmanager
async def opened(port: CopyPort) -> AsyncIterator[CopyDoor]:
    door = await port.listen("node1", "127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(port.run)
        yield door
        nursery.cancel_scope.cancel()


async def send(slot: Slot, door: CopyDoor, pace: Pace = FAST) -> None:
    await trio.to_thread.run_sync(send_part, slot, door, pace)


async def test_a_copy_has_the_part_and_its_checksums(source: FlashMemory, tmp_path: Path) -> None:
    async with receiving(tmp_path / "target") as door:
        for step in (1, 2, 3):
            await send(save(source, step), door)
    parts = sorted(find_parts(tmp_path / "target", tmp_path / "none"), key=lambda part: part.note.step)
    assert [part.note for part in parts] == [note(2), note(3)], "the oldest gave way"
    assert bytes(parts[1].read()["weight"][1]) == bytes([3]) * SIZE
    for slot in find_slots(tmp_path / "target", "rank*"):
        slot.data[SIZE - 1] ^= 1
        with pytest.raises(CorruptCheckpoint):
            slot.verify()


async def test_a_state_that_is_to_be_kept_is_not_overwritten(source: FlashMemory, tmp_path: Path) -> None:
    async with receiving(tmp_path / "target", state_name(1, "s1-a")) as door:
        for step in (1, 2, 3):
            await send(save(source, step), door)
    steps = [part.note.step for part in find_parts(tmp_path / "target", tmp_path / "none")]
    assert sorted(steps) == [1, 3]


@examples(20)
@given(st.lists(st.sampled_from([SIZE, SIZE + 4096, 1000]), min_size=1, max_size=8), st.booleans())
def test_copies_take_the_memory_of_two_files_however_often_sizes_change(sizes: list[int], keeps: bool) -> None:
    kept: set[str] = set()

    async def copy_all(directory: Path) -> None:
        (directory / "target").mkdir()
        async with opened(CopyPort(MappedFiles(directory / "target"), lambda: frozenset(kept))) as door:
            for step, size in enumerate(sizes, 1):
                await send(save(FlashMemory.create(directory / f"rank0.{step}", layout(size)), step), door)
                assert len(list((directory / "target").iterdir())) <= 2
                left = {part.note.step for part in find_parts(directory / "target", directory / "none")}
                assert left >= {step, *(each for each in (step - 1,) if each and keeps)}
                if keeps:
                    kept.clear()
                    kept.add(state_name(step, "s1-a"))

    with TemporaryDirectory() as directory:
        trio.run(copy_all, Path(directory))


async def test_a_part_that_changed_in_memory_or_on_its_way_becomes_no_copy(source: FlashMemory, tmp_path: Path) -> None:
    slot = save(source, 1)
    slot.sum()
    slot.data[CHUNK_BYTES + 5] ^= 1
    async with receiving(tmp_path / "target") as door:
        with pytest.raises(NotCopied):
            await send(slot, door)
    assert list(find_parts(tmp_path / "target", tmp_path / "none")) == []


async def test_a_part_that_is_overwritten_while_it_is_sent_becomes_no_copy(source: FlashMemory, tmp_path: Path) -> None:
    slot = save(source, 1)
    async with receiving(tmp_path / "target") as door, trio.open_nursery() as nursery:

        async def overwrite() -> None:
            await trio.sleep(0.1)
            slot.begin()
            slot.data[:] = bytes(len(slot.data))

        nursery.start_soon(overwrite)
        with pytest.raises(NotCopied) as raised:
            await send(slot, door, Pace(CHUNK_BYTES / 0.2))
    assert raised.value.is_gone
    assert list(find_parts(tmp_path / "target", tmp_path / "none")) == []


@pytest.mark.parametrize("closed_s", [0.0, 0.1])
async def test_a_node_that_leaves_takes_no_copy_also_none_that_is_under_way(
    source: FlashMemory, tmp_path: Path, closed_s: float
) -> None:
    port = CopyPort(MappedFiles(tmp_path / "target"), frozenset)
    async with opened(port) as door, trio.open_nursery() as nursery:

        async def close() -> None:
            await trio.sleep(closed_s)
            port.close()

        if closed_s:
            nursery.start_soon(close)
        else:
            port.close()
        with pytest.raises(NotCopied, match="its node leaves"):
            await send(save(source, 1), door, Pace(CHUNK_BYTES / 0.2))
    assert list(find_parts(tmp_path / "target", tmp_path / "none")) == []


async def test_only_the_run_can_bring_copies_and_junk_keeps_none_away(source: FlashMemory, tmp_path: Path) -> None:
    slot = save(source, 1)
    async with receiving(tmp_path / "target") as door:
        for _ in range(50):
            with socket.create_connection((door.host, door.port)) as junk:
                junk.sendall(secrets.token_bytes(200))
        with pytest.raises(NotCopied, match="does not belong to the run"):
            await send(slot, replace(door, ticket=bytes(32)))
        assert list((tmp_path / "target").iterdir()) == []
        await send(slot, door)
    (part,) = find_parts(tmp_path / "target", tmp_path / "none")
    assert part.note == note(1)


async def test_an_address_of_another_machine_leaves_no_socket_open(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        await CopyPort(MappedFiles(tmp_path), frozenset).listen("node1", "192.0.2.1")
    gc.collect()  # which warns of an open socket


async def test_a_node_without_memory_refuses_before_the_first_byte(tmp_path: Path) -> None:
    source = FlashMemory.create(tmp_path / "rank0.1", layout(100))
    async with receiving(tmp_path / "nowhere") as door:
        with pytest.raises(NotCopied, match="No such file") as raised:
            await send(save(source, 1), door)
    assert not raised.value.is_gone


async def test_copies_keep_to_their_rate(source: FlashMemory, tmp_path: Path) -> None:
    slot = save(source, 1)
    pace = Pace(SIZE / 0.25)
    async with receiving(tmp_path / "target") as door:
        began_s = time.monotonic()
        for _ in range(3):
            await send(slot, door, pace)
    assert time.monotonic() - began_s >= 0.6, "one burst of 0.05 s is not counted"


@examples(50)
@given(st.floats(1e3, 1e13))
def test_no_sender_is_silent_for_long_at_any_rate(bytes_per_s: float) -> None:
    piece_bytes = Pace(bytes_per_s).piece_bytes
    assert 0 < piece_bytes <= CHUNK_BYTES
    assert MOST_SENDERS * piece_bytes / bytes_per_s < 5, "seconds until all others have had their turns"
    assert piece_bytes == CHUNK_BYTES or bytes_per_s < 1e7, "large pieces are faster"


@pytest.mark.slow
async def test_copies_at_a_low_rate_arrive(tmp_path: Path) -> None:
    """One piece of each sender would take longer than a receiver waits."""
    (tmp_path / "target").mkdir()
    pace, size = Pace(100e3), 700_000
    async with receiving(tmp_path / "target") as door, trio.open_nursery() as nursery:
        for rank in range(MOST_SENDERS):
            slot = save(FlashMemory.create(tmp_path / f"rank{rank}.1", layout(size)), 1, rank=rank)
            nursery.start_soon(send, slot, door, pace)
    found = find_parts(tmp_path / "target", tmp_path / "none")
    assert {part.note.rank for part in found} == set(range(MOST_SENDERS))


async def test_a_state_that_is_not_wanted_takes_the_place_of_none_that_is_kept(
    source: FlashMemory, tmp_path: Path
) -> None:
    """Another master may have asked for it, and be gone."""
    async with receiving(tmp_path / "target", *(state_name(step, "s1-a") for step in (1, 2))) as door:
        for step in (1, 2):
            await send(save(source, step), door)
        with pytest.raises(NotCopied, match="no room beside what it keeps"):
            await send(save(source, 3), door)
    parts = find_parts(tmp_path / "target", tmp_path / "none")
    assert sorted(part.note.step for part in parts) == [1, 2]
