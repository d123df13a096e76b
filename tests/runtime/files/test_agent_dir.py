"""Commands that reach the processes of a node: run by a real shell, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.errors import ConfigError
from oobleck.runtime.files.agent_dir import (
    MEMORY_OWNER,
    ONLY_COPY,
    AgentCommands,
    AgentDir,
)
from oobleck.runtime.files.private_paths import TEMPORARY_DIRECTORY_SHELL, temporary_directory

RUN = "tag-01234567"
BUSY = "while True: pass"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentDir:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = AgentDir(RUN, "node1")
    directory.create()
    return directory


@pytest.fixture
def agent(directory: AgentDir) -> Iterator[psutil.Popen]:
    yield from process(directory, "agent", "import time; time.sleep(60)")


@pytest.fixture
def worker(directory: AgentDir) -> Iterator[psutil.Popen]:
    yield from process(directory, "worker0", BUSY)


def process(directory: AgentDir, role: str, program: str) -> Iterator[psutil.Popen]:
    """A process that is noted where an agent notes it."""
    with psutil.Popen([sys.executable, "-c", program]) as child:
        directory.note_process(role, child.pid)
        yield child
        if child.is_running():
            child.kill()


def shell(command: str) -> int:
    return subprocess.run(["/bin/sh", "-c", command], timeout=10, check=False, capture_output=True).returncode


def is_stopped(child: psutil.Popen) -> bool:
    time.sleep(0.05)
    return child.status() == psutil.STATUS_STOPPED


def test_a_signal_reaches_those_that_it_is_for(agent: psutil.Popen, worker: psutil.Popen) -> None:
    assert shell(AgentCommands(RUN, "node1").signal("STOP", processes="worker0")) == 0
    assert (is_stopped(agent), is_stopped(worker)) == (False, True)
    assert shell(AgentCommands(RUN, "node1").signal("STOP")) == 0
    assert is_stopped(agent)
    assert shell(AgentCommands(RUN, "node1").signal("CONT")) == 0
    assert (is_stopped(agent), is_stopped(worker)) == (False, False)
    assert shell(AgentCommands(RUN, "node1").kill()) == 0
    assert (agent.wait(5), worker.wait(5)) == (-9, -9)


def test_a_signal_for_the_fork_server_reaches_it_alone(directory: AgentDir, agent: psutil.Popen) -> None:
    assert shell(AgentCommands(RUN, "node1").signal("KILL", processes="fork_server")) != 0, "there is none yet"
    for server in process(directory, "../fork", BUSY):
        assert shell(AgentCommands(RUN, "node1").signal("KILL", processes="fork_server")) == 0
        assert server.wait(5) == -9
    assert agent.is_running()


def test_a_signal_for_nobody_fails(directory: AgentDir) -> None:
    assert shell(AgentCommands(RUN, "node1").signal("STOP")) != 0
    assert shell(AgentCommands(RUN, "node7").signal("STOP")) != 0
    assert shell(AgentCommands(RUN, "node7").kill()) != 0


def another_start(noted: str) -> str:
    """What an agent would have noted of a process that had the same number before."""
    pid, started, boot = noted.split()
    return f"{pid} {int(started) - 1} {boot}\n"


def another_boot(noted: str) -> str:
    pid, started, _ = noted.split()
    return f"{pid} {started} 00000000-0000-0000-0000-000000000000\n"


@pytest.mark.parametrize(
    "record", [another_start, another_boot, lambda noted: noted.split()[0] + "\n", lambda _: "-1 0 0\n", lambda _: ""]
)
def test_a_process_that_only_has_a_number_of_ours_is_left_alone(
    directory: AgentDir, agent: psutil.Popen, record: Callable[[str], str]
) -> None:
    note = directory.pid_file("agent")
    note.write_text(record(note.read_text()))
    assert shell(AgentCommands(RUN, "node1").signal("KILL")) != 0
    assert shell(AgentCommands(RUN, "node1").is_alive()) != 0
    assert shell(AgentCommands(RUN, "node1").kill()) != 0
    assert shell(AgentCommands(RUN, "node1").end()) == 0
    assert not directory.path.exists()
    assert agent.is_running()
    assert agent.status() != psutil.STATUS_ZOMBIE


def test_a_process_is_not_ours_for_the_words_in_its_command_line(directory: AgentDir) -> None:
    with psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)", "oobleck"]) as bystander:
        directory.pid_file("agent").write_text(f"{bystander.pid}\n")
        assert shell(AgentCommands(RUN, "node1").kill()) != 0
        assert bystander.is_running()
        bystander.kill()


def test_a_name_that_looks_like_the_kernels_own_text_misleads_nobody(directory: AgentDir, tmp_path: Path) -> None:
    rename = "open('/proc/self/comm', 'wb').write(b'a) Z 1 2\\nb) 3'); print(flush=True); import time; time.sleep(60)"
    with psutil.Popen([sys.executable, "-c", rename], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        directory.note_process("agent", child.pid)
        assert shell(AgentCommands(RUN, "node1").is_alive()) == 0
        assert shell(AgentCommands(RUN, "node1").kill()) == 0
        assert child.wait(5) == -9


def test_killing_tells_whether_anything_died(agent: psutil.Popen) -> None:
    assert shell(AgentCommands(RUN, "node1").kill()) == 0
    agent.wait(5)
    assert shell(AgentCommands(RUN, "node1").kill()) != 0


def test_an_agent_is_alive_while_its_process_is(agent: psutil.Popen) -> None:
    assert shell(AgentCommands(RUN, "node1").is_alive()) == 0
    agent.kill()
    agent.wait(5)
    assert shell(AgentCommands(RUN, "node1").is_alive()) != 0


def busy_share(child: psutil.Popen, *, over_s: float) -> float:
    """The share of the time in which a process is not stopped."""
    samples = []
    end_s = time.monotonic() + over_s
    while time.monotonic() < end_s:
        samples.append(child.status() != psutil.STATUS_STOPPED)
        time.sleep(0.003)
    return sum(samples) / len(samples)


def test_a_slow_worker_is_stopped_for_its_share_of_the_time(worker: psutil.Popen, directory: AgentDir) -> None:
    shares = []
    for _ in range(3):  # a busy machine may hold up the loop that stops it
        assert shell(AgentCommands(RUN, "node1").slow(4.0)) == 0
        slow = busy_share(worker, over_s=1.5)
        assert shell(AgentCommands(RUN, "node1").slow(1.25)) == 0
        shares.append((slow, less_slow := busy_share(worker, over_s=1.5)))
        if 0.1 < slow < 0.5 < less_slow < 1:
            break
    else:
        pytest.fail(f"1/4 and 4/5 were asked for, not {shares}")
    assert shell(AgentCommands(RUN, "node1").slow(1.0)) == 0
    assert busy_share(worker, over_s=0.5) == 1
    assert not directory.pid_file("slow").exists()


def test_the_loop_that_slows_a_worker_ends_with_it(worker: psutil.Popen, directory: AgentDir) -> None:
    assert shell(AgentCommands(RUN, "node1").slow(2.0)) == 0
    time.sleep(0.2)
    loop = psutil.Process(int(directory.pid_file("slow").read_text().split()[0]))
    worker.kill()
    worker.wait(5)
    loop.wait(5)


def test_a_node_that_is_killed_while_it_is_slow_leaves_nothing(
    directory: AgentDir, agent: psutil.Popen, worker: psutil.Popen
) -> None:
    assert shell(AgentCommands(RUN, "node1").slow(2.0)) == 0
    time.sleep(0.2)
    loop = psutil.Process(int(directory.pid_file("slow").read_text().split()[0]))
    assert shell(AgentCommands(RUN, "node1").end()) == 0
    assert (agent.wait(5), worker.wait(5)) == (-9, -9)
    loop.wait(5)


def home_of(directory: AgentDir) -> Path:
    return directory.job_path.parent


def in_the_shell() -> str:
    """Where a shell looks for agents."""
    command = ["/bin/sh", "-c", f'{TEMPORARY_DIRECTORY_SHELL}; printf %s "$temporary"']
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("", False),
        ("/nonexistent", False),
        ("file", False),
        ("relative", False),
        ("of others", False),
        ("plain", True),
        ("plain/", True),
        ("with a space", True),
        ("with\na line", True),
        ("it's $HOME `*", True),
        ("link", True),
    ],
)
def test_python_and_the_shell_agree_on_where_agents_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, usable: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for each in ("relative", "of others", "plain", "with a space", "with\na line", "it's $HOME `*"):
        (tmp_path / each).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "plain")
    (tmp_path / "of others").chmod(0o500)
    named = name if name in ("", "relative") or name.startswith("/") else f"{tmp_path}/{name}"
    if name == "of others" and os.getuid() == 0:
        pytest.skip("root may write anywhere")
    monkeypatch.setenv("TMPDIR", named)
    expected = named if usable else "/tmp"
    assert in_the_shell() == expected
    assert temporary_directory() == Path(expected)


def test_without_a_variable_both_take_the_same_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv("TEMP", "/var/tmp")
    assert in_the_shell() == str(temporary_directory()) == "/tmp"


def test_agents_are_found_where_the_named_directory_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = f"tag-{tmp_path.parent.name}-{tmp_path.name}"
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    directory = AgentDir(run, "node1")
    directory.create()
    for child in process(directory, "agent", "import time; time.sleep(60)"):
        assert shell(AgentCommands(run, "node1").is_alive()) == 0
        assert shell(AgentCommands(run, "node1").kill()) == 0
        assert child.wait(5) == -9
    assert shell(AgentCommands(run, "node1").clean()) == 0
    assert not directory.job_path.exists()


def test_what_a_killed_fork_server_has_left_goes_with_the_last_node(directory: AgentDir) -> None:
    AgentDir(RUN, "node2").create()
    shared = (directory.fork_server_lock, directory.fork_server_pid, directory.fork_server_socket)
    for server in process(directory, "../fork", BUSY):
        directory.fork_server_lock.touch()
        directory.fork_server_socket.touch()
        assert shell(AgentCommands(RUN, "node1").clean()) == 0
        assert not directory.path.exists()
        assert [path.exists() for path in shared] == [True, True, True], "node2 is there"
        assert shell(AgentCommands(RUN, "node2").clean()) == 0
        assert [path.exists() for path in shared] == [False, True, True], "it lives, and removes its files itself"
        server.kill()
        server.wait()
    assert shell(AgentCommands(RUN, "node2").clean()) == 0
    assert not home_of(directory).exists()


def test_memory_goes_unless_it_is_marked_as_the_only_copy_and_that_counts() -> None:
    run = f"test-{os.getpid()}"
    marked, other = AgentDir(run, "node1").memory, AgentDir(run, "node2").memory
    for memory in (marked, other):
        memory.mkdir(parents=True, mode=0o700)
        (memory / "rank0.slots").touch()
    (marked / ONLY_COPY).touch()
    for node in ("node1", "node2"):
        assert shell(AgentCommands(run, node).forget(keeps_only_copy=True)) == 0
    assert [memory.exists() for memory in (marked, other)] == [True, False]
    assert shell(AgentCommands(run, "node1").forget()) == 0
    assert not marked.parent.exists()


def test_cleaning_gives_back_memory_in_which_nothing_was_saved_and_no_other() -> None:
    run = f"test-{os.getpid()}"
    unused, used = AgentDir(run, "node1").memory, AgentDir(run, "node2").memory
    for memory in (unused, used):
        memory.mkdir(parents=True, mode=0o700)
        (memory / MEMORY_OWNER).touch()
    (used / "rank0.slots").touch()
    for node in ("node1", "node2"):
        assert shell(AgentCommands(run, node).clean()) == 0
    assert [memory.exists() for memory in (unused, used)] == [False, True]
    assert shell(AgentCommands(run, "node2").forget()) == 0
    assert not used.parent.exists()


def test_what_somebody_has_put_in_our_place_is_neither_used_nor_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, victim = tmp_path / "shared", tmp_path / "victim"
    for each in (shared, victim):
        each.mkdir()
        each.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(victim))
    bait = AgentDir(RUN, "node1")
    bait.create()
    theirs, note = home_of(bait), bait.pid_file("agent")
    monkeypatch.setenv("TMPDIR", str(shared))
    directory = AgentDir(RUN, "node1")
    home_of(directory).symlink_to(theirs)
    theirs.chmod(0o755)
    with pytest.raises(ConfigError, match="a link"):
        directory.create()
    assert theirs.stat().st_mode & 0o777 == 0o755
    for child in process(bait, "agent", "import time; time.sleep(60)"):
        commands = AgentCommands(RUN, "node1")
        for command in (commands.kill(), commands.end(), commands.clean()):
            shell(command)
        assert child.is_running()
        assert child.status() != psutil.STATUS_ZOMBIE
        assert note.exists()


def test_an_agent_that_ends_leaves_nothing_and_nothing_of_others_goes(directory: AgentDir) -> None:
    other = AgentDir(directory.run_id, "other")
    other.create()
    for each in (directory, other):
        each.answer.touch()
        each.note_process("agent", os.getpid())
    directory.remove()
    assert not directory.path.exists()
    assert other.pid_file("agent").exists()
    other.remove()
    assert not directory.job_path.parent.exists()
