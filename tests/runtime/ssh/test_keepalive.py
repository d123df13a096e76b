"""Connections are asked whether they live while they are silent, and never while they are heard."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import trio

from oobleck.runtime.ssh import serve_local_nodes
from oobleck.runtime.ssh.asyncssh_adapter import Keepalive, open_ssh_loop
from oobleck.runtime.ssh.client import connect
from tests.runtime.ssh_servers import Reachable, until

INTERVAL_S = 0.1


@dataclass
class Connection:
    """In place of asyncssh's: it notes how it is to ask."""

    asked: list[tuple[float, int | None]] = field(default_factory=list)

    def set_keepalive(self, interval: float, count_max: int | None = None) -> None:
        self.asked.append((interval, count_max))

    def is_closed(self) -> bool:
        return False


@asynccontextmanager
async def frozen_on_request(port: int):
    """A port that leads to another, and an event that has it take bytes and pass none on."""
    is_frozen = trio.Event()

    async def pump(source: trio.SocketStream, sink: trio.SocketStream) -> None:
        async for data in source:
            if not is_frozen.is_set():
                await sink.send_all(data)

    async def serve(client: trio.SocketStream) -> None:
        server = await trio.open_tcp_stream("127.0.0.1", port)
        async with server, trio.open_nursery() as nursery:
            nursery.start_soon(pump, client, server)
            nursery.start_soon(pump, server, client)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trio.serve_listeners, serve, [listener]))
        yield listener.socket.getsockname()[1], is_frozen
        nursery.cancel_scope.cancel()


async def test_one_who_is_heard_is_not_asked_and_no_timer_is_set_with_each_packet():
    connection = Connection()
    async with open_ssh_loop():
        keepalive = Keepalive(connection, interval_s=INTERVAL_S, count_max=3)
        for _ in range(30):
            keepalive.note_traffic()
            await trio.sleep(INTERVAL_S / 10)
    assert connection.asked == [(0, None)]


async def test_one_who_falls_silent_is_asked_with_the_interval_counted_that_has_passed():
    connection = Connection()
    async with open_ssh_loop():
        keepalive = Keepalive(connection, interval_s=INTERVAL_S, count_max=3)
        keepalive.note_traffic()
        await until(lambda: len(connection.asked) == 2)
        keepalive.note_traffic()
    assert connection.asked == [(0, None), (INTERVAL_S, 2), (0, None)]


async def test_one_who_is_heard_otherwise_is_asked_seldom_and_whatever_it_says_itself():
    connection = Connection()
    async with open_ssh_loop():
        keepalive = Keepalive(connection, interval_s=INTERVAL_S, count_max=3)
        keepalive.note_traffic()
        keepalive.rest(True)
        keepalive.note_traffic()
        await trio.sleep(3 * INTERVAL_S)
        keepalive.rest(False)
    assert connection.asked == [(0, None), (60.0, 3), (INTERVAL_S, 3)]


async def test_a_node_that_was_heard_and_is_cut_off_is_given_up(tmp_path):
    async with (
        open_ssh_loop(),
        serve_local_nodes(1) as ((node,), options),
        frozen_on_request(node.port) as (port, is_frozen),
    ):
        node, options = replace(node, port=port), replace(options, keepalive_interval_s=INTERVAL_S)
        connection = await connect(node, options)
        stream, owner = await Reachable(node, options, connection).stream_pair(tmp_path)
        async with owner, stream:
            for _ in range(10):
                await owner.send_all(b"alive")
                await trio.sleep(INTERVAL_S / 2)
            assert not connection.is_lost
            is_frozen.set()
            await until(lambda: connection.is_lost)
        await connection.aclose()
