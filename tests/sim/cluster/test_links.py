"""Virtual streams are streams: trio's own conformance checks, and what a real network does to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest
import trio
from trio.testing import check_half_closeable_stream

from oobleck.sim.cluster.determinism import VirtualTime, run_virtual
from oobleck.sim.cluster.links import VirtualLink, VirtualStream

Pair = tuple[VirtualStream, VirtualStream]


def run(test: Callable[[VirtualTime], Awaitable[None]]) -> None:
    """Run an async function in virtual time."""
    time = VirtualTime()
    run_virtual(partial(test, time), seed=0, horizon_s=1e6, time=time)


@pytest.mark.parametrize("latency_s", [0.0, 0.1])
def test_streams_keep_what_trio_promises_of_streams(latency_s: float):
    async def check(time: VirtualTime) -> None:
        async def open_pair() -> Pair:
            link = VirtualLink(time, latency_s=latency_s)
            return link.near, link.far

        async def open_clogged_pair() -> Pair:
            link = VirtualLink(time, latency_s=latency_s, window_bytes=1)
            for end in (link.near, link.far):
                await end.send_all(b"!")
            return link.near, link.far

        await check_half_closeable_stream(open_pair, open_clogged_pair)

    run(check)


def virtually(test: Callable[[VirtualTime], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of an async function that runs in virtual time."""

    def wrapper() -> None:
        run(test)

    wrapper.__name__ = test.__name__
    return wrapper


@virtually
async def test_bytes_take_the_latency_and_keep_their_order(time: VirtualTime):
    link = VirtualLink(time, latency_s=0.25)
    await link.near.send_all(b"ab")
    await link.near.send_all(b"cd")
    assert await link.far.receive_some(3) == b"abc"
    assert trio.current_time() == 0.25
    assert await link.far.receive_some() == b"d"


@virtually
async def test_a_lost_connection_loses_what_is_under_way_and_both_ends_hear_of_it(time: VirtualTime):
    link = VirtualLink(time, latency_s=1.0)
    await link.near.send_all(b"last words")
    link.cut()
    with pytest.raises(trio.BrokenResourceError):
        await link.near.send_all(b"more")
    for end in (link.near, link.far):
        with pytest.raises(trio.BrokenResourceError):
            await end.receive_some()
    assert trio.current_time() == 1.0


@virtually
async def test_a_held_link_lets_nothing_through_not_even_that_it_broke(time: VirtualTime):
    link = VirtualLink(time, latency_s=0.1)
    link.hold()
    await link.near.send_all(b"hello")
    link.near.close()
    with trio.move_on_after(1000) as scope:
        await link.far.receive_some()
    assert scope.cancelled_caught
    link.release()
    assert await link.far.receive_some() == b"hello"
    assert await link.far.receive_some() == b""


@virtually
async def test_a_full_window_holds_the_sender_back_until_bytes_are_taken(time: VirtualTime):
    link = VirtualLink(time, latency_s=0.0, window_bytes=4)
    await link.near.send_all(b"full")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.near.send_all, b"more")
        await trio.sleep(5)
        assert await link.far.receive_some() == b"full"
    assert await link.far.receive_some() == b"more"


@virtually
async def test_a_frozen_end_does_nothing_and_goes_on_where_it_stood(time: VirtualTime):
    link = VirtualLink(time, latency_s=0.1)
    heard: list[tuple[float, bytes]] = []

    async def listen() -> None:
        heard.append((trio.current_time(), await link.far.receive_some()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        await trio.sleep(1)
        link.far.freeze()
        nursery.start_soon(link.far.send_all, b"late")
        await link.near.send_all(b"hello")
        await trio.sleep(10)
        assert heard == []
        link.far.freeze(False)
        assert await link.near.receive_some() == b"late"
    assert [data for _, data in heard] == [b"hello"]
    assert trio.current_time() == pytest.approx(11.1)
