"""What an agent writes of the states that its ranks leave in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import trio

from oobleck.control.protocol import PartNotWritten, StatesHeld
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.agent.checkpoint_store import NodeCheckpoints
from oobleck.runtime.agent.rank_states import RankStates
from oobleck.runtime.files import AgentDir
from oobleck.storage import FlashMemory, Layout, TensorSpec
from oobleck.storage.scripts import PartNote, Sharding, find_parts, is_taken, memory_stem, state_name
from oobleck.wire import encode_json

LAYOUT = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(8,))]}, metadata={})
LARGER = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(12,))]}, metadata={})
CUT = Sharding(device="cpu", mesh=(2,), cut=(0,))


class Node:
    """A node's memory and disk, and what its agent does for them."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.directory = AgentDir(f"test-{uuid4().hex[:8]}", "node0")
        self.states = RankStates(NodeCheckpoints(self.directory, default_directory=disk))
        self.states.open(RanksSpec(tag="t", entry="script", command=("train.py",), directory="/"))
        self.memory = FlashMemory.create(self.directory.memory / f"{memory_stem(0)}.1", LAYOUT)

    def save(self, step: int, *, is_planned: bool = False, is_cut: bool = False, again: int = 0) -> None:
        note = PartNote(
            name=state_name(step, "a"),
            step=step,
            start="a",
            rank=0,
            world_size=2,
            number=step + again,
            saved_at=f"{step:04d}",
            is_planned=is_planned,
            shardings=(CUT,) if is_cut else (),
        )
        slot = self.memory.next_slot()
        slot.begin()
        slot.data[:] = bytes([step + again] * len(slot.data))
        slot.seal(encode_json(note))

    def written(self) -> dict[str, bytes]:
        """By the name of its directory, what of each state is on disk."""
        found = {}
        for part in find_parts(None, self.disk):
            (path,) = self.disk.glob(f"{part.note.name}*")
            found[path.name] = bytes(part.read()["weight"][1])
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "disk")
    yield made
    shutil.rmtree(made.directory.memory.parent, ignore_errors=True)


async def test_a_planned_state_is_written_and_its_slot_may_be_used_again(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        node.save(1)
        node.save(2, is_planned=True)
        with trio.fail_after(10):
            while not node.written():  # noqa: ASYNC110  nothing tells
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert node.written() == {"step-00000002.a": bytes([2] * 8)}
    assert is_taken(node.memory.valid_slots()[0])


async def test_a_step_that_is_saved_again_is_written_again(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        node.save(1)
        await node.states.keep(is_planned=False, is_last=True)
        node.save(1, again=7)
        await node.states.keep(is_planned=False, is_last=True)
        nursery.cancel_scope.cancel()
    assert node.written() == {"step-00000001.a.end": bytes([8] * 8)}


@pytest.mark.parametrize("is_planned", [False, True])
async def test_the_later_save_of_a_step_is_the_one_on_disk_where_its_shape_is_another(
    node: Node, is_planned: bool
) -> None:
    """A state of another shape is in another file, and so both saves are in memory."""
    node.save(9)
    node.save(10, is_planned=is_planned)
    node.memory = FlashMemory.create(node.directory.memory / f"{memory_stem(0)}.2", LARGER)
    node.save(10, again=1, is_planned=is_planned)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        await node.states.keep(is_planned=is_planned, is_last=True)
        nursery.cancel_scope.cancel()
    (newest,) = [data for name, data in node.written().items() if name.startswith("step-00000010")]
    assert newest == bytes([11] * 12)


async def test_what_is_in_memory_when_ranks_end_is_written(node: Node) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        node.save(1)
        node.save(2)
        await node.states.keep(is_planned=False, is_last=False)
        with trio.fail_after(10):
            await node.states.settle()
        nursery.cancel_scope.cancel()
    assert node.written() == {f"step-0000000{step}.a.end": bytes([step] * 8) for step in (1, 2)}
    await node.states.leave()
    assert not node.directory.memory.exists()


async def test_a_note_with_a_number_that_no_script_has_is_not_reported(node: Node) -> None:
    """The report could not be sent."""
    node.save(2)
    (slot,) = node.memory.valid_slots()
    note = slot.note.replace(b"step-00000002", b"step-%d" % 2**70).replace(b'"step":2', b'"step":%d' % 2**70)
    slot.begin()
    slot.seal(note)
    node.save(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        with trio.fail_after(10):
            report = await node.states.next_report()
        nursery.cancel_scope.cancel()
    assert isinstance(report, StatesHeld)
    assert [part.state.step for part in report.parts] == [1]


async def test_shards_are_on_disk_before_ranks_that_were_asked_to_end_start_again(node: Node) -> None:
    """A node that leaves takes its memory along."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        node.save(1, is_cut=True)
        with trio.fail_after(10):
            await node.states.keep(is_planned=True, is_last=False)
        assert node.written()
        nursery.cancel_scope.cancel()


async def test_what_could_not_be_written_is_reported_before_the_end_of_ranks_that_ended_well(node: Node) -> None:
    node.disk.write_text("in the way")
    reports: list[object] = []

    async def hear() -> None:
        while True:
            reports.append(await node.states.next_report())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        nursery.start_soon(hear)
        node.save(1)
        with trio.fail_after(10):
            await node.states.keep(is_planned=False, is_last=True)
        nursery.cancel_scope.cancel()
    (unwritten,) = (each for each in reports if isinstance(each, PartNotWritten))
    assert (unwritten.state.step, unwritten.rank, unwritten.is_sharded) == (1, 0, False)
    assert str(node.disk) in unwritten.reason


async def test_memory_that_could_not_be_written_is_kept(node: Node) -> None:
    node.disk.write_text("in the way")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.states.run)
        node.save(1)
        with trio.fail_after(10):
            await node.states.settle()
        nursery.cancel_scope.cancel()
    await node.states.leave()
    assert node.directory.memory.exists()
