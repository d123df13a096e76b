"""Workers and the fork server that they come from: either may be killed at any time, and the other does not mind."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from oobleck.control.protocol import Exited, ForkServerEnded, Killed, SetUpWorker, Unseen
from oobleck.errors import WorkersUnavailable
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.runtime.agent.workers import ForkingWorkerHost, Worker
from oobleck.runtime.files import RUN_ENVIRONMENT, AgentDir, stat_fields
from tests.processes import no_new_processes

SERVER = (sys.executable, str(Path(__file__).parents[1] / "forking.py"))


def setup(node: str = "node0", device: int = 0) -> SetUpWorker:
    return SetUpWorker(
        job=JobSpec(),
        worker_id=WorkerId(node=node, device=device),
        address="127.0.0.1",
        torch_threads=1,
        cache_dir="/nowhere",
        device_memory_bytes=1 << 30,
    )


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentDir:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = AgentDir("run", "node0")
    directory.create()
    return directory


class _Host(ForkingWorkerHost):
    """Knows its workers."""

    def __init__(self, directory: AgentDir, *, server: Sequence[str]) -> None:
        super().__init__(directory, server=server)
        self.workers: list[Worker] = []

    async def start(self, setup: SetUpWorker) -> Worker:
        worker = await super().start(setup)
        self.workers.append(worker)
        return worker


@asynccontextmanager
async def hosts(*directories: AgentDir) -> AsyncIterator[list[_Host]]:
    """Hosts that share a fork server; it ends with them, and so do their workers."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            started = [_Host(each, server=SERVER) for each in directories]
            for host in started:
                nursery.start_soon(host.run)
            yield started
            for worker in [worker for host in started for worker in host.workers]:
                await worker.aclose()
            nursery.cancel_scope.cancel()
        while directories[0].fork_server_socket.exists():  # noqa: ASYNC110  nothing tells
            await trio.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def lose_supervisor(worker: Worker, number: int = signal.SIGKILL) -> None:
    """Kill or stop the process that waits for a worker; before that, it may still reap it and report nothing."""
    supervisor = parent_of(worker.pid)
    os.kill(supervisor, number)
    while stat_fields(supervisor)[:1] not in ([], ["Z"], ["T"]):  # noqa: ASYNC110  there is no event to wait for
        await trio.sleep(0.001)


def server_of(worker: Worker) -> str:
    """The parent of the process that waits for it."""
    return str(parent_of(parent_of(worker.pid)))


def kill_server(directory: AgentDir) -> None:
    os.kill(int(directory.fork_server_pid.read_text().split()[0]), signal.SIGKILL)


async def test_workers_outlive_their_fork_server_and_their_ends_are_noticed(directory: AgentDir) -> None:
    async with hosts(directory) as (host,):
        first = await host.start(setup())
        kill_server(directory)
        assert await host.server_ended() == ForkServerEnded(end=Killed(signal=9), is_restarted=True)
        second = await host.start(setup(device=1))
        os.kill(first.pid, 0)  # it lives
        os.kill(first.pid, signal.SIGKILL)
        assert await first.wait() == Killed(signal=9)
        second.kill()
        assert await second.wait() == Killed(signal=9)


async def test_a_server_that_is_stopped_hides_no_end_and_the_next_start_does_not_wait_for_it(
    directory: AgentDir,
) -> None:
    async with hosts(directory) as (host,):
        worker = await host.start(setup())
        stopped = int(directory.fork_server_pid.read_text().split()[0])
        os.kill(stopped, signal.SIGSTOP)
        os.kill(worker.pid, signal.SIGTERM)  # which forked processes ignore
        os.kill(worker.pid, signal.SIGUSR1)
        with trio.fail_after(1):
            assert await worker.wait() == Killed(signal=signal.SIGUSR1)
        with trio.fail_after(10):
            second = await host.start(setup())
        assert server_of(second) != str(stopped)
        assert await host.server_ended() == ForkServerEnded(end=Killed(signal=9), is_restarted=True)


