"""The SSH server for virtual nodes: what only it promises. What it shares with sshd is in test_ssh.py."""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import suppress
from dataclasses import replace

import asyncssh
import psutil
import pytest
import trio

from oobleck.errors import NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.runtime.ssh import serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import await_asyncio, open_ssh_loop
from oobleck.runtime.ssh.client import SSHOptions, connect
from tests.runtime.ssh_servers import reach, until
from tests.runtime.test_listening import no_descriptor_left


def listening_ports() -> set[tuple[str, int]]:
    """(address, port) of everything that this process listens on."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}


async def test_each_virtual_node_has_a_name_and_a_port_of_its_own_on_loopback():
    before = listening_ports()
    async with open_ssh_loop(), serve_local_nodes(3) as (nodes, options):
        assert [node.name for node in nodes] == ["node0", "node1", "node2"]
        assert listening_ports() - before == {("127.0.0.1", node.port) for node in nodes}
        for node in nodes:
            connection = await connect(node, options)
            assert connection.peer_address == "127.0.0.1"
            await connection.aclose()
    assert listening_ports() == before


async def test_keys_are_of_one_run_and_touch_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    async with open_ssh_loop():
        seen = []
        for _ in range(2):
            async with serve_local_nodes(1) as ((node,), options):
                await (await connect(node, options)).aclose()
                seen.append((options.client_keys, options.host_keys))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]
    assert list(tmp_path.iterdir()) == []


async def test_it_forwards_no_tcp_ports_and_opens_none(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        options = reachable.options.for_node(reachable.node)
        connection = await await_asyncio(asyncssh.connect, reachable.node.host, **options)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            with pytest.raises(asyncssh.ChannelOpenError):
                await await_asyncio(connection.open_connection, *listener.getsockname())
        with pytest.raises(asyncssh.ChannelListenError):
            await await_asyncio(connection.forward_remote_port, "127.0.0.1", 0, "127.0.0.1", 1)
        connection.close()
        await await_asyncio(connection.wait_closed)


async def test_commands_are_out_of_reach_of_the_terminals_ctrl_c(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        done = await reachable.connection.run("ps -o sid= -p $$", timeout_s=10)
        assert int(done.stdout) != os.getsid(0)


async def test_commands_under_way_end_with_the_server(tmp_path):
    begun = tmp_path / "begun"
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        async with serve_local_nodes(1) as ((node,), options):
            connection = await connect(node, options)

            async def run() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await connection.run(f"echo $$ > {begun}.tmp; mv {begun}.tmp {begun}; sleep 30", timeout_s=60)

            nursery.start_soon(run)
            await until(begun.exists)
            shell = psutil.Process(int(begun.read_text()))
            children = [shell, *shell.children()]
        await connection.aclose()
        await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children))


async def test_a_signal_reaches_all_that_a_command_has_started(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        options = reachable.options.for_node(reachable.node)
        connection = await await_asyncio(asyncssh.connect, reachable.node.host, **options)
        script = f"trap 'echo caught; exit 3' TERM; touch {tmp_path}/begun; sleep 30 & wait"
        process = await await_asyncio(connection.create_process, script)
        await until((tmp_path / "begun").exists)
        process.send_signal("TERM")
        done = await await_asyncio(process.wait)
        assert (done.exit_status, done.stdout) == (3, "caught\n")
        connection.close()
        await await_asyncio(connection.wait_closed)


async def test_a_command_that_closes_its_input_early_does_no_harm(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        done = await reachable.connection.run("exec <&-; echo fine", stdin=b"x" * (1 << 20), timeout_s=10)
        assert (done.exit_status, done.stdout) == (0, b"fine\n")
        assert (await reachable.connection.run("echo again", timeout_s=10)).stdout == b"again\n"


async def test_signals_that_do_not_exist_are_ignored(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        options = reachable.options.for_node(reachable.node)
        connection = await await_asyncio(asyncssh.connect, reachable.node.host, **options)
        process = await await_asyncio(connection.create_process, "read line; echo $line")
        process.send_signal("NONSENSE")
        process.stdin.write("fine\n")
        done = await await_asyncio(process.wait)
        assert done.stdout == "fine\n"
        connection.close()
        await await_asyncio(connection.wait_closed)


async def test_status_of_a_killed_command_is_that_of_a_shell(tmp_path):
    async with reach("embedded", tmp_path) as reachable:
        done = await reachable.connection.run("kill -9 $$", timeout_s=10)
        assert done.exit_status == 128 + signal.SIGKILL


async def test_sixteen_connections_at_once_are_served():
    async with open_ssh_loop(), serve_local_nodes(4) as (nodes, options):
        answers = []

        async def ask(node: NodeSpec, options: SSHOptions) -> None:
            connection = await connect(node, options)
            answers.append((await connection.run("echo fine", timeout_s=20)).stdout)
            await connection.aclose()

        async with trio.open_nursery() as nursery:
            for index in range(16):
                nursery.start_soon(ask, nodes[index % 4], options)
        assert answers == [b"fine\n"] * 16


def connections_to(port: int) -> int:
    """How many connections to a port this process holds at the server's end."""
    held = psutil.Process().net_connections(kind="tcp")
    return sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in held)


