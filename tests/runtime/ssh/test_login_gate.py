"""Who comes in where many wait before the door."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from oobleck.runtime.ssh.login_gate import LoginGate

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
                    await stream.send_all(b"SSH-2.0-node\r\n")
                    if await stream.receive_some(2):
                        return
            except (OSError, trio.BrokenResourceError):
                pass  # turned away: once more

    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    gate = LoginGate(let_in, max_logins=4, least_s=0.002, login_timeout_s=5.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gate.serve, listener)
        with trio.fail_after(20):
            async with trio.open_nursery() as callers:
                for _ in range(20):
                    callers.start_soon(partial(call, listener.socket.getsockname()[1]))
        nursery.cancel_scope.cancel()
    assert came_in >= 20


class Door:
    """A gate under way, which lets in whoever says the key."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.in_from: list[str] = []
        self.held: list[socket.socket] = []

    def call(self, words: bytes, *, host: str = HOST) -> socket.socket:
        """Connect from an address of this machine, and say something."""
        caller = socket.create_connection((HOST, self.port), source_address=(host, 0))
        caller.sendall(words)
        self.held.append(caller)
        return caller

    async def comes_in(self, host: str = HOST, *, within_s: float = 5.0) -> None:
        """Call with the key, and wait until let in."""
        begun = len(self.in_from)
        self.call(b"SSH-key", host=host)
        with trio.fail_after(within_s):
            while host not in self.in_from[begun:]:  # noqa: ASYNC110  nothing tells
                await trio.sleep(0.01)


@asynccontextmanager
async def door(*, max_logins: int = 4, max_waiting: int = 8, login_timeout_s: float = 60.0) -> AsyncIterator[Door]:
    async def let_in(caller: socket.socket) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(caller))
        async with stream:
            said = b""
            while not said.endswith(b"key"):
                if not (more := await stream.receive_some()):
                    return
                said += more
            opened.in_from.append(str(stream.socket.getpeername()[0]))

    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    opened = Door(listener.socket.getsockname()[1])
    keeper = LoginGate(
        let_in, max_logins=max_logins, max_waiting=max_waiting, least_s=60.0, login_timeout_s=login_timeout_s
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.serve, listener)
        yield opened
        nursery.cancel_scope.cancel()
    for each in opened.held:
        each.close()


@pytest.mark.parametrize("words", [b"", b"SS", b"nonsense"], ids=["silent", "slow", "nonsense"])
async def test_a_flood_of_callers_that_do_not_begin_keeps_nobody_out_of_the_same_address(words: bytes) -> None:
    async with door() as opened:
        for _ in range(4):
            for _ in range(20):
                opened.call(words)
            await opened.comes_in()


async def test_callers_that_begin_and_stall_keep_nobody_out_of_another_address() -> None:
    """They hold all places for as long as they may; the next place is for an address that has none."""
    async with door(max_logins=4, max_waiting=50, login_timeout_s=0.5) as opened:
        for _ in range(40):
            opened.call(b"SSH-")
        await trio.sleep(0.2)
        await opened.comes_in("127.0.0.2", within_s=2.0)


async def test_silent_callers_of_one_address_push_out_their_own_and_not_those_of_another() -> None:
    async with door(max_waiting=8) as opened:
        other = opened.call(b"", host="127.0.0.2")
        await trio.sleep(0.1)
        for _ in range(50):
            opened.call(b"")
        await trio.sleep(0.2)
        other.sendall(b"SSH-key")
        with trio.fail_after(5):
            while "127.0.0.2" not in opened.in_from:  # noqa: ASYNC110  nothing tells
                await trio.sleep(0.01)


async def test_a_silent_caller_is_turned_away_in_time() -> None:
    async with door(login_timeout_s=0.2) as opened:
        caller = opened.call(b"")
        caller.settimeout(5)
        assert await trio.to_thread.run_sync(caller.recv, 1) == b""
