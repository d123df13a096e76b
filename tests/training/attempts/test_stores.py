"""The store in which ranks meet: a rank that comes before rank 0 waits for it, and no longer than it must."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from oobleck.training.attempts import connect_once_served
from oobleck.training.attempts.stores import await_served

REFUSED_S = 0.3
"""Torch's client (2.13) rests at least this long after a connection that was refused."""


@pytest.fixture
def unserved() -> Iterator[socket.socket]:
    """A port that is kept, as by the agent of rank 0, and on which nothing listens."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield sock


@pytest.fixture
def plain_again() -> Iterator[None]:
    plain = distributed_c10d.rendezvous
    yield
    distributed_c10d.rendezvous = plain


def test_a_rank_waits_until_its_store_is_served(unserved: socket.socket):
    waiting = threading.Thread(target=await_served, args=(unserved.getsockname(), 2, lambda: False))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    unserved.listen()
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_rank_stops_waiting_once_its_attempt_is_over(unserved: socket.socket):
    asked = iter([False, False, True])
    with pytest.raises(ConnectionAbortedError, match=str(unserved.getsockname()[1])):
        await_served(unserved.getsockname(), 2, lambda: next(asked))


@pytest.mark.usefixtures("plain_again")
def test_a_rank_that_comes_before_rank_0_has_its_store_at_once(
    unserved: socket.socket, monkeypatch: pytest.MonkeyPatch
):
    port = unserved.getsockname()[1]
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    connect_once_served()
    connect_once_served()  # which wraps torch's own again, not the wrapper
    seconds = []
    for number in range(5):
        served: list[float] = []
        stores: list[dist.TCPStore] = []

        def serve(served: list[float] = served, stores: list[dist.TCPStore] = stores) -> None:
            time.sleep(0.05)
            stores.append(dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False))
            served.append(time.monotonic())

        server = threading.Thread(target=serve)
        server.start()
        store, rank, world = next(iter(distributed_c10d.rendezvous("env://")))
        came_s = time.monotonic()
        server.join(60)
        store.set("met", str(number))
        assert (rank, world, stores[0].get("met")) == (1, 2, str(number).encode())
        seconds.append(came_s - served[0])
        if seconds[-1] < REFUSED_S / 2:
            return
        del store, stores
    pytest.fail(f"every time, it had the store {min(seconds):.2f} s after it was served, or later")
