"""Forwarded UNIX sockets as trio streams: trio's own conformance checks, over real connections."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from .ssh_servers import SERVERS, Reachable, reach

_PIECE = b"\0" * (1 << 12)

_ROUND_TRIPS = 3
"""By the first, all that the server has sent is here; by the second, it has heard what was answered to that; before it
answers the third, it has looked once more at what it may then read and write."""


async def clog(sender: trio.abc.SendStream, reachable: Reachable) -> None:
    """Send until the buffers of both ends, and of all between, are full.

    A sender that is blocked tells little: it may be that the server has not yet come to read, or that it has read
    some and the kernel wakes a sender only when three quarters of its buffer are free. Both take more of one who
    sends anew. So the stream is clogged when it takes nothing although the server has nothing left to do.
    """
    while await _send_until_blocked(sender) > 0:
        for _ in range(_ROUND_TRIPS):
            await reachable.ask_something()


async def _send_until_blocked(sender: trio.abc.SendStream) -> int:
    """How many pieces could be sent."""
    num_sent = 0

    async def send() -> None:
        nonlocal num_sent
        while True:
            await sender.send_all(_PIECE)
            num_sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    return num_sent


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
            await clog(both[0], reachable)
            return both

        async def clogged_backwards():
            both = await flipped()
            await clog(both[0], reachable)
            return both

        await trio.testing.check_half_closeable_stream(pair, None)
        await trio.testing.check_one_way_stream(pair, clogged)
        await trio.testing.check_one_way_stream(flipped, clogged_backwards)


@pytest.mark.parametrize("server", SERVERS)
async def test_a_blocked_sender_is_told_that_another_task_ends_its_stream(server, tmp_path):
    async with reach(server, tmp_path) as reachable:
        for block in ("send_all", "wait_send_all_might_not_block"):
            stream, owner = await reachable.stream_pair(tmp_path)
            await clog(stream, reachable)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(getattr(stream, block), *([b"x"] if block == "send_all" else []))
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(trio.BusyResourceError):
                    await stream.send_eof()
                nursery.cancel_scope.cancel()
            await stream.aclose()
            await owner.aclose()
