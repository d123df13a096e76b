"""Commands that reach the processes of a node: run by a real shell, on real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.runtime.agent_dir import (
    AgentDir,
    end_command,
    is_alive_command,
    kill_command,
    signal_command,
    slow_command,
)

RUN = "tag-01234567"
BUSY = "while True: pass"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentDir:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    directory = AgentDir(RUN, "node1")
    directory.create()
    return directory


@pytest.fixture
def agent(directory: AgentDir) -> Iterator[psutil.Popen]:
    yield from process(directory, "agent", "import time; time.sleep(60)")


@pytest.fixture
def worker(directory: AgentDir) -> Iterator[psutil.Popen]:
    yield from process(directory, "worker0", BUSY)


def process(directory: AgentDir, role: str, program: str, name: str = "oobleck") -> Iterator[psutil.Popen]:
    """A process that its command line shows to be ours, noted where an agent notes it."""
    with psutil.Popen([sys.executable, "-c", program, name]) as child:
        directory.pid_file(role).write_text(f"{child.pid}\n")
        yield child
        if child.is_running():
            child.kill()


def shell(command: str) -> int:
    return subprocess.run(["/bin/sh", "-c", command], timeout=10, check=False, capture_output=True).returncode


def is_stopped(child: psutil.Popen) -> bool:
    time.sleep(0.05)
    return child.status() == psutil.STATUS_STOPPED


def test_a_signal_reaches_those_that_it_is_for(agent: psutil.Popen, worker: psutil.Popen) -> None:
    assert shell(signal_command(RUN, "node1", "STOP", processes="worker0")) == 0
    assert (is_stopped(agent), is_stopped(worker)) == (False, True)
    assert shell(signal_command(RUN, "node1", "STOP")) == 0
    assert is_stopped(agent)
    assert shell(signal_command(RUN, "node1", "CONT")) == 0
    assert (is_stopped(agent), is_stopped(worker)) == (False, False)
    assert shell(kill_command(RUN, "node1")) == 0
    assert (agent.wait(5), worker.wait(5)) == (-9, -9)


def test_a_signal_for_the_fork_server_reaches_it_alone(directory: AgentDir, agent: psutil.Popen) -> None:
    assert shell(signal_command(RUN, "node1", "KILL", processes="fork_server")) != 0, "there is none yet"
    for server in process(directory, "../fork", BUSY):
        assert shell(signal_command(RUN, "node1", "KILL", processes="fork_server")) == 0
        assert server.wait(5) == -9
    assert agent.is_running()


def test_a_signal_for_nobody_fails(directory: AgentDir) -> None:
    assert shell(signal_command(RUN, "node1", "STOP")) != 0
    assert shell(signal_command(RUN, "node7", "STOP")) != 0
    assert shell(kill_command(RUN, "node7")) == 0, "which is what was wanted"


def test_a_process_of_somebody_else_under_a_number_of_ours_is_left_alone(directory: AgentDir) -> None:
    for child in process(directory, "agent", "import time; time.sleep(60)", name="bystander"):
        assert shell(signal_command(RUN, "node1", "KILL")) != 0
        assert shell(end_command(RUN, "node1")) == 0
        assert shell(is_alive_command(RUN, "node1")) != 0
        assert child.is_running()


def test_an_agent_is_alive_while_its_process_is(agent: psutil.Popen) -> None:
    assert shell(is_alive_command(RUN, "node1")) == 0
    agent.kill()
    agent.wait(5)
    assert shell(is_alive_command(RUN, "node1")) != 0


def busy_share(child: psutil.Popen, *, over_s: float) -> float:
    """The share of the time in which a process is not stopped."""
    samples = []
    end_s = time.monotonic() + over_s
    while time.monotonic() < end_s:
        samples.append(child.status() != psutil.STATUS_STOPPED)
        time.sleep(0.003)
    return sum(samples) / len(samples)


def test_a_slow_worker_is_stopped_for_its_share_of_the_time(worker: psutil.Popen, directory: AgentDir) -> None:
    assert shell(slow_command(RUN, "node1", 4.0)) == 0
    slow = busy_share(worker, over_s=1.5)
    assert shell(slow_command(RUN, "node1", 1.25)) == 0
    less_slow = busy_share(worker, over_s=1.5)
    assert 0.1 < slow < 0.5 < less_slow < 1, "1/4 and 4/5, on a machine that may be busy"
    assert shell(slow_command(RUN, "node1", 1.0)) == 0
    assert busy_share(worker, over_s=0.5) == 1
    assert not directory.pid_file("slow").exists()


def test_the_loop_that_slows_a_worker_ends_with_it(worker: psutil.Popen, directory: AgentDir) -> None:
    assert shell(slow_command(RUN, "node1", 2.0)) == 0
    time.sleep(0.2)
    loop = psutil.Process(int(directory.pid_file("slow").read_text()))
    worker.kill()
    worker.wait(5)
    loop.wait(5)


def test_a_node_that_is_killed_while_it_is_slow_leaves_nothing(
    directory: AgentDir, agent: psutil.Popen, worker: psutil.Popen
) -> None:
    assert shell(slow_command(RUN, "node1", 2.0)) == 0
    time.sleep(0.2)
    loop = psutil.Process(int(directory.pid_file("slow").read_text()))
    assert shell(end_command(RUN, "node1")) == 0
    assert (agent.wait(5), worker.wait(5)) == (-9, -9)
    loop.wait(5)
