"""Links between workers, over real sockets."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from oobleck.control.protocol import GroupValue, LinkChallenge, LinkHello, LinkMessage, WorkerAddress
from oobleck.control.steps import PeerLost
from oobleck.errors import ConfigError
from oobleck.planner import WorkerId
from oobleck.training.comm.peer_links import PeerLinks
from oobleck.wire import FrameDecoder, encode_frame
from tests.e2e.connections import silence_connections

A, B, C = (WorkerId(node=f"n{index}", device=0) for index in range(3))
DEADLINE_S = 60.0


def said(number: int, *, size_bytes: int = 1) -> GroupValue:
    return GroupValue(generation=1, key=str(number), value=bytes(size_bytes))


class Peer:
    """A worker's links, and what arrives by them."""

    def __init__(self, worker_id: WorkerId, address: str = "127.0.0.1") -> None:
        self.heard: queue.SimpleQueue[tuple[WorkerId, GroupValue]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[WorkerId] = queue.SimpleQueue()
        self.links = PeerLinks(
            worker_id, address, handle=lambda sender, message: self.heard.put((sender, message)), lost=self.lost.put
        )

    def hear(self, count: int = 1) -> list[tuple[WorkerId, str]]:
        heard = [self.heard.get(timeout=DEADLINE_S) for _ in range(count)]
        return [(sender, message.key) for sender, message in heard]


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    made: list[Peer] = []

    def make(worker_id: WorkerId, address: str = "127.0.0.1") -> Peer:
        made.append(Peer(worker_id, address))
        return made[-1]

    yield make
    for each in made:
        each.links.close()


def acquainted(*peers: Peer) -> None:
    for each in peers:
        each.links.know(other.links.address for other in peers)


def until(ready: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_messages_arrive_in_their_order_both_ways_over_one_connection(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    for number in range(100):
        a.links.send(B, said(number, size_bytes=number * 1000))
    assert b.hear(100) == [(A, str(number)) for number in range(100)]
    b.links.send(A, said(7))
    assert a.hear() == [(B, "7")]
    assert (a.links.num_links, b.links.num_links) == (1, 1)


def test_two_who_call_each_other_at_once_hear_each_other(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    barrier = threading.Barrier(2)

    def talk(mine: Peer, other: WorkerId) -> None:
        barrier.wait()
        for number in range(20):
            mine.links.send(other, said(number))

    threads = [threading.Thread(target=talk, args=args) for args in ((a, B), (b, A))]
    for thread in threads:
        thread.start()
    assert b.hear(20) == [(A, str(number)) for number in range(20)]
    assert a.hear(20) == [(B, str(number)) for number in range(20)]
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("address", ["localhost", "lo"])
def test_a_name_or_an_interface_says_where_to_listen(address: str, peer: Callable[..., Peer]):
    assert peer(A, address).links.address.host == "127.0.0.1"


def test_a_useless_address_is_refused():
    with pytest.raises(ConfigError, match="address="):
        Peer(A, "192.0.2.1")  # RFC 5737: an address of nobody


def test_whom_nobody_has_told_of_cannot_be_spoken_to(peer: Callable[..., Peer]):
    with pytest.raises(PeerLost, match="n1:0 cannot be reached"):
        peer(A).links.send(B, said(1))


def test_a_peer_that_ends_is_lost_and_so_is_one_that_was_never_there(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    a.links.send(B, said(1))
    assert b.hear() == [(A, "1")]
    b.links.close()
    assert a.lost.get(timeout=DEADLINE_S) == B
    a.links.send(B, said(2))
    assert a.lost.get(timeout=DEADLINE_S) == B
    assert a.links.num_links == 0


def test_a_caller_without_the_ticket_is_not_heard(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    a.links.know([replace(b.links.address, ticket=bytes(16))])
    a.links.send(B, said(1))
    assert a.lost.get(timeout=DEADLINE_S) == B
    assert b.heard.empty()
    until(lambda: b.links.num_links == 0)


def test_a_listener_without_the_ticket_is_told_nothing(peer: Callable[..., Peer]):
    a = peer(A)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        a.links.know([WorkerAddress(worker_id=B, host=host, port=port, ticket=bytes(16))])
        a.links.send(B, said(1, size_bytes=4000))
        caller, _ = listener.accept()
        with caller:
            caller.settimeout(DEADLINE_S)
            caller.sendall(encode_frame(LinkChallenge(nonce=bytes(16))))
            heard: list[LinkMessage] = []
            decoder: FrameDecoder[LinkMessage] = FrameDecoder(LinkMessage)
            while not heard:
                heard += decoder.feed(caller.recv(1 << 16))
            assert [type(message) for message in heard] == [LinkHello]
            caller.sendall(encode_frame(LinkChallenge(nonce=bytes(16))))  # anything but a proof
            assert a.lost.get(timeout=DEADLINE_S) == B
            assert caller.recv(1) == b""


@pytest.mark.parametrize("said_first", [b"GET / HTTP/1.0\r\n\r\n", encode_frame(said(1)), b"\0\0\xff\xff", b""])
def test_a_stranger_that_speaks_otherwise_is_hung_up_on(said_first: bytes, peer: Callable[..., Peer]):
    a = peer(A)
    with socket.create_connection((a.links.address.host, a.links.address.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(said_first)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass
    until(lambda: a.links.num_links == 0)
    assert a.heard.empty()
    assert a.lost.empty()


def test_strangers_that_say_nothing_take_no_more_than_so_many_descriptors(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    where = (a.links.address.host, a.links.address.port)
    strangers = [socket.create_connection(where, timeout=DEADLINE_S) for _ in range(200)]
    b.links.send(A, said(1))
    assert a.hear() == [(B, "1")]
    until(lambda: a.links.num_links < 150)
    for each in strangers:
        each.close()


def test_a_link_that_is_not_used_is_ended_without_a_loss_and_made_again(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    for number in range(20):
        a.links.trim()
        a.links.trim()
        b.links.send(A, said(number))  # it may be on its way by the old link
        a.links.send(B, said(number))
        assert (a.hear(), b.hear()) == ([(B, str(number))], [(A, str(number))])
    for _ in range(2):
        a.links.trim()
        b.links.trim()
    until(lambda: a.links.num_links == b.links.num_links == 0)
    assert a.lost.empty()
    assert b.lost.empty()


def test_a_link_that_is_used_is_kept(peer: Callable[..., Peer]):
    a, b = peer(A), peer(B)
    acquainted(a, b)
    for number in range(5):
        a.links.send(B, said(number))
        assert b.hear() == [(A, str(number))]
        a.links.trim()
        b.links.trim()
    assert (a.links.num_links, b.links.num_links) == (1, 1)


def test_links_that_are_renewed_carry_what_a_silent_one_did_not(peer: Callable[..., Peer]):
    """A network may drop what is sent without an error at either end; only another connection helps."""
    a, b = peer(A), peer(B)
    acquainted(a, b)
    a.links.send(B, said(1))
    assert b.hear() == [(A, "1")]
    assert silence_connections(os.getpid(), port=b.links.address.port) == 2
    a.links.send(B, said(2))
    with pytest.raises(queue.Empty):
        b.heard.get(timeout=0.2)
    for each in (a, b):
        each.links.renew()
    a.links.send(B, said(3))
    b.links.send(A, said(4))
    assert (b.hear(), a.hear()) == ([(A, "3")], [(B, "4")])


def test_a_peer_that_leaves_takes_its_links_along(peer: Callable[..., Peer]):
    a, b, c = peer(A), peer(B), peer(C)
    acquainted(a, b, c)
    for other, who in ((b, B), (c, C)):
        a.links.send(who, said(1))
        assert other.hear() == [(A, "1")]
    a.links.forget([B.node])
    assert a.links.num_links == 1
    with pytest.raises(PeerLost, match="its address is not known"):
        a.links.send(B, said(2))
    assert b.lost.get(timeout=DEADLINE_S) == A
    a.links.send(C, said(2))
    assert c.hear() == [(A, "2")]
    assert a.lost.empty()


def test_a_worker_that_was_started_again_is_spoken_to_by_its_new_address(peer: Callable[..., Peer]):
    a, old, new = peer(A), peer(B), peer(B)
    acquainted(a, old)
    old.links.send(A, said(1))
    assert a.hear() == [(B, "1")]
    acquainted(a, new)
    a.links.send(B, said(2))
    assert new.hear() == [(A, "2")]
    assert old.lost.get(timeout=DEADLINE_S) == A  # what it sends before it knows is lost with the link
    old.links.send(A, said(3))  # a process that lives on is heard, and not answered
    assert a.hear() == [(B, "3")]
    a.links.send(B, said(4))
    assert new.hear() == [(A, "4")]
    assert old.heard.empty()


def test_nothing_is_left_of_links_that_are_closed(peer: Callable[..., Peer]):
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = open_files(), threading.active_count()
    a, b = peer(A), peer(B)
    acquainted(a, b)
    a.links.send(B, said(1))
    assert b.hear() == [(A, "1")]
    a.links.close()
    b.links.close()
    until(lambda: open_files() <= before and threading.active_count() <= threads)