async def test_data_that_no_process_can_be_made_for_is_left_to_the_workers(
    directory: AgentDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(directory) as (host,):
        await host.start(setup())  # the server has settled
        with no_new_processes():
            await host.prepare(JobSpec(), tmp_path)
    assert [record.getMessage() for record in caplog.records] == ["the text is not prepared ahead: Too many open files"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_how_a_process_ended_is_known_when_the_one_that_waits_for_it_is_gone_or_stopped(
    directory: AgentDir, number: int
) -> None:
    async with hosts(directory) as (host,):
        worker = await host.start(setup())
        await lose_supervisor(worker, number)
        os.kill(worker.pid, signal.SIGUSR1)
        assert await worker.wait() == Killed(signal=signal.SIGUSR1)
        await host.start(setup())  # the next one is as any


async def test_a_server_that_is_busy_reports_late_how_a_process_ended_whose_supervisor_is_gone(
    directory: AgentDir,
) -> None:
    async with hosts(directory) as (host,):
        worker = await host.start(setup())
        busy = int(directory.fork_server_pid.read_text().split()[0])
        os.kill(busy, signal.SIGSTOP)
        await lose_supervisor(worker)
        os.kill(worker.pid, signal.SIGUSR1)
        await trio.sleep(3.0)
        os.kill(busy, signal.SIGCONT)
        with trio.fail_after(5):
            assert await worker.wait() == Killed(signal=signal.SIGUSR1)


async def test_without_the_one_that_waits_and_the_fork_server_an_end_is_noticed_all_the_same(
    directory: AgentDir,
) -> None:
    async with hosts(directory) as (host,):
        worker = await host.start(setup())
        kill_server(directory)
        await host.server_ended()
        await lose_supervisor(worker)
        worker.kill()
        assert await worker.wait() == Unseen()


async def test_a_start_waits_for_the_next_server(directory: AgentDir) -> None:
    async with hosts(directory) as (host,):
        await host.start(setup())
        kill_server(directory)
        (await host.start(setup())).kill()  # it may meet the old one, none, or the next


async def test_an_agent_whose_neighbour_stopped_while_it_started_a_server_can_be_ended(directory: AgentDir) -> None:
    with open(directory.fork_server_lock, "w") as lock:  # noqa: ASYNC230  a local file
        fcntl.flock(lock, fcntl.LOCK_EX)
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_Host(directory, server=SERVER).run)
                await trio.sleep(0.3)
                nursery.cancel_scope.cancel()
        async with hosts(directory) as (host,):
            await trio.sleep(0.3)
            fcntl.flock(lock, fcntl.LOCK_UN)
            await host.start(setup())


async def test_agents_of_one_machine_share_the_next_server(directory: AgentDir) -> None:
    other = AgentDir("run", "node1")
    other.create()
    async with hosts(directory, other) as (one, two):
        before = [await one.start(setup()), await two.start(setup("node1"))]
        kill_server(directory)
        told = {await one.server_ended(), await two.server_ended()}
        assert told == {ForkServerEnded(end=end, is_restarted=True) for end in (Killed(signal=9), Unseen())}
        after = [await one.start(setup()), await two.start(setup("node1"))]
        assert {server_of(worker) for worker in after} == {directory.fork_server_pid.read_text().split()[0]}
        for worker in before:
            os.kill(worker.pid, 0)  # it lives


async def test_a_server_of_a_run_with_other_variables_is_not_used(
    directory: AgentDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, workers = [], []
    for variables in ("", "one", "one", "two", ""):
        if variables:
            monkeypatch.setenv(RUN_ENVIRONMENT, variables)
        else:
            monkeypatch.delenv(RUN_ENVIRONMENT, raising=False)
        async with trio.open_nursery() as nursery:
            host = _Host(directory, server=SERVER)
            nursery.start_soon(host.run)
            with trio.fail_after(30):
                worker = await host.start(setup())
            servers.append(server_of(worker))
            workers.append(worker)  # which keeps the server
            nursery.cancel_scope.cancel()
    for worker in workers:
        await worker.aclose()
    with trio.fail_after(30):
        while directory.fork_server_socket.exists():  # noqa: ASYNC110  the last server ends with its last worker
            await trio.sleep(0.01)
    assert [before != after for before, after in itertools.pairwise(servers)] == [True, False, True, True]


async def test_a_worker_prints_to_the_log_of_its_own_agent(directory: AgentDir, tmp_path: Path) -> None:
    neighbour = AgentDir("run", "node1")
    neighbour.create()
    stderr = os.dup(2)
    try:
        async with hosts(directory, neighbour) as found:
            for name, host in zip(("one", "two"), found, strict=True):
                with (tmp_path / name).open("w") as log:
                    os.dup2(log.fileno(), 2)  # as an agent's log is
                worker = await host.start(setup())
                assert {os.readlink(f"/proc/{worker.pid}/fd/{number}") for number in (1, 2)} == {str(tmp_path / name)}
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


async def test_a_worker_that_ends_at_once_is_a_worker_that_has_ended(directory: AgentDir) -> None:
    async with hosts(directory) as (host,):
        for _ in range(20):
            worker = await host.start(setup())
            os.kill(worker.pid, signal.SIGKILL)
            assert await worker.wait() == Killed(signal=9)


async def test_a_server_that_ends_again_and_again_is_given_up_and_its_workers_live(directory: AgentDir) -> None:
    async with hosts(directory) as (host,):
        worker = await host.start(setup())
        directory.job_path.joinpath("broken").touch()
        kill_server(directory)
        told = [await host.server_ended() for _ in range(4)]
        broken = Exited(exit_code=3)
        assert [ended.end for ended in told] == [Killed(signal=9), broken, broken, broken]
        assert [ended.is_restarted for ended in told] == [True, True, True, False]
        with pytest.raises(WorkersUnavailable, match=r"fork server .*4 times.*: exit"):
            await host.start(setup(device=1))
        os.kill(worker.pid, 0)
        worker.kill()
        assert await worker.wait() == Killed(signal=9)
        directory.fork_server_socket.unlink()


class _Hurried(AgentDir):
    """The server has ended by the time that its process id is noted."""

    def note_fork_server(self, pid: int) -> None:
        super().note_fork_server(pid)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


@pytest.mark.parametrize("kind", [AgentDir, _Hurried])
async def test_a_server_that_ends_at_once_has_ended_whether_it_could_be_spoken_to_or_not(
    directory: AgentDir, kind: type[AgentDir]
) -> None:
    host = ForkingWorkerHost(kind("run", "node0"), server=("/bin/sh", "-c", "exit 3"))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            told = [await host.server_ended() for _ in range(4)]
            nursery.cancel_scope.cancel()
    assert [ended.end for ended in told] == [Exited(exit_code=3)] * 4
    directory.fork_server_socket.unlink()


async def test_a_server_that_cannot_be_started_is_given_up_with_the_reason(directory: AgentDir) -> None:
    host = ForkingWorkerHost(directory, server=("/nonexistent",))
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            with pytest.raises(WorkersUnavailable, match=r"/nonexistent"):
                await host.start(setup())
            nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_server_whose_imports_fail_is_given_up_with_the_reason(
    directory: AgentDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgpack.py").write_text("raise ImportError('libmsgpack.so.9: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    host = ForkingWorkerHost(directory)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.run)
            with pytest.raises(WorkersUnavailable, match=r"ImportError: libmsgpack\.so\.9: cannot open"):
                await host.start(setup())
            nursery.cancel_scope.cancel()
