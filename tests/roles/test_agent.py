"""The agent against a master that a test speaks for, under virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from oobleck.control.plans import orders_of
from oobleck.control.protocol import (
    AgentMessage,
    AgentStopped,
    AskActivity,
    ErrorKind,
    Exited,
    Fence,
    FinishStep,
    ForkServerEnded,
    Greeting,
    Heartbeat,
    Hello,
    Killed,
    KillWorker,
    Leaving,
    NodeUse,
    PlanOrder,
    PlanUpdate,
    ProcessorUse,
    Raised,
    SavedState,
    StartWorker,
    StateNotSaved,
    StateSaved,
    Status,
    StepCommitted,
    StopAgent,
    UseShare,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
    WorkerStarted,
)
from oobleck.errors import PeerError
from oobleck.job import ControlSpec
from oobleck.planner import ExecutionPlan, WorkerId
from oobleck.roles.agent_ports import CheckpointStore
from oobleck.runtime.agent.checkpoint_store import NodeCheckpoints
from oobleck.runtime.files.agent_dir import AgentDir
from oobleck.schedule import ScheduleKind
from tests.control.journals import plan
from tests.control.steps.test_judgement import record, status
from tests.roles.virtual import CONTROL, GREETING, AgentLink, VirtualHost, configure, make_agent


def run_of(tmp_path: Path) -> str:
    """A run that no other test on this machine has: its memory has a place that all share."""
    return f"{tmp_path.parent.name}-{tmp_path.name}"


class Desk:
    """An agent under test, the masters' ends of its links, and how it ended."""

    def __init__(self, checkpoints: CheckpointStore | None = None) -> None:
        self._checkpoints = checkpoints
        self.host = VirtualHost()
        self.ended: str | None = None
        self.ended_s = 0.0
        self.post, self._links = trio.open_memory_channel[AgentLink](10)

    async def run(self) -> None:
        async def accept():
            return (await self._links.receive()).agent

        self.ended = await make_agent(accept, self.host, checkpoints=self._checkpoints).run()
        self.ended_s = trio.current_time()

    async def connect(self, *, configured: bool = True, devices: tuple[int, ...] = (0,)) -> AgentLink:
        """Come as a master, and have workers started."""
        link = AgentLink()
        self.post.send_nowait(link)
        await link.master.send([GREETING])
        assert isinstance(await link.master.receive(), Hello)
        if configured:
            await link.master.send([configure(devices=devices)])
        return link


@asynccontextmanager
async def running(*, checkpoints: CheckpointStore | None = None) -> AsyncIterator[Desk]:
    desk = Desk(checkpoints)
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(desk.run)
            yield desk
            nursery.cancel_scope.cancel()


async def hear(link: AgentLink, kind: type, *, where: Callable[[AgentMessage], bool] = lambda _: True) -> AgentMessage:
    """Wait for the next message of a kind; others are passed over."""
    while True:
        message = await link.master.receive()
        if isinstance(message, kind) and where(message):
            return message


async def until_closed(link: AgentLink) -> None:
    with suppress(trio.EndOfChannel, trio.BrokenResourceError):
        while True:
            await link.master.receive()


async def test_an_agent_without_a_master_gives_up(autojump_clock: MockClock):
    async with running() as desk:
        await trio.sleep(59)
        assert desk.ended is None
        await trio.sleep(2)
        assert desk.ended.endswith(" 60 s")


