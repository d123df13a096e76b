"""Nodes that dial in over real SSH: who is let in, who is turned away, and who finds the next master."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import psutil
import pytest
import trio

from oobleck.cli.inputs import parse_hostfile
from oobleck.control.protocol import PROTOCOL_VERSION, Greeting, Heartbeat, Hello, Leaving, StopAgent
from oobleck.errors import ConfigError, NodeUnreachable, PeerError, UsageError
from oobleck.job import NodeSpec
from oobleck.runtime.cluster import RemotePaths, SSHCluster
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.launchers import (
    INTRODUCTION,
    Arrived,
    DialedInNodes,
    Introduction,
    NodeChange,
    Reported,
    listen,
    read_pass,
    settle_keys,
)
from oobleck.runtime.launchers import Leaving as LeavingNode
from oobleck.runtime.ssh import Farewell, NodePass, dial_in, make_keys, open_ssh_loop
from tests.runtime.ssh_servers import until

HOST = "127.0.0.1"

NONSENSE = (
    b"GET / HTTP/1.1\r\nHost: master\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    b"SSH-2.0-stranger\r\n" + b"\xff" * 4096,
    b"SSH-1.0-old\r\n",
    b"\0" * 100_000,
)
"""What finds its way to an open port."""


class Master:
    """A launcher that listens, and the file that its nodes need."""

    def __init__(self, launcher: DialedInNodes, file: Path, place: str, nursery: trio.Nursery) -> None:
        self.launcher = launcher
        self.file = file
        self.place = place
        self.nursery = nursery
        self.told: list[NodeChange] = []

    @property
    def port(self) -> int:
        return int(self.place.rpartition(":")[2])

    @property
    def known(self) -> NodePass:
        return read_pass(self.file)

    async def follow(self) -> None:
        reported, changes = trio.open_memory_channel[NodeChange](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.launcher.follow, reported)
            async for change in changes:
                self.told.append(change)


@asynccontextmanager
async def master_in(
    directory: Path,
    *,
    num_first: int = 1,
    renew: bool = False,
    login_timeout_s: float = 10.0,
    calls_again_s: float = 0.1,
    begins_after_s: float = math.inf,
) -> AsyncIterator[Master]:
    """Serve as a master of a run in a directory, within `open_ssh_loop`, until the context ends."""
    listeners, place = await listen(HOST, 0)
    keys, file = settle_keys(directory, master=place, renew=renew)
    launcher = DialedInNodes(
        num_first=num_first,
        parse=parse_hostfile,
        patience_s=5.0,
        login_timeout_s=login_timeout_s,
        calls_again_s=calls_again_s,
        begins_after_s=begins_after_s,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(launcher.serve, listeners, keys)
        master = Master(launcher, file, place, nursery)
        nursery.start_soon(master.follow)
        yield master
        nursery.cancel_scope.cancel()


class Node:
    """A node's side of a connection, in this process."""

    def __init__(self, line: str, process: str = "", *, grant: str = "", keepalive_s: float = 5.0) -> None:
        self.process = process or secrets.token_hex(4)
        self._environment = {INTRODUCTION: str(Introduction(process=self.process, line=line, grant=grant))}
        self._keepalive_s = keepalive_s

    async def call(
        self, master: Master, known: NodePass | None = None, *, port: int | None = None
    ) -> Callable[[], Awaitable[tuple[Farewell, str] | None]]:
        """Dial in; what is returned waits for the end, and returns the master's farewell."""
        return await dial_in(
            HOST,
            port or master.port,
            known or master.known,
            environment=self._environment,
            nursery=master.nursery,
            keepalive_s=self._keepalive_s,
        )

    async def live(self, master: Master) -> None:
        """Dial in, and again until a master says farewell, as `oobleck node` does."""
        farewell = None
        while farewell is None:
            try:
                farewell = await (await self.call(master))()
            except NodeUnreachable:
                await trio.sleep(0.1)


