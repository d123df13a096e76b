"""Who comes in where many wait before the door."""

from __future__ import annotations

import socket
from functools import partial

import trio

from oobleck.runtime.ssh.doorkeeper import Doorkeeper

HOST = "127.0.0.1"


async def test_callers_that_are_turned_away_come_in_later_however_slow_the_machine_is():
    """Each has others turned away that are nearly in. If that went on, none would ever be in."""
    came_in = 0

    async def let_in(caller: socket.socket) -> None:
        nonlocal came_in
        with caller:
            await trio.sleep(0.2)
            came_in += 1
            await trio.SocketStream(trio.socket.from_stdlib_socket(caller)).send_all(b"in")

    async def call(port: int) -> None:
        while True:
            try:
                async with await trio.open_tcp_stream(HOST, port) as stream:
                    if await stream.receive_some(2):
                        return
            except (OSError, trio.BrokenResourceError):
                pass  # turned away: once more

    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    doorkeeper = Doorkeeper(let_in, max_logins=4, least_s=0.002, login_timeout_s=5.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(doorkeeper.serve, listener)
        with trio.fail_after(20):
            async with trio.open_nursery() as callers:
                for _ in range(20):
                    callers.start_soon(partial(call, listener.socket.getsockname()[1]))
        nursery.cancel_scope.cancel()
    assert came_in >= 20