async def test_idle_connections_hold_few_descriptors_and_keep_nobody_out():
    """Anybody on this machine may connect, and say nothing."""
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options):
        idle = [socket.create_connection((node.host, node.port)) for _ in range(200)]
        try:
            connection = await connect(node, options)
            assert (await connection.run("echo fine", timeout_s=10)).stdout == b"fine\n"
            await until(lambda: connections_to(node.port) <= 40)
            await connection.aclose()
        finally:
            for each in idle:
                each.close()


async def test_the_server_outlives_a_lack_of_descriptors(caplog: pytest.LogCaptureFixture):
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options):
        waiting = [socket.socket() for _ in range(5)]
        with no_descriptor_left():
            for each in waiting:
                each.connect((node.host, node.port))
            await until(lambda: "no client can be accepted" in caplog.text)
            await trio.sleep(0.3)
        assert caplog.text.count("no client can be accepted") == 1
        connection = await connect(node, options)
        assert (await connection.run("echo fine", timeout_s=10)).stdout == b"fine\n"
        await connection.aclose()
        for each in waiting:
            each.close()


LAST_BEFORE_ITS_RIGHTS = 5
"""The part of what a caller says after which asyncssh reads its options again."""


@pytest.mark.parametrize("parts", [1, *[LAST_BEFORE_ITS_RIGHTS] * 40, 7])
async def test_a_server_may_end_in_the_midst_of_a_login(parts: int) -> None:
    async with open_ssh_loop(), serve_local_nodes(1) as ((node,), options), trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        passed_on = trio.Event()
        nursery.start_soon(pass_on, listener, node.port, parts, passed_on)
        port = listener.socket.getsockname()[1]
        nursery.start_soon(call, replace(node, port=port), options)
        await passed_on.wait()
        await trio.sleep(random.uniform(0.0, 0.003))
        nursery.cancel_scope.cancel()


async def call(node: NodeSpec, options: SSHOptions) -> None:
    with suppress(NodeUnreachable):
        await (await connect(node, options)).run("sleep 60", timeout_s=60)


async def pass_on(listener: trio.SocketListener, port: int | None, parts: int, passed_on: trio.Event) -> None:
    """Pass on what a server says, and so many parts of what one caller does."""
    assert port is not None
    async with (
        listener,
        await listener.accept() as caller,
        await trio.open_tcp_stream("127.0.0.1", port) as server,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(copy, server, caller)
        for _ in range(parts):
            await server.send_all(await caller.receive_some())
        passed_on.set()


async def copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        async for part in source:
            await target.send_all(part)
