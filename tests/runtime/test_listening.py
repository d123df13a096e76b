"""Clients are served as there is room for them, and a lack of descriptors ends nobody."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import trio

from oobleck.runtime.listening import serve_clients

from .ssh_servers import until


async def echo(stream: trio.SocketStream) -> bytes:
    async for data in stream:
        await stream.send_all(data)
    return b""


@asynccontextmanager
async def serving(max_clients: int) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(lambda: serve_clients(echo, listeners, max_clients=max_clients, timeout_s=60))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def asked(stream: trio.SocketStream) -> bytes:
    await stream.send_all(b"?")
    return await stream.receive_some(1)


async def test_a_client_too_many_waits_until_another_has_left():
    async with serving(max_clients=2) as port:
        first, second, third = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        assert await asked(first) == await asked(second) == b"?"
        with trio.move_on_after(0.2) as patience:
            await asked(third)
        assert patience.cancelled_caught
        await first.aclose()
        with trio.fail_after(30):
            assert await third.receive_some(1) == b"?"
        for stream in (second, third):
            await stream.aclose()


async def test_it_goes_on_when_there_are_descriptors_again(caplog: pytest.LogCaptureFixture):
    async with serving(max_clients=9) as port:
        with socket.socket() as waiting:
            with no_descriptor_left():
                waiting.connect(("127.0.0.1", port))
                await until(lambda: "no client can be accepted" in caplog.text)
                await trio.sleep(0.3)
            waiting.sendall(b"?")
            waiting.setblocking(False)
            with trio.fail_after(30):
                await trio.lowlevel.wait_readable(waiting)
            assert waiting.recv(1) == b"?"
        assert caplog.text.count("no client can be accepted") == 1


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Within the block this process can open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