async def test_heartbeats_come_every_interval(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await hear(link, Heartbeat)
        began_s = trio.current_time()
        assert [await hear(link, Heartbeat) for _ in range(4)] == [Heartbeat(sequence=None)] * 4
        assert trio.current_time() - began_s == pytest.approx(4 * CONTROL.heartbeat_interval_s)


async def test_heartbeats_ask_for_an_answer_until_all_that_was_said_is_heard(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await hear(link, Heartbeat)
        await link.master.send([StartWorker(device=0)])
        await hear(link, WorkerStarted)
        asked = [(await hear(link, Heartbeat)).sequence for _ in range(3)]
        assert asked == [0, 1, 2]
        await link.master.send([Heartbeat(sequence=2)])
        assert (await hear(link, Heartbeat)).sequence is None


class Meter:
    """Counts how often it is asked, and for which processes."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    async def measure(self, pids: Sequence[int], gpu_ids: Sequence[str]) -> NodeUse:
        self.asked.append(tuple(pids))
        return NodeUse(cores=len(self.asked), num_cores=8, used_bytes=1, memory_bytes=2)


@pytest.mark.parametrize("reports_use", [True, False])
async def test_use_is_reported_with_heartbeats_where_it_is_asked_for(autojump_clock: MockClock, reports_use: bool):
    meter, link = Meter(), AgentLink()

    async def accept():
        return (await links.receive()).agent

    post, links = trio.open_memory_channel[AgentLink](1)
    post.send_nowait(link)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_agent(accept, VirtualHost(), meter=meter).run)
        await link.master.send([GREETING])
        await link.master.send([replace(configure(), reports_use=reports_use), StartWorker(device=0)])
        started = await hear(link, WorkerStarted)
        with trio.move_on_after(9):
            assert (await hear(link, NodeUse)).cores == 1
            assert (await hear(link, NodeUse)).cores == 2
            assert (await hear(link, Heartbeat)).sequence is not None, "the start is not answered"
        assert meter.asked[:2] == ([(started.pid,)] * 2 if reports_use else [])
        nursery.cancel_scope.cancel()


async def test_a_notice_of_termination_is_passed_on_once(autojump_clock: MockClock):
    async def in_a_while(control: ControlSpec) -> str:
        await trio.sleep(5)
        return f"notice asked for every {control.notice_interval_s:g} s"

    link = AgentLink()
    post, links = trio.open_memory_channel[AgentLink](1)
    post.send_nowait(link)

    async def accept():
        return (await links.receive()).agent

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_agent(accept, VirtualHost(), await_notice=in_a_while).run)
        await link.master.send([GREETING])
        for _ in range(2):  # a second master may configure it again
            await link.master.send([configure()])
        began_s = trio.current_time()
        leaving = await hear(link, Leaving)
        assert leaving == Leaving(reason="notice asked for every 5 s")
        assert trio.current_time() - began_s == pytest.approx(5)
        with trio.move_on_after(10) as waited:
            await hear(link, Leaving)
        assert waited.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_the_end_of_the_fork_server_is_passed_on(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        for end, is_restarted in ((Killed(signal=9), True), (Exited(exit_code=3), False)):
            ended = ForkServerEnded(end=end, is_restarted=is_restarted)
            await desk.host.end_server.send(ended)
            assert await hear(link, ForkServerEnded) == ended


async def test_workers_are_set_up_and_reported(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect(devices=(0, 1))
        await link.master.send([StartWorker(device=0), StartWorker(device=1)])
        started = [await hear(link, WorkerStarted) for _ in range(2)]
        assert {message.device for message in started} == {0, 1}
        assert {worker.setup.worker_id.device for worker in desk.host.workers} == {0, 1}
        assert desk.host.prepared, "what workers need is prepared as soon as the job is known"


def plan_order(layout: ExecutionPlan, *, device: int = 0) -> PlanOrder:
    update = PlanUpdate(
        generation=4,
        plan=layout,
        pipeline_generations=(4,),
        schedules=(ScheduleKind.ONE_F_ONE_B,),
        boundary=0,
    )
    worker_id = WorkerId(node="n0", device=device)
    ((_, order),) = orders_of(update, [worker_id], bases={}, known={}, in_force=None)
    return order


async def test_words_for_a_worker_reach_that_worker(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect(devices=(0, 1))
        await link.master.send([StartWorker(device=0), StartWorker(device=1)])
        for _ in range(2):
            await hear(link, WorkerStarted)
        layout = plan(("n0", "n1"))
        order = plan_order(layout, device=1)
        fence = Fence(device=1, generation=4, lost=())
        await link.master.send([fence, order, FinishStep(device=1), FinishStep(device=7)])
        other = await desk.host.worker(1)
        await other.hears(FinishStep)
        assert other.told == [fence, order, FinishStep(device=1)]
        assert (await desk.host.worker(0)).told == []


@pytest.mark.parametrize("computes", [False, True])
async def test_an_agent_measures_a_worker_that_is_asked_what_it_does(autojump_clock: MockClock, computes: bool):
    """It does so whether or not the worker answers: a call may hold the interpreter of one that computes."""
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        await hear(link, WorkerStarted)
        worker = await desk.host.worker()
        worker.computes = computes
        ask = AskActivity(device=0, inquiry=3, patience_s=1.5)
        await link.master.send([ask, replace(ask, device=7)])
        await worker.hears(AskActivity)
        use = await hear(link, ProcessorUse)
        assert use == ProcessorUse(device=0, inquiry=3, used_s=pytest.approx(1.5 * computes), within_s=1.5)


async def test_a_worker_that_ends_while_it_is_measured_is_not_reported(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        await hear(link, WorkerStarted)
        await link.master.send([AskActivity(device=0, inquiry=3, patience_s=5.0)])
        worker = await desk.host.worker()
        await worker.hears(AskActivity)
        await link.master.send([KillWorker(device=0)])
        await hear(link, WorkerExited)
        with trio.move_on_after(8.0):
            await hear(link, ProcessorUse)
            raise AssertionError("the process is gone")


async def test_an_agent_tells_a_new_master_the_generation_it_trains_in(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        await hear(link, WorkerStarted)
        await link.master.send([plan_order(plan(("n0", "n1")))])
        await (await desk.host.worker()).hears(PlanOrder)
        link.cut()
        again = AgentLink()
        desk.post.send_nowait(again)
        await again.master.send([GREETING])
        hello = await again.master.receive()
        assert isinstance(hello, Hello)
        assert hello.generation == 4


async def test_what_workers_say_reaches_the_master(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        committed = StepCommitted(device=0, record=record(1))
        worker.say(committed, status())
        assert await hear(link, StepCommitted) == committed
        assert await hear(link, Status) == status()


async def test_the_end_of_a_worker_is_told_with_its_last_words(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        error = Raised(kind=ErrorKind.CODE, message="ValueError: bad", traceback="Traceback\nValueError: bad")
        worker.say(WorkerFailed(end=error))
        worker.end(Exited(exit_code=1))
        assert await hear(link, WorkerExited) == WorkerExited(device=0, pid=worker.pid, end=error)


async def test_a_worker_may_be_started_again_in_its_place(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        (await desk.host.worker()).end(Killed(signal=9))
        assert (await hear(link, WorkerExited)).end == Killed(signal=9)
        await link.master.send([StartWorker(device=0)])
        assert (await hear(link, WorkerStarted, where=lambda said: said.pid == 101)).device == 0


async def test_a_worker_that_starts_again_is_told_which_gpu_it_had(autojump_clock: MockClock):
    """By its id: when a GPU is lost, the numbers of others change."""
    ready = WorkerReady(
        device=1,
        pid=1,
        data_digest="",
        num_samples=1,
        layer_names=(),
        parameters=1,
        torch_version="",
        gpu_id="GPU-7",
    )
    async with running() as desk:
        link = await desk.connect(devices=(4, 6))
        for gpu_id in ("", "GPU-7"):
            await link.master.send([StartWorker(device=1)])
            await hear(link, WorkerStarted)
            worker = await desk.host.worker(1)
            assert (worker.setup.local_device, worker.setup.gpu_id) == (6, gpu_id)
            worker.say(ready)
            await hear(link, WorkerReady)
            worker.end(Killed(signal=9))
            await hear(link, WorkerExited)
        await link.master.send([StartWorker(device=0)])
        assert (await desk.host.worker(0)).setup.gpu_id == ""


async def test_workers_are_told_what_is_left_for_them_of_a_machine_once_others_share_it(autojump_clock: MockClock):
    async with running() as desk:
        desk.host.start_s = 5.0
        link = await desk.connect(devices=(0, 1))
        await link.master.send([StartWorker(device=0)])
        first = await desk.host.worker()
        await link.master.send([StartWorker(device=1)])
        await trio.sleep(1)
        less = replace(configure(devices=(0, 1)), torch_threads=3, device_memory_bytes=1 << 20)
        await link.master.send([less, less])
        second = await desk.host.worker(1)
        share = UseShare(torch_threads=3, device_memory_bytes=1 << 20)
        assert await first.hears(UseShare) == await second.hears(UseShare) == share
        assert first.told.count(share) == second.told.count(share) == 1
        first.end(Killed(signal=9))
        await hear(link, WorkerExited)
        await link.master.send([StartWorker(device=0)])
        await trio.sleep(10)
        again = await desk.host.worker()
        assert (again.setup.torch_threads, again.setup.device_memory_bytes) == (3, 1 << 20)


async def test_a_worker_is_started_once_by_whichever_masters_ask_for_it(autojump_clock: MockClock):
    async with running() as desk:
        desk.host.start_s = 5.0
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        await trio.sleep(1)
        link.cut()
        link = await desk.connect()  # another master, which was not told of a worker
        await link.master.send([StartWorker(device=0)])
        assert (await hear(link, WorkerStarted)).device == 0
        await link.master.send([StartWorker(device=0)])
        await trio.sleep(10)
        assert len(desk.host.workers) == 1
        await hear(link, Heartbeat)


async def test_a_child_that_holds_a_dead_workers_socket_delays_its_report_by_two_seconds(
    autojump_clock: MockClock,
):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        began_s = trio.current_time()
        worker.end(Killed(signal=9), closes_socket=False)
        await hear(link, WorkerExited)
        assert trio.current_time() - began_s == pytest.approx(2.0)


@pytest.mark.parametrize("nonsense", [PeerError("no such message"), trio.EndOfChannel()])
async def test_a_worker_that_cannot_be_understood_any_more_is_killed(nonsense: Exception, autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        worker.say(nonsense)
        assert (await hear(link, WorkerExited)).end == Killed(signal=9)
        assert worker.is_killed


async def test_a_worker_that_reads_nothing_any_more_is_killed_and_delays_nobody(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect(devices=(0, 1))
        await link.master.send([StartWorker(device=0), StartWorker(device=1)])
        for _ in range(2):
            await hear(link, WorkerStarted)
        stuck, other = await desk.host.worker(0), await desk.host.worker(1)
        stuck.reads = False
        fence = Fence(device=0, generation=1, lost=())
        for _ in range(11):
            await link.master.send([fence] * 1000)
        await link.master.send([FinishStep(device=1)])
        await other.hears(FinishStep)
        assert (await hear(link, WorkerExited)).device == 0
        assert not other.is_killed


async def test_training_goes_on_without_a_master_and_the_next_one_hears_what_was_said(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        await hear(link, WorkerStarted)
        link.cut()
        await trio.sleep(CONTROL.orphan_timeout_s - 1)
        committed = StepCommitted(device=0, record=record(7))
        worker.say(committed)
        await trio.sleep(0.1)
        again = await desk.connect(configured=False)
        assert await hear(again, StepCommitted) == committed
        assert not worker.is_killed


async def test_what_was_reported_of_the_last_save_is_said_to_every_master(autojump_clock: MockClock, tmp_path: Path):
    """A new master knows nothing of what the one before has heard, and nobody else would tell it."""
    autojump_clock.autojump_threshold = 0.2  # the store works on threads, for which the clock would not wait
    state = SavedState(name="step-1", step=1, generation=1, saved_at="2026-02-01T00:00:00")
    saved = StateSaved(device=0, state=state, layers=(0,), size_bytes=1, pause_s=0.0)
    directory = AgentDir(run_of(tmp_path), "n0")
    store = NodeCheckpoints(directory, default_directory=tmp_path)
    async with running(checkpoints=store) as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        worker.say(saved)
        lost = await hear(link, StateNotSaved)  # nothing is in memory here
        beat = await hear(link, Heartbeat, where=lambda beat: beat.sequence is not None)
        await link.master.send([beat])
        await trio.sleep(0.1)
        link.cut()
        again = await desk.connect(configured=False)
        assert await hear(again, StateSaved) == saved
        assert await hear(again, StateNotSaved) == lost
        await again.master.send([StopAgent(reason="all is said")])
        await hear(again, AgentStopped)
    assert not directory.memory.exists()


async def test_an_orphan_ends_its_workers_and_itself(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        link.cut()
        await trio.sleep(CONTROL.orphan_timeout_s - 1)
        assert desk.ended is None
        await trio.sleep(2)
        assert desk.ended.endswith(" 30 s")
        assert worker.is_killed


async def test_a_master_that_vanished_without_a_word_leaves_no_agent_behind(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        # The link stays open, as it does when the master's machine loses its power.
        await trio.sleep(2 * CONTROL.orphan_timeout_s + 5)
        assert desk.ended.endswith(" 30 s")
        assert worker.is_killed


async def test_an_orphan_gives_the_memory_for_states_back(autojump_clock: MockClock, tmp_path: Path):
    autojump_clock.autojump_threshold = 0.2  # a thread removes the memory, for which the clock does not wait
    directory = AgentDir(run_of(tmp_path), "n0")
    store = NodeCheckpoints(directory, default_directory=tmp_path)
    link = AgentLink()
    waiting = [link.agent]

    async def accept():
        return waiting.pop() if waiting else await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_agent(accept, VirtualHost(), checkpoints=store).run)
        await link.master.send([GREETING])
        await link.master.send([configure()])
        await hear(link, Heartbeat)
        assert directory.memory.is_dir()
        await link.master.aclose()
    assert not directory.memory.exists()


async def test_a_master_that_answers_heartbeats_that_ask_is_no_ghost(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        num_asked = 0
        with trio.move_on_after(10 * CONTROL.orphan_timeout_s):
            while True:
                heartbeat = await hear(link, Heartbeat)
                if heartbeat.sequence is not None:
                    num_asked += 1
                    await link.master.send([heartbeat])
        assert desk.ended is None
        assert 10 < num_asked < 100


async def test_nonsense_from_a_master_costs_it_the_connection_and_nothing_else(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        await link.master_stream.send_all(b"\x00\x00\x00\x02hi")
        await until_closed(link)
        assert not worker.is_killed
        await desk.connect()


@pytest.mark.parametrize(
    "message",
    [GREETING, StartWorker(device=5)],
    ids=["a second greeting", "a device that is not there"],
)
async def test_orders_that_cannot_be_meant_cost_the_master_its_connection(message, autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        await hear(link, WorkerStarted)
        await link.master.send([message])
        await until_closed(link)
        assert desk.ended is None
        assert not worker.is_killed
        assert len(desk.host.workers) == 1


async def test_a_worker_asked_for_before_the_job_is_known_costs_the_master_its_connection(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect(configured=False)
        await link.master.send([StartWorker(device=0)])
        await until_closed(link)
        assert desk.ended is None
        await desk.connect()


@pytest.mark.parametrize("greeting", [Heartbeat(sequence=0), Greeting(protocol=1, tag="another")])
async def test_a_stranger_is_turned_away(greeting, autojump_clock: MockClock):
    async with running() as desk:
        link = AgentLink()
        desk.post.send_nowait(link)
        await link.master.send([greeting])
        await until_closed(link)
        await desk.connect()


async def test_a_master_that_does_not_greet_is_not_waited_for(autojump_clock: MockClock):
    async with running() as desk:
        link = AgentLink()
        desk.post.send_nowait(link)
        began_s = trio.current_time()
        await until_closed(link)
        assert trio.current_time() - began_s == pytest.approx(10.0)
        await desk.connect()


@pytest.mark.parametrize("devices", [(0,), (0, 1), (0, 1, 2)])
async def test_farewell_ends_all_workers_and_says_so_last(devices: tuple[int, ...], autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect(devices=devices)
        await link.master.send([StartWorker(device=device) for device in devices])
        workers = [await desk.host.worker(device) for device in devices]
        workers[0].say(StepCommitted(device=0, record=record(3)))
        await trio.sleep(0.01)
        await link.master.send([StopAgent(reason="drained")])
        said = []
        with suppress(trio.EndOfChannel):
            while True:
                said.append(await link.master.receive())
        assert said[-1] == AgentStopped(reason="drained")
        assert StepCommitted(device=0, record=record(3)) in said
        assert all(worker.is_killed for worker in workers)
        await trio.sleep(0.01)
        assert desk.ended == "drained"


async def test_farewell_ends_a_worker_that_is_only_starting(autojump_clock: MockClock):
    async with running() as desk:
        desk.host.start_s = 1.0
        link = await desk.connect()
        await link.master.send([StartWorker(device=0), StopAgent(reason="enough")])
        await until_closed(link)
        await trio.sleep(2)
        assert desk.ended == "enough"
        assert all(worker.is_killed for worker in desk.host.workers)


async def test_a_master_that_reads_nothing_cannot_keep_an_agent_from_leaving(autojump_clock: MockClock):
    async with running() as desk:
        link = await desk.connect()
        await link.master.send([StartWorker(device=0)])
        worker = await desk.host.worker()
        await hear(link, WorkerStarted)
        never = trio.Event()
        link.agent_stream.send_stream.send_all_hook = never.wait
        await trio.sleep(1)
        await link.master.send([StopAgent(reason="enough")])
        await trio.sleep(10)
        assert desk.ended == "enough"
        assert worker.is_killed