async def test_a_node_that_dials_in_is_reached_through_its_own_connection(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        await Node("worker3 slots=2 address=lo").call(master)
        (node,) = await master.launcher.begin()
        assert node == NodeSpec(name="worker3", host=HOST, devices=(0, 1), address="lo")
        connection = await master.launcher.connect(node)
        assert connection.peer_address == HOST
        assert not connection.takes_calls, "what it called from may be behind a firewall"
        done = await connection.run("cat; exit 3", stdin=b"hello", timeout_s=5)
        assert (done.exit_status, done.stdout) == (3, b"hello")
        assert master.launcher.named("worker3") == node
        with pytest.raises(UsageError, match=r"'worker4' has dialled in; there are worker3"):
            master.launcher.named("worker4")


async def test_a_run_begins_once_enough_nodes_are_there_and_hears_of_those_that_come_later(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys", num_first=2) as master:
        await Node("a").call(master)
        with trio.move_on_after(0.1) as waiting:
            await master.launcher.begin()
        assert waiting.cancelled_caught
        await Node("b").call(master)
        assert [node.name for node in await master.launcher.begin()] == ["a", "b"]
        await Node("c").call(master)
        await until(lambda: master.told)
        (arrived,) = master.told
        assert isinstance(arrived, Arrived)
        assert arrived.node.name == "c"


async def test_nodes_of_an_earlier_master_are_waited_for_until_enough_are_there_to_begin_with(tmp_path: Path) -> None:
    left = [NodeSpec(name=name, host="before") for name in ("a", "b")]
    async with open_ssh_loop(), master_in(tmp_path / "keys", num_first=3) as master:
        await Node("new").call(master)
        with trio.move_on_after(0.2) as waiting:
            await master.launcher.found_again(left, set())
        assert waiting.cancelled_caught
        master.nursery.start_soon(Node("b").call, master)
        assert await master.launcher.found_again(left, {"a", "b"}) == (), "all were asked"
        (found,) = await master.launcher.found_again(left, set())
        assert (found.name, found.host) == ("b", HOST)
        await Node("other").call(master)
        assert await master.launcher.found_again(left, {"b"}) == []


async def test_a_run_that_may_begin_with_fewer_nodes_waits_as_long_for_those_of_an_earlier_master(
    tmp_path: Path,
) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys", num_first=3, begins_after_s=0.3) as master:
        began_s = trio.current_time()
        assert await master.launcher.found_again([NodeSpec(name="a", host="before")], set()) == []
        assert trio.current_time() - began_s >= 0.3
        await Node("new").call(master)
        with trio.fail_after(0.2):  # the same time is not waited twice
            assert [node.name for node in await master.launcher.begin()] == ["new"]


async def test_a_node_with_another_key_is_turned_away_and_reported_once(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        _, strangers = make_keys(master=master.place)
        posing = replace(strangers, master_key=master.known.master_key)
        for _ in range(2):
            with pytest.raises(NodeUnreachable, match="knows another key"):
                await Node("a").call(master, posing)
        assert master.launcher.nodes == ()
        await until(lambda: master.told)
        assert master.told == [
            Reported(
                level="warning",
                text=f"a node at {HOST} has dialled in with another key than this run's; it is turned away",
            )
        ]


async def test_a_node_serves_no_master_without_the_runs_key(tmp_path: Path) -> None:
    """One that has the nodes' public key alone, as all see it who ever connected to it."""
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        _, others = make_keys(master=master.place)
        posing = replace(master.known, master_key=others.master_key)
        with pytest.raises(NodeUnreachable, match="no master of this run answers"):
            await Node("a").call(master, posing)
        await until(lambda: master.told)
        (told,) = master.told
        assert isinstance(told, Reported)
        assert "expects another run's master" in told.text
        assert master.launcher.nodes == ()


async def test_keys_outlive_a_master_and_end_with_their_run(tmp_path: Path) -> None:
    async with open_ssh_loop():
        async with master_in(tmp_path / "keys") as master:
            old = master.known
            await Node("a").call(master)
        async with master_in(tmp_path / "keys") as master:
            assert master.known == replace(old, master=master.place)
            await Node("a").call(master, old)
        async with master_in(tmp_path / "keys", renew=True) as master:
            with pytest.raises(NodeUnreachable, match="knows another key"):
                await Node("a").call(master, old)
            await Node("a").call(master)
    files = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in files] == ["master.json", "node.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert json.loads(files[0].read_text())["own_key"] not in files[1].read_text()


async def test_callers_that_say_nothing_or_nonsense_delay_nobody_and_are_dropped(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys", login_timeout_s=1.0) as master:
        silent = [await trio.open_tcp_stream(HOST, master.port) for _ in range(60)]
        for stream, nonsense in zip(silent, NONSENSE, strict=False):
            with suppress(trio.BrokenResourceError):  # it is dropped at its first bytes, while others are on their way
                await stream.send_all(nonsense)
        master.nursery.start_soon(Node("a").live, master)
        with trio.fail_after(60):
            await master.launcher.begin()
            for stream in silent:
                with suppress(trio.BrokenResourceError):
                    while await stream.receive_some():  # what it says before it gives up
                        pass
                await stream.aclose()
        assert [node.name for node in master.launcher.nodes] == ["a"]


async def test_a_port_where_nobody_answers_does_not_hold_a_node_up(tmp_path: Path) -> None:
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host=HOST)
        async with listener:
            port = listener.socket.getsockname()[1]
            _, known = make_keys(master=f"{HOST}:{port}")
            with trio.fail_after(10), pytest.raises(NodeUnreachable, match="no master of this run answers"):
                await dial_in(HOST, port, known, environment={}, nursery=nursery, login_timeout_s=0.3)
        with pytest.raises(NodeUnreachable, match="nothing listens there"):
            await dial_in(HOST, port, known, environment={}, nursery=nursery)


async def test_a_node_whose_connection_is_half_open_replaces_it(tmp_path: Path) -> None:
    """The master cannot know yet that the old one leads nowhere."""
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        first_ended = await Node("a", process="1").call(master)
        (node,) = await master.launcher.begin()
        old = await master.launcher.connect(node)
        await Node("a", process="1").call(master)
        with trio.fail_after(30):
            assert await first_ended() is None, "no farewell: it may call again"
        new = await master.launcher.connect(node)
        assert (old.is_lost, new.is_lost) == (True, False)
        assert master.told == [], "it is the same node"


class Cable:
    """Between a node and the master, and may be cut, or lead nowhere while both ends believe in it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.leads_nowhere = False
        self.said = bytearray()
        """What the side that called has said."""
        self._ends: list[trio.SocketStream] = []

    async def serve(self, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host=HOST)
        async with listener, trio.open_nursery() as nursery:
            task_status.started(listener.socket.getsockname()[1])
            try:
                while True:
                    caller = await listener.accept()
                    try:
                        called = await trio.open_tcp_stream(HOST, self.port)
                    except OSError:
                        await caller.aclose()
                        continue
                    self._ends += caller, called
                    nursery.start_soon(self._pass_on, caller, called, self.said)
                    nursery.start_soon(self._pass_on, called, caller, bytearray())
            finally:
                await self.cut()

    async def _pass_on(self, source: trio.SocketStream, target: trio.SocketStream, noted: bytearray) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await source.receive_some():
                if self.leads_nowhere:
                    await trio.sleep_forever()
                noted += data
                await target.send_all(data)

    async def cut(self) -> None:
        for end in self._ends:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(end)


async def test_a_node_notices_that_its_connection_leads_nowhere(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        cable = Cable(master.port)
        port = await master.nursery.start(cable.serve)
        ended = await Node("a", keepalive_s=0.1).call(master, port=port)
        await master.launcher.begin()
        cable.leads_nowhere = True
        with trio.fail_after(20):
            assert await ended() is None, "no farewell: it may call again"


async def test_what_a_node_has_said_lets_nobody_in_who_says_it_again(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        cable = Cable(master.port)
        ended = await Node("a").call(master, port=await master.nursery.start(cable.serve))
        (node,) = await master.launcher.begin()
        await master.launcher.release(node)
        with trio.fail_after(30):
            await ended()
        assert len(cable.said) > 1000
        stream = await trio.open_tcp_stream(HOST, master.port)
        async with stream:
            with trio.fail_after(20), suppress(trio.BrokenResourceError):
                await stream.send_all(bytes(cable.said))
                while await stream.receive_some():
                    pass
        assert master.launcher.nodes == ()


@pytest.mark.parametrize(
    ("cut", "calls", "is_gone"),
    [("a", 1, True), ("a", 2, False), ("ab", 1, False)],
    ids=["ended alone", "called again", "cut off with others"],
)
async def test_a_node_that_ends_alone_is_gone(tmp_path: Path, cut: str, calls: int, *, is_gone: bool) -> None:
    async def live(name: str, master: Master, port: int) -> None:
        for _ in range(calls):
            ended = await Node(name, process=name).call(master, port=port)
            if await ended() is not None:
                return

    calls_again_s = 0.1 if calls == 1 else 20.0
    async with (
        open_ssh_loop(),
        master_in(tmp_path / "keys", num_first=3, calls_again_s=calls_again_s) as master,
        trio.open_nursery() as living,
    ):
        cables = {name: Cable(master.port) for name in "abc"}
        for name, cable in cables.items():
            living.start_soon(live, name, master, await master.nursery.start(cable.serve))
        nodes = {node.name: node for node in await master.launcher.begin()}
        old = [await master.launcher.connect(nodes[name]) for name in cut]
        for name in cut:
            await cables[name].cut()
        await until(lambda: all(connection.is_lost for connection in old))
        assert await master.launcher.has_ended(nodes["a"]) == is_gone
        await until(lambda: len(master.launcher.nodes) == 3 - (len(cut) if calls == 1 else 0))
        for node in nodes.values():
            await master.launcher.release(node)


async def test_the_newest_process_of_a_name_is_the_node(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        ended = await Node("a").call(master)
        await master.launcher.begin()
        await Node("a").call(master)
        with trio.fail_after(30):
            assert await ended() == (Farewell.REPLACED, "another `oobleck node` has dialled in as a")
        await until(lambda: master.told)
        assert [type(change) for change in master.told] == [Arrived]


@pytest.mark.parametrize("line", ["two words=", "a[1-2]", ""])
async def test_a_node_that_says_nonsense_of_itself_is_told_so(tmp_path: Path, line: str) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        ended = await Node(line).call(master)
        with trio.fail_after(30):
            farewell = await ended()
        assert farewell is not None
        assert farewell[0] is Farewell.REFUSED
        assert master.launcher.nodes == ()


@pytest.mark.parametrize("grant", ["", "pod-1", "pod-2"])
async def test_a_node_that_was_given_back_and_is_started_again_in_its_place_waits_to_be_asked_for(
    tmp_path: Path, grant: str
) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        ended = await Node("a", grant=grant and "pod-1").call(master)
        (node,) = await master.launcher.begin()
        await master.launcher.release(node)
        with trio.fail_after(30):
            assert await ended() == (Farewell.RELEASED, "the run no longer needs this node")
        await Node("a", grant=grant).call(master)
        await until(lambda: master.told)
        (told,) = master.told
        if grant == "pod-1":
            assert isinstance(told, Reported)
            assert "`oobleck add a` takes it in" in told.text
            assert master.launcher.named("a") == node
        else:
            assert told == Arrived(node=node, by_itself=not grant)


async def test_a_node_leaves_by_name_where_it_is_here(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        await Node("a").call(master)
        await master.launcher.begin()
        master.launcher.leave("b")
        master.launcher.leave("a")
        await until(lambda: master.told)
        assert master.told == [LeavingNode(node="a")]


@pytest.mark.parametrize("origin", ["two\nlines", "\x1b[31mred", "x" * 1000])
def test_an_origin_that_would_spoil_a_terminal_is_refused(origin: str) -> None:
    said = str(Introduction(process="1", line="a", origin=origin)).encode()
    with pytest.raises(PeerError, match="one short line"):
        Introduction.parse(said)


async def test_a_node_that_does_not_call_again_is_unreachable_in_words(tmp_path: Path) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys"):
        launcher = DialedInNodes(num_first=1, parse=parse_hostfile, patience_s=0.1)
        with pytest.raises(NodeUnreachable, match=r"within 0\.1 s; is `oobleck node` running there\?"):
            await launcher.connect(NodeSpec(name="gone", host=HOST))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_nodes_dial_in_at_once(tmp_path: Path, count: int) -> None:
    """All of them are in this process: where it is busy, some do not get in at once or lose their connection."""
    async with open_ssh_loop(), master_in(tmp_path / "keys", num_first=count, login_timeout_s=60) as master:
        for index in range(count):
            master.nursery.start_soon(Node(f"n{index}").live, master)
        with trio.fail_after(120):
            nodes = await master.launcher.begin()
        assert {node.name for node in nodes} == {f"n{index}" for index in range(count)}


@pytest.mark.parametrize("content", ["", "{}", '{"@type": "NodePass", "master": "a:1"}'])
def test_a_file_that_holds_no_keys_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "node.json").write_text(content)
    with pytest.raises(ConfigError, match=r"node\.json: not the keys of a run"):
        read_pass(tmp_path / "node.json")


# --- `oobleck node`, as a process ----------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `oobleck node`; what is left of it at the end is killed."""
    processes: list[subprocess.Popen[str]] = []
    temporary = tempfile.mkdtemp(prefix="oo-", dir="/tmp")  # short, for sockets' paths are
    environment = {**os.environ, "TMPDIR": temporary, "HOME": str(tmp_path)}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oobleck", "node", *arguments]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
    shutil.rmtree(temporary)


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and what was said."""
    with trio.fail_after(20):
        _, said = await trio.to_thread.run_sync(process.communicate, abandon_on_cancel=True)
    return process.returncode, said


def cluster_of(master: Master, home: Path) -> SSHCluster:
    base = PurePosixPath(home / "base")
    return SSHCluster(
        "tag",
        master.launcher.nodes,
        run_id="tag-01234567",
        connections=NodeConnections(master.launcher),
        paths=RemotePaths(python="python3", base_dir=base, cache_dir=base / "cache"),
    )


async def test_a_node_and_its_agent_outlive_a_master_and_leave_on_notice(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    async with open_ssh_loop():
        async with master_in(tmp_path / "keys") as master:
            process = started(str(master.file), "worker3")
            (node,) = await master.launcher.begin()
            agent = await cluster_of(master, tmp_path).reach(node, attach=False)
            await agent.send([Greeting(protocol=PROTOCOL_VERSION, tag="tag")])
            hello = await agent.receive()
            assert isinstance(hello, Hello)
        async with master_in(tmp_path / "keys") as master:  # at another port
            await master.launcher.begin()
            agent = await cluster_of(master, tmp_path).reach(node, attach=True)
            await agent.send([Greeting(protocol=PROTOCOL_VERSION, tag="tag")])
            again = await agent.receive()
            assert isinstance(again, Hello)
            assert again.pid == hello.pid, "it is the agent that the master before has started"
            process.send_signal(signal.SIGTERM)
            while not isinstance(message := await agent.receive(), Leaving):
                assert isinstance(message, Heartbeat)
            assert "SIGTERM" in message.reason
            assert process.poll() is None, "it waits for its agent"
            await agent.send([StopAgent(reason="drained", is_dismissal=True)])
            code, said = await ended(process)
    assert code == 0, said
    assert said.count("serves the master at") == 2
    assert "SIGTERM: the run is asked to let this node go" in said


async def test_a_node_finds_the_next_master_where_the_one_before_was_killed(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    """Behind one address, as a Service of Kubernetes is: nothing says farewell, and nobody listens for a while."""
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        async with master_in(tmp_path / "keys") as master:
            cable = Cable(master.port)
            place = f"{HOST}:{await nursery.start(cable.serve)}"
            process = started(str(master.file), "worker3", "--master", place)
            (node,) = await master.launcher.begin()
            await cable.cut()
        async with master_in(tmp_path / "keys") as master:
            cable.port = master.port
            assert await master.launcher.begin() == (node,)
            await master.launcher.release(node)
            code, said = await ended(process)
        nursery.cancel_scope.cancel()
    assert code == 0, said
    assert said.count(f"serves the master at {place}") == 2


async def test_orphans_of_a_node_leave_no_zombies_and_commands_keep_their_exit_codes(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys") as master:
        process = started(str(master.file), "a")
        connection = await master.launcher.connect((await master.launcher.begin())[0])
        found = await connection.run("sleep 0.1 >/dev/null 2>&1 & echo $!; exit 3", timeout_s=5)
        assert found.exit_status == 3
        orphan = int(found.stdout)
        assert psutil.Process(orphan).ppid() == process.pid
        with trio.fail_after(20):
            while psutil.pid_exists(orphan):
                assert (await connection.run("exit 3", timeout_s=5)).exit_status == 3
        await master.launcher.release(master.launcher.nodes[0])
        assert (await ended(process))[0] == 0


async def test_a_node_that_is_released_ends_and_one_without_an_agent_ends_at_once(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
) -> None:
    async with open_ssh_loop(), master_in(tmp_path / "keys", num_first=2) as master:
        processes = {name: started(str(master.file), name) for name in ("a", "b")}
        nodes = {node.name: node for node in await master.launcher.begin()}
        await master.launcher.release(nodes["a"])
        code, said = await ended(processes["a"])
        assert (code, "the run no longer needs this node" in said) == (0, True)
        processes["b"].send_signal(signal.SIGTERM)
        assert (await ended(processes["b"]))[0] == 0
