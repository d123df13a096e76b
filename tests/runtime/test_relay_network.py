"""Links between agents over real sockets: streams as trio has them, and closed to all who lack the ticket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from oobleck.runtime.relay_network import RelaySockets, SealedStream

HOST = "127.0.0.1"
KEYS = (b"a" * 16, b"b" * 16)


def sealed(near: trio.abc.Stream, far: trio.abc.Stream) -> tuple[SealedStream, SealedStream]:
    one, other = KEYS
    return SealedStream(near, send_key=one, receive_key=other), SealedStream(far, send_key=other, receive_key=one)


async def test_a_sealed_stream_is_a_stream():
    async def pair() -> tuple[SealedStream, SealedStream]:
        return sealed(*trio.testing.memory_stream_pair())

    async def clogged() -> tuple[SealedStream, SealedStream]:
        return sealed(*trio.testing.lockstep_stream_pair())

    await trio.testing.check_two_way_stream(pair, clogged)


async def linked(network: RelaySockets, ticket: Callable[[bytes], bytes] = lambda ticket: ticket):
    """A caller's and a listener's end."""
    listener = await network.listen(HOST)
    ends: dict[str, trio.abc.Stream] = {}

    async def call() -> None:
        ends["caller"] = await network.dial(listener.door.host, listener.door.port, ticket(listener.door.ticket))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        ends["listener"] = await listener.greet(await listener.accept())
    await listener.aclose()
    return ends["caller"], ends["listener"]


async def test_both_sides_hear_each_other():
    caller, listener = await linked(RelaySockets())
    data = bytes(range(256)) * 20_000  # several pieces
    async with caller, listener, trio.open_nursery() as nursery:
        nursery.start_soon(caller.send_all, data)
        heard = b""
        while len(heard) < len(data):
            heard += await listener.receive_some()
        assert heard == data
        nursery.start_soon(listener.send_all, b"well")
        assert await caller.receive_some(2) == b"we"
        assert await caller.receive_some() == b"ll"


async def test_a_name_or_an_interface_will_do_as_an_address():
    for address in ("localhost", "lo"):
        listener = await RelaySockets().listen(address)
        assert listener.door.host in ("127.0.0.1", "::1")
        await listener.aclose()
    with pytest.raises(OSError, match=r".+"):
        await RelaySockets().listen("no-such-host.invalid")


async def test_who_lacks_the_ticket_hears_nothing_and_is_not_heard():
    caller, listener = await linked(RelaySockets(), ticket=lambda ticket: bytes(len(ticket)))
    async with caller, listener:
        for sender, receiver in ((caller, listener), (listener, caller)):
            await sender.send_all(b"let me in")
            with pytest.raises(trio.BrokenResourceError, match="not sealed"):
                await receiver.receive_some()


async def test_what_was_changed_repeated_or_left_out_ends_the_link():
    def change(first: bytes, second: bytes) -> bytes:
        return first[:-1] + bytes([first[-1] ^ 1]) + second

    def repeat(first: bytes, second: bytes) -> bytes:
        return first + first + second

    def leave_out(first: bytes, second: bytes) -> bytes:
        return second

    for meddle in (change, repeat, leave_out):
        written, read = trio.testing.memory_stream_pair()
        sender, _ = sealed(written, read)
        pieces = []
        for data in (b"one", b"two"):
            await sender.send_all(data)
            pieces.append(bytes(await read.receive_some()))
        near, far = trio.testing.memory_stream_pair()
        _, receiver = sealed(near, far)
        await near.send_all(meddle(*pieces))
        for intact in {change: (), repeat: (b"one",), leave_out: ()}[meddle]:
            assert await receiver.receive_some() == intact
        with pytest.raises(trio.BrokenResourceError, match="not sealed"):
            await receiver.receive_some()


async def test_a_piece_that_is_too_long_is_refused_before_it_is_read():
    near, far = trio.testing.memory_stream_pair()
    _, receiver = sealed(near, far)
    await near.send_all(b"\xff\xff\xff\xff")
    with pytest.raises(trio.BrokenResourceError, match="a piece of 4294967295 bytes"):
        await receiver.receive_some()


async def test_a_caller_that_hangs_up_or_says_nothing_is_let_go(autojump_clock: trio.testing.MockClock):
    listener = await RelaySockets().listen(HOST)
    connect = partial(socket.create_connection, (listener.door.host, listener.door.port))
    connect().close()
    async with await listener.accept() as caller:
        with pytest.raises(trio.BrokenResourceError, match="hung up"):
            await listener.greet(caller)
    with connect():
        async with await listener.accept() as caller:
            with pytest.raises(trio.TooSlowError):
                await listener.greet(caller)
    await listener.aclose()
