"""A command that prints a hostfile: what it says is followed, and what it cannot say changes nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError
from oobleck.runtime.launchers import Arrived, HostsCommand, Leaving, ListedNodes, NodeChange, Reported
from oobleck.runtime.ssh import SSHOptions


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


async def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    hangs = HostsCommand(command=f"sleep 1000 & echo $! >{tmp_path}/pid; echo asking >&2; wait", timeout_s=0.5)
    with pytest.raises(ConfigError, match=r"did not end within 0\.5 s: asking"):
        await hangs.read()
    pid = int((tmp_path / "pid").read_text())
    try:
        await until(lambda: not lives(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        await trio.sleep(0.02)
