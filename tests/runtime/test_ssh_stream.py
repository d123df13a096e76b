"""Forwarded UNIX sockets as trio streams: trio's own conformance checks, over real connections."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from .ssh_servers import SERVERS, reach

_CLOGGED_AFTER_S = 0.35
"""A sender that could send nothing for so long is taken for clogged; buffers move within milliseconds, where the
machine is not busy."""

_PIECE = b"\0" * (1 << 18)


async def clog(sender: trio.abc.SendStream) -> None:
    """Send until the buffers of both ends, and of all between, are full."""
    with trio.CancelScope() as scope:
        while True:
            scope.deadline = trio.current_time() + _CLOGGED_AFTER_S
            await sender.send_all(_PIECE)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_forwarded_socket_is_a_half_closeable_stream(server, tmp_path):
    """One direction is clogged at a time: SSH delivers what is on its way before it tells of a close."""
    async with reach(server, tmp_path) as reachable:

        async def pair():
            return await reachable.stream_pair(tmp_path)

        async def flipped():
            return (await pair())[::-1]

        async def clogged():
            both = await pair()
            await clog(both[0])
            return both

        async def clogged_backwards():
            both = await flipped()
            await clog(both[0])
            return both

        await trio.testing.check_half_closeable_stream(pair, None)
        await trio.testing.check_one_way_stream(pair, clogged)
        await trio.testing.check_one_way_stream(flipped, clogged_backwards)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_blocked_sender_is_told_that_another_task_ends_its_stream(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        for block in ("send_all", "wait_send_all_might_not_block"):
            stream, owner = await reachable.stream_pair(tmp_path)
            await clog(stream)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(getattr(stream, block), *([b"x"] if block == "send_all" else []))
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await stream.send_eof()
                nursery.cancel_scope.cancel()
            await stream.aclose()
            await owner.aclose()
