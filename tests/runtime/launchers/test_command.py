"""A command that prints a hostfile: what it says is followed, and what it cannot say changes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError
from oobleck.runtime.launchers import Arrived, HostsCommand, Leaving, ListedNodes, NodeChange, Reported
from oobleck.runtime.ssh import SSHOptions
from tests.processes import all_to_end, no_new_processes, noted_by


class Playing:
    """A list that says one thing after the other; the last one again and again."""

    name = "--hosts-from"
    source = "--hosts-from 'ask'"
    interval_s = 10.0

    def __init__(self, *versions: str | ConfigError) -> None:
        self._versions = list(versions)
        self.asked_s: list[float] = []

    async def read(self) -> str:
        self.asked_s.append(trio.current_time())
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        if isinstance(version, ConfigError):
            raise version
        return version


def words(change: NodeChange) -> str:
    match change:
        case Arrived(node=spec):
            return f"+{spec.name}"
        case Leaving(node=node):
            return f"-{node}"
        case Reported(level=level, text=text):
            return f"{level}: {text}"


async def follow(listed: HostsCommand, *, for_s: float) -> list[str]:
    """What a launcher of this list, which began with a and b, reports in so many seconds."""
    launcher = ListedNodes(listed, "a\nb\n", parse=parse_hostfile, options=SSHOptions())
    reported, changes = trio.open_memory_channel[NodeChange](100)
    with trio.move_on_after(for_s):
        await launcher.follow(reported)
    reported.close()
    return [words(change) async for change in changes]


async def test_nodes_that_appear_join_and_those_that_vanish_leave(autojump_clock: MockClock) -> None:
    listed = Playing("a\nb\n", "b\nc\n")
    assert await follow(listed, for_s=60) == ["+c", "-a"]
    assert listed.asked_s == [10, 20, 30, 40, 50]


async def test_what_is_said_once_alone_is_not_believed(autojump_clock: MockClock) -> None:
    """A service that forgets machines for a moment must not cost them."""
    assert await follow(Playing("a\n", "a\nb\n", "b\na\n"), for_s=100) == []


async def test_a_command_that_fails_warns_once_and_is_followed_again_later(autojump_clock: MockClock) -> None:
    fails = ConfigError("--hosts-from 'ask' failed with exit status 1: no credentials")
    reported = await follow(Playing(fails, fails, fails, "a\n"), for_s=100)
    assert reported == [f"warning: --hosts-from is not followed: {fails}", "-b"]


@pytest.mark.parametrize(("nonsense", "named"), [("<html>\n", "'<html>'"), ("", "names no node")])
async def test_nonsense_warns_and_drains_nobody(nonsense: str, named: str, autojump_clock: MockClock) -> None:
    (reported,) = await follow(Playing(nonsense), for_s=100)
    assert reported.startswith("warning: --hosts-from is not followed: --hosts-from 'ask'")
    assert named in reported


async def test_what_a_command_prints_is_its_answer() -> None:
    assert await HostsCommand(command="echo a; echo noise >&2; echo b").read() == "a\nb\n"


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo a; echo first >&2; echo no credentials >&2; exit 3", "failed with exit status 3: no credentials"),
        ("kill -9 $$", "failed with exit signal 9"),
        ("nonexistent-discovery", "status 127"),
        ("printf '\\377\\376'", "not UTF-8 text"),
        ("yes node1", "more than 4 MiB"),
    ],
)
async def test_a_command_that_says_nothing_useful_is_named_with_its_reason(command: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await HostsCommand(command=command).read()
    assert str(raised.value).startswith(f"--hosts-from {command!r} ")
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("wait", id="the shell waits"),
        pytest.param("echo node1", id="the shell has ended"),
    ],
)
async def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path, last: str) -> None:
    noted = tmp_path / "pids"
    hangs = HostsCommand(command=f"sleep 1000 & echo $! >{noted}; echo asking >&2; {last}", timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"did not end within 0\.5 s: asking"):
        await hangs.read()
    (pid,) = noted_by(noted)
    await all_to_end([pid])


async def test_a_child_that_keeps_none_of_the_output_may_outlive_its_command(tmp_path: Path) -> None:
    """Such as an SSH connection that the next question shares."""
    noted = tmp_path / "pids"
    stays = HostsCommand(command=f"sleep 1000 >/dev/null 2>&1 & echo $! >{noted}; echo node1")
    assert await stays.read() == "node1\n"
    (pid,) = noted_by(noted)
    os.kill(pid, signal.SIGTERM)  # which fails if it is gone
    await all_to_end([pid])


async def test_a_command_that_cannot_be_started_for_a_while_is_reported_and_followed_afterwards(
    tmp_path: Path,
) -> None:
    listed = HostsCommand(command=f"echo >>{tmp_path}/asked; echo a; echo c", interval_s=0.05)
    launcher = ListedNodes(listed, "a\nb\n", parse=parse_hostfile, options=SSHOptions())
    send, changes = trio.open_memory_channel[NodeChange](100)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(launcher.follow, send)
        with trio.fail_after(20):
            with no_new_processes():
                first = words(await changes.receive())
            assert not (tmp_path / "asked").exists()
            assert [words(await changes.receive()) for _ in range(2)] == ["+c", "-b"]
        nursery.cancel_scope.cancel()
    problem = f"{listed.source} cannot be started: Too many open files"
    assert first == f"warning: --hosts-from is not followed: {problem}"
