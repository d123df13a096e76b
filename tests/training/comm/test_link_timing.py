"""Two workers time the link between them, over real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from oobleck.control.steps import Interrupted, PeerLost
from oobleck.planner.profiles import fit_link
from oobleck.training.comm import Waiter, time_link
from oobleck.training.comm.link_timing import num_round_trips
from tests.training.comm.fake_nccl import FakeLibrary
from tests.training.fake_cuda import FakeCuda
from tests.training.freezing_peer import A, B
from tests.training.table import LinkedTable, acquaint
from tools.gpu.ranks import await_aborts


@pytest.fixture(params=[False, True], ids=["direct", "staged"])
def tables(request: pytest.FixtureRequest) -> Iterator[tuple[LinkedTable, LinkedTable]]:
    """Two workers that know each other; staged, their tensors go as those of GPUs that share a device."""
    made = LinkedTable(A, stages=request.param), LinkedTable(B, stages=request.param)
    acquaint(made)
    yield made
    for table in made:
        table.links.close()


def never() -> bool:
    return False


def test_the_one_that_leads_has_the_seconds_of_growing_messages(tables: tuple[LinkedTable, LinkedTable]) -> None:
    before = set(threading.enumerate())
    for _ in range(2):  # it may be asked for again
        seconds = timed_by(*tables)
        assert len(seconds) >= 2  # more, unless the machine is so busy that a link seems slow
        assert all(time_s > 0 for time_s in seconds.values())
        assert 1e5 < fit_link(seconds).bytes_per_s < 1e12
    for table in tables:
        assert table.groups.num_received == 0
    begun = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in begun if thread.name.startswith("receive from") and waits(thread)]


@pytest.mark.parametrize(
    ("seconds", "size", "times"),
    [
        ({}, 1 << 10, 8),
        ({1 << 10: 1.0}, 1 << 14, 3),  # a line needs two points
        ({1 << 10: 0.001, 1 << 14: 0.016}, 1 << 17, 0),  # 131 ms each
        ({1 << 10: 2.4e-3, 1 << 14: 1.7e-3}, 1 << 17, 8),  # on a busy machine
        ({1 << 10: 5e-3, 1 << 14: 5.1e-3}, 1 << 17, 5),
        ({1 << 10: 1e-5, 1 << 14: 2e-5, 1 << 17: 1e-4, 1 << 20: 1e-3}, 1 << 23, 4),
        ({1 << 10: 1e-5, 1 << 14: 2e-5, 1 << 17: 1e-4, 1 << 20: 1e-3}, 1 << 26, 0),
    ],
)
def test_larger_messages_are_timed_until_they_would_fill_the_link(
    seconds: dict[int, float], size: int, times: int
) -> None:
    assert num_round_trips(seconds, size) == times


def timed_by(leader: LinkedTable, other: LinkedTable) -> dict[int, float]:
    """Have both time their link; what the leader finds."""
    ends = [
        partial(time_link, one.groups, one.worker_id, peer.worker_id, leads=leads, timeout_s=30.0, interrupted=never)
        for one, peer, leads in ((leader, other, True), (other, leader, False))
    ]
    with ThreadPoolExecutor(2) as pool:
        seconds, nothing = (future.result(60.0) for future in [pool.submit(end) for end in ends])
    assert nothing == {}
    return seconds


@pytest.mark.parametrize("degree", [1, 2])
def test_between_gpus_it_times_what_carries_messages_between_stages(
    monkeypatch: pytest.MonkeyPatch, degree: int
) -> None:
    """However many devices share a stage."""
    FakeCuda(monkeypatch)
    gpu = torch.device("cuda", 0)
    libraries = FakeLibrary.of(["0", "1"])
    tables = [
        LinkedTable(worker_id, waiter=Waiter(gpu), stages=True, degree=degree, library=library)
        for worker_id, library in zip((A, B), libraries, strict=True)
    ]
    acquaint(tables)
    assert len(timed_by(*tables)) >= 2
    await_aborts()
    for library in libraries:
        assert [name.split("/")[-1] for name in library.joined] == ["0-1", "1-0"]
        assert all(nccl.is_aborted for nccl in library.joined.values())
    for table in tables:
        table.links.close()


def waits(thread: threading.Thread) -> bool:
    thread.join(20.0)
    return thread.is_alive()


def test_a_peer_that_does_not_come_is_not_waited_for(tables: tuple[LinkedTable, LinkedTable]) -> None:
    began_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"no answer from .* within 0\.5 s"):
        time_link(tables[0].groups, A, B, leads=True, timeout_s=0.5, interrupted=never)
    assert time.monotonic() - began_s < 20.0


def test_a_plan_that_comes_ends_it(tables: tuple[LinkedTable, LinkedTable]) -> None:
    has_plan = threading.Event()

    def give_plan() -> None:
        has_plan.set()
        tables[0].waiter.announce()

    threading.Timer(0.2, give_plan).start()
    with pytest.raises(Interrupted):
        time_link(tables[0].groups, A, B, leads=True, timeout_s=60.0, interrupted=has_plan.is_set)
