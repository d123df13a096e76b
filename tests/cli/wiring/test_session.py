"""What a session makes of nodes that a launcher reports, and of signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import trio
import trio.testing

from oobleck.cli.wiring.session import MasterLeaves, Session
from oobleck.control.events import AddRequested, DrainRequested, Event, MemoryRanOut, Remark, StopRequested
from oobleck.control.journal import ConnectionLost, JobEnded, JournalEntry, NodeLeft, NodeLost
from oobleck.control.protocol import NodeUse
from oobleck.control.replay import RunBooks
from oobleck.job import NodeSpec
from oobleck.runtime.control_client import StatusRequest
from oobleck.runtime.launchers import Arrived, Leaving, NodeChange, OutOfMemory, Reported
from tests.control.journals import job_started

NODES = tuple(NodeSpec(name=name, host=name) for name in "abc")


class Desk:
    """A master, its cluster and a launcher, as far as a session asks them for anything."""

    now_s = 1.0

    def __init__(self) -> None:
        self.nodes = NODES
        self.done: list[Event] = []
        self.released: list[str] = []
        self._observers: list[Callable[[JournalEntry], None]] = []
        self.report, self._changes = trio.open_memory_channel[NodeChange](10)

    def observe(self, observer: Callable[[JournalEntry], None]) -> None:
        self._observers.append(observer)

    def listen(self, listener: Callable[[str, float], None]) -> None:
        pass

    def measure(self, gauge: Callable[[str, NodeUse], None]) -> None:
        self.gauge = gauge

    def submit(self, event: Event) -> None:
        self.done.append(event)

    def release(self, node: NodeSpec) -> None:
        self.released.append(node.name)

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        async for change in self._changes:
            await changes.send(change)

    def write(self, *entries: JournalEntry) -> None:
        for entry in entries:
            for observer in self._observers:
                observer(entry)


@pytest.fixture
async def desk(nursery: trio.Nursery) -> Desk:
    desk = Desk()
    session = Session(desk, desk, desk, nursery, kills=(), past=RunBooks())
    nursery.start_soon(session.follow_launcher)
    return desk


def lost(node: str) -> NodeLost:
    return NodeLost(t_s=1.0, node=node, loss=ConnectionLost())


async def test_what_a_launcher_reports_becomes_what_the_run_is_asked_for(desk: Desk) -> None:
    new, old = NodeSpec(name="d", host="d"), NodeSpec(name="e", host="e")
    for change in (
        Arrived(node=new),
        Arrived(node=old, by_itself=True),
        Leaving(node="a"),
        OutOfMemory(node="b"),
        Reported(level="warning", text="no more are listed"),
    ):
        await desk.report.send(change)
    await trio.testing.wait_all_tasks_blocked()
    assert desk.done == [
        AddRequested(spec=new, has_arrived=True),
        AddRequested(spec=old, by_itself=True, has_arrived=True),
        DrainRequested(node="a"),
        MemoryRanOut(node="b"),
        Remark(level="warning", text="no more are listed"),
    ]


async def test_a_node_that_has_left_is_given_back_and_a_lost_one_is_not(desk: Desk) -> None:
    desk.write(lost("a"), NodeLeft(t_s=1.0, node="b"))
    assert desk.released == ["b"]


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_sigterm_ends_the_run_or_where_another_master_is_started_this_one_alone(*, is_replaced: bool) -> None:
    desk, has_left = Desk(), False
    try:
        async with trio.open_nursery() as nursery:
            session = Session(desk, desk, desk, nursery, kills=(), past=RunBooks(), is_replaced=is_replaced)
            nursery.start_soon(session.watch_signals)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(os.getpid(), signal.SIGTERM)
            with trio.move_on_after(5):
                while not desk.done:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    except* MasterLeaves:
        has_left = True
    assert has_left == is_replaced
    assert [type(event) for event in desk.done] == ([] if is_replaced else [StopRequested])


async def test_the_state_of_a_run_has_what_its_nodes_use(nursery: trio.Nursery) -> None:
    desk = Desk()
    session = Session(desk, desk, desk, nursery, kills=(), past=RunBooks())
    desk.write(job_started(("a", "b")))
    desk.gauge("b", NodeUse(cores=1.5, num_cores=4, used_bytes=1, memory_bytes=2))
    nodes = (await session.answer(StatusRequest()))["nodes"]
    assert isinstance(nodes, list)
    assert [node["use"] and node["use"]["cores"] for node in nodes] == [None, 1.5]


async def test_a_planned_kill_whose_node_was_not_lost_is_named_at_the_end(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk()
    Session(desk, desk, desk, nursery, kills=(("a", 10), ("b", 12)), past=RunBooks())
    desk.write(lost("a"))
    assert not caplog.records
    desk.write(JobEnded(t_s=9.0, exit_code=0, reason="all steps are committed"))
    assert [entry.getMessage() for entry in caplog.records] == ["--kill b@12 was not carried out: the run ended first"]
